"""What one request owns besides its KV caches: codebooks, hyper rows, positions.

A `ZipState` is the last entry of the prompt cache that `model.make_cache()` returns, and obeys mlx-lm's cache
protocol, so mlx-lm's own save, load, trim and copy carry it. Codebooks are a function of the ids seen, so a saved
state holds only the codec's parameters and the id log; rows are encoded again at the next model call.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.hyper import RowTable

STATE_VERSION = 1


@dataclass(frozen=True)
class Advance:
    """What one call's ids installed: live [B] entries after it, available [B, L] once each id had been consumed."""

    live: np.ndarray
    available: np.ndarray


class ZipState:
    """Codebooks and rows of B sequences, one codebook each.

    books: one `Codebook` per sequence. offset: ids consumed per sequence, left padding included; equals the KV
    caches' length. long_rope: the factor set the KV caches were built with (LongRoPE only).
    """

    def __init__(self, params: CodecParams, left_padding: Sequence[int] = (0,)) -> None:
        self.params = params
        self.left_padding = np.asarray(left_padding, dtype=np.int64)
        self.books = [Codebook(params) for _ in left_padding]
        self.offset = 0
        self.long_rope = False
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Rows bind to a model at its next call."""
        batch = len(self.books)
        self.inputs, self.outputs = RowTable(batch), RowTable(batch)
        self.encoded_inputs = np.zeros((batch, self.params.codebook_size), dtype=bool)
        self.encoded_outputs = np.zeros(batch, dtype=np.int64)

    # ---- one model call

    def advance(self, ids: np.ndarray) -> Advance:
        """Learns ids [B, L] uint32: all of them or, when any is illegal, none.

        Raises `CodecError` for an id that is neither a base id nor an installed hypertoken, `ModelError` when the
        batch size is not this state's.
        """
        batch, length = ids.shape
        if batch != len(self.books):
            raise ModelError(f"the cache was made for {len(self.books)} sequence(s), the ids have {batch}")
        first = self._padding_columns(self.offset, length)
        before = np.array([len(book) for book in self.books])
        marks = [book.mark() for book in self.books]
        available = np.zeros((batch, length), dtype=np.int64)
        try:
            for b, book in enumerate(self.books):
                real = ids[b, first[b] :]
                new = book.push(int(real[0]) if len(real) == 1 else real)
                if len(new):
                    available[b, first[b] + new.at] = 1
        except CodecError:
            for book, mark in zip(self.books, marks, strict=True):
                book.rewind(mark)
            raise
        self.offset += length
        live = np.array([len(book) for book in self.books])
        return Advance(live, before[:, None] + np.cumsum(available, axis=1))

    def base_positions(self, ids: np.ndarray) -> np.ndarray:
        """Positions [B, L] int32 of the last L ids: the base index of each one's last constituent, 0 in the padding.

        Source: position mode `base_token_end` of zip2zip 0.2.0.
        """
        out = np.zeros(ids.shape, dtype=np.int32)
        first = self._padding_columns(self.offset - ids.shape[1], ids.shape[1])
        for b, book in enumerate(self.books):
            spans = np.asarray(book.spans(ids[b, first[b] :]))
            out[b, first[b] :] = book.base_length - spans.sum() + np.cumsum(spans) - 1
        return out

    def _padding_columns(self, begin: int, length: int) -> np.ndarray:
        """[B]: how many of the `length` columns from `begin` on are left padding."""
        return np.clip(self.left_padding - begin, 0, length)

    def log(self, pad_id: int) -> np.ndarray:
        """Every id consumed, [B, offset] uint32, with `pad_id` in the left padding."""
        out = np.full((len(self.books), self.offset), pad_id, dtype=np.uint32)
        for b, book in enumerate(self.books):
            out[b, self.offset - book.mark() :] = book.ids
        return out

    def missing_outputs(self) -> tuple[np.ndarray, np.ndarray]:
        """(sequence [N], slot [N]) of installed entries that have no output row yet."""
        return _pairs([np.arange(done, len(b)) for done, b in zip(self.encoded_outputs, self.books, strict=True)])

    def missing_inputs(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sequence [N], slot [N]) among slots [B, L] (-1: not a hypertoken) that have no input row yet."""
        read = [np.unique(row[row >= 0]) for row in slots]
        return _pairs([row[~done[row]] for row, done in zip(read, self.encoded_inputs, strict=True)])

    def entries(self, sequence: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """base_ids [N, merge_size] and lengths [N] of the entries at (sequence, slot)."""
        base_ids = np.empty((len(slots), self.params.merge_size), dtype=np.uint32)
        lengths = np.empty(len(slots), dtype=np.int64)
        for b in np.unique(sequence):
            chosen = slots[sequence == b]
            first = int(chosen.min())
            rows = self.books[b].rows(first, int(chosen.max()) - first + 1)
            base_ids[sequence == b], lengths[sequence == b] = (array[chosen - first] for array in rows)
        return base_ids, lengths

    # ---- mlx-lm's cache protocol

    @property
    def state(self) -> tuple[Any, ...]:
        """(version, params as JSON, id logs end to end, their lengths, left padding, offset, long_rope)."""
        logs = [np.asarray(book.ids) for book in self.books]
        return (
            STATE_VERSION,
            json.dumps(dataclasses.asdict(self.params), sort_keys=True),
            mx.array(np.concatenate(logs)),
            mx.array(np.array([len(log) for log in logs], dtype=np.int64)),
            mx.array(self.left_padding),
            self.offset,
            self.long_rope,
        )

    @state.setter
    def state(self, value: Sequence[Any]) -> None:
        version, params, ids, lengths, left_padding, offset, long_rope = value
        if version != STATE_VERSION:
            raise ModelError(f"saved cache: ZipState version {version} is not {STATE_VERSION}; make the cache anew")
        codec, padding, log = _params_from_json(params), np.array(left_padding), np.array(ids)
        expected = np.maximum(0, int(offset) - padding)
        if np.any(padding < 0) or not np.array_equal(np.array(lengths), expected) or len(log) != expected.sum():
            raise ModelError(f"saved cache: id logs of {np.array(lengths).tolist()} ids do not fit offset {offset}")
        books = [Codebook(codec) for _ in padding]
        for book, part in zip(books, np.split(log, np.cumsum(expected)[:-1]), strict=True):
            book.push(part)
        self.params, self.left_padding, self.books = codec, padding, books
        self.offset, self.long_rope = int(offset), bool(long_rope)
        self._forget_rows()

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> ZipState:
        """Rebuilds a saved state by replaying its id logs. Raises `CodecError` or `ModelError` if it is damaged."""
        made = cls.__new__(cls)
        made.state = state
        return made

    def is_trimmable(self) -> bool:
        """Always: codebooks rewind by undo records."""
        return True

    def trim(self, n: int) -> int:
        """Forgets the last n ids of every sequence, n >= 0; returns how many were forgotten."""
        if n < 0:
            raise ModelError(f"cannot trim {n} ids from a cache")
        n = min(n, self.offset)
        self.offset -= n
        for b, book in enumerate(self.books):
            book.rewind(max(0, self.offset - int(self.left_padding[b])))
            self.encoded_outputs[b] = min(self.encoded_outputs[b], len(book))
            self.encoded_inputs[b, len(book) :] = False
        return n

    def size(self) -> int:
        """Ids consumed per sequence."""
        return self.offset

    def empty(self) -> bool:
        """Whether no id has been consumed."""
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the row tables and id logs."""
        return self.inputs.nbytes + self.outputs.nbytes + sum(4 * book.mark() for book in self.books)

    def __deepcopy__(self, memo: dict[int, Any]) -> ZipState:
        twin = ZipState.__new__(ZipState)
        twin.params, twin.left_padding = self.params, self.left_padding.copy()
        twin.books = [book.copy() for book in self.books]
        twin.offset, twin.long_rope = self.offset, self.long_rope
        twin.inputs, twin.outputs = self.inputs.copy(), self.outputs.copy()
        twin.encoded_inputs = self.encoded_inputs.copy()
        twin.encoded_outputs = self.encoded_outputs.copy()
        return twin

    __copy__ = None  # a shallow copy would share codebooks; use copy.deepcopy


def find_state(cache: Sequence[Any]) -> ZipState | None:
    """The cache's `ZipState`, or None for a plain model's cache."""
    return next((entry for entry in cache if isinstance(entry, ZipState)), None)


def _pairs(slots: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Slots per sequence to (sequence [N], slot [N])."""
    return np.repeat(np.arange(len(slots)), [len(row) for row in slots]), np.concatenate(slots)


def _params_from_json(text: str) -> CodecParams:
    try:
        fields = json.loads(text)
        start = fields["start"] and tuple(tuple(entry) for entry in fields["start"])
        return CodecParams(**{**fields, "disabled_ids": tuple(fields["disabled_ids"]), "start": start})
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"saved cache: its codec parameters cannot be read: {error}") from error
