"""`ZipState`: the codebooks, hyper rows and positions of one request.

A `ZipState` is the last entry of the prompt cache that `model.make_cache()` returns, and has the methods that mlx-lm
expects of a cache entry, so mlx-lm's own save, load, trim and copy work on it. Codebooks are a function of the ids
read, so a saved state holds only the codec's parameters, the log of ids read and the fingerprints of packs with tuned
rows. After loading, rows are encoded again, or taken from the pack, at the next model call.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.params import params_from_json, params_to_json
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.models.rows.sequence_rows import EvictedEntry, SequenceRows, entries_differ, evicted_in_call
from mlx_zip.packs.pack import Pack, Tuned, resolve_pack, tuned_fingerprint

STATE_VERSION, TUNED_VERSION = 1, 2

AnswerIds = dict[str, tuple[int, ...]]  # text -> base ids
HostIds = int | np.ndarray  # ids of one call: [B, L] uint32, or a number for one id of a single sequence


class Advance(NamedTuple):
    """The numbers of entries that are installed after a call.

    live [B]: after the whole call. available [B, L]: after each id of the call. Both are plain numbers if the call had
    one id of one sequence. evicted: entries that were evicted within a call of several ids, under a policy other than
    freeze.
    """

    live: np.ndarray | int
    available: np.ndarray | int
    evicted: tuple[EvictedEntry, ...] = ()


class ZipState(SequenceRows):
    """Codebooks, rows and positions of B sequences, one codebook each.

    params: the codec of all sequences, or one per sequence; these may differ in their start entries only. left_padding
    [B]: per sequence, how many of its first ids are padding. offset: ids read per sequence, left padding included;
    equals the KV caches' length. long_rope: whether the KV caches were filled with LongRoPE's long factors.
    row_answers: per sequence, text -> base ids of each answer that was generated with the cache; copied with the state,
    but not saved.

    second_bodies: how many steps of generation ran the decoder's body twice (`mlx_zip.models.two_part_step`). submit: a
    model call calls it with arrays that are final, so that a decode loop can have them computed while the rest of the
    call is built; by default it does nothing. second_bodies and submit are neither saved nor copied.
    """

    def __init__(
        self,
        params: CodecParams | Sequence[CodecParams],
        left_padding: Sequence[int] = (0,),
        tuned: Sequence[Tuned] | None = None,
    ) -> None:
        padding = [int(n) for n in left_padding]
        self._set_up_fields(
            _make_codebooks(params, len(padding)), [None] * len(padding) if tuned is None else tuned, padding
        )

    def _set_up_fields(
        self,
        books: list[Codebook],
        tuned: Sequence[Tuned],
        left_padding: list[int],
        offset: int = 0,
        long_rope: bool = False,
    ) -> None:
        """Sets all fields for these codebooks, with empty row tables and no answers."""
        self.books, self.tuned, self.left_padding = books, list(tuned), left_padding
        self.offset, self.long_rope = offset, long_rope
        self.row_answers: list[AnswerIds] = [{} for _ in books]
        self._reset_loop_fields()
        self._reset_spans()
        self._clear_rows(books[0].params.codebook_size, shared=len(books) > 1)

    @property
    def params(self) -> CodecParams:
        """The codec of every sequence, start entries included. Sequence b's own is `books[b].params`.

        Raises `ModelError` if the sequences have different start entries, because they then have different codecs.
        """
        first = self.books[0].params
        if any(book.params is not first and book.params != first for book in self.books):
            raise ModelError("the sequences of this cache began with different packs: read each book's params")
        return first

    @property
    def answers(self) -> AnswerIds:
        """The answers of the first sequence, as a map to which answers can be added."""
        return self.row_answers[0]

    def fits_codec(self, params: CodecParams) -> bool:
        """Returns whether a model with this codec can continue this state: all but the start entries must be equal."""
        if params is not self._fitting_codec and self.books[0].params.is_equal_except_start(params):
            self._fitting_codec = params  # every step asks about the same codec again
        return params is self._fitting_codec

    def __repr__(self) -> str:
        """Returns sizes per sequence, never arrays."""
        sizes = [(book.mark(), len(book), book.base_length) for book in self.books]
        if len(sizes) == 1:
            return "<ZipState: {} ids, {} entries, {} base tokens>".format(*sizes[0])
        ids, entries, base = (list(part) for part in zip(*sizes, strict=True))
        return f"<ZipState of {len(sizes)} sequences: {ids} ids, {entries} entries, {base} base tokens>"

    def _reset_spans(self) -> None:
        shape = len(self.books), self.books[0].params.codebook_size
        self._spans, self._span_counts = np.zeros(shape, np.int32), [0] * len(self.books)

    def _reset_loop_fields(self) -> None:
        self.second_bodies = 0
        self._fitting_codec: CodecParams | None = None  # a codec that `fits_codec` has found to fit
        self.submit: Callable[..., None] = _leave_lazy

    def bind_start_packs(self, packs: Sequence[Any]) -> None:
        """Uses the tuned rows of the packs that the sequences of a saved state began with.

        packs: one per sequence; None leaves a sequence unchanged. Raises `ModelError` if a sequence began with another
        pack, `DataError` if a file is not a pack.
        """
        given = [None if pack is None else resolve_pack(pack) for pack in packs]
        self.tuned = [_tuned_rows_of_pack(*one) for one in zip(self.books, self.tuned, given, strict=True)]

    # ---- one model call

    def takes_single_id(self) -> bool:
        """Returns whether `advance` takes one id as a number: for a single request whose padding has been read."""
        return self.places is None and self.offset >= self.left_padding[0]

    def advance(self, ids: HostIds) -> Advance:
        """Pushes ids to the codebooks; returns how many entries are installed then. An illegal id changes nothing.

        Raises `CodecError` for an id that is neither a base id nor an installed hypertoken, `ModelError` if `ids` has
        another batch size than this state.
        """
        if isinstance(ids, int):
            self.push_to_sequence(0, ids)
            self.offset += 1
            live = len(self.books[0])
            return Advance(live, live)
        batch, length = ids.shape
        if batch != len(self.books):
            raise ModelError(f"the cache was made for {len(self.books)} sequence(s), the ids have {batch}")
        if length == 1 and self.offset >= max(self.left_padding):
            return self._advance_each(ids[:, 0].tolist())
        first = self._padding_columns(self.offset, length)
        before = np.array([len(book) for book in self.books])
        marks = [book.mark() for book in self.books]
        held = [book.padded_entries(0, len(book)) for book in self.books] if self.can_evict_entries else []
        available, pushed = np.zeros((batch, length), dtype=np.int64), []
        try:
            for b, book in enumerate(self.books):
                real = ids[b, first[b] :]
                new = book.push(int(real[0]) if len(real) == 1 else real)
                pushed.append(new)
                if len(new):
                    available[b, first[b] + new.at[: len(book) - before[b]]] = 1
        except CodecError:
            for book, mark in zip(self.books, marks, strict=True):
                book.rewind(mark)
            raise
        self.offset += length
        live = np.array([len(book) for book in self.books])
        evicted: list[EvictedEntry] = []
        for b, (entries, new) in enumerate(zip(held, pushed, strict=False)):  # `held` is empty under freeze
            self._mark_rows_missing(b, new.slots)
            evicted += evicted_in_call(b, entries, new, int(first[b]))
        return Advance(live, before[:, None] + np.cumsum(available, axis=1), tuple(evicted))

    def _advance_each(self, ids: Sequence[int]) -> Advance:
        pushed = []
        try:
            for book, one in zip(self.books, ids, strict=True):
                pushed.append(book.push(one))
        except CodecError:
            for book, _ in zip(self.books, pushed, strict=False):
                book.rewind(book.mark() - 1)
            raise
        self.offset += 1
        for b, new in enumerate(pushed if self.can_evict_entries else ()):
            if len(new):
                self._mark_rows_missing(b, new.slots)
        live = np.array(list(map(len, self.books)))
        return Advance(live, live[:, None])

    def push_to_sequence(self, b: int, one: int) -> None:
        """Pushes an id to sequence b's codebook alone. Call `pad_sequences` before the next model call.

        Raises `CodecError` for an illegal id.
        """
        new = self.books[b].push(one)
        if self.can_evict_entries and len(new):
            self._mark_rows_missing(b, new.slots)

    def pad_sequences(self, more: Sequence[int]) -> None:
        """Updates `offset` and `left_padding` after `push_to_sequence`.

        more [B]: number of ids pushed to each sequence. Sequences with fewer ids than others get left padding.
        """
        most = max(more)
        self.offset += most
        self.left_padding = [n + most - pushed for n, pushed in zip(self.left_padding, more, strict=True)]

    def base_positions(self, ids: np.ndarray) -> np.ndarray:
        """Returns positions [B, L] int32 of ids [B, L], the last L ids read, in position mode `base_token_end`.

        An id's position is the index of its last base id within the sequence, counted from 0; padding has position 0.

        Source: position mode `base_token_end` of zip2zip 0.2.0.
        """
        out = np.zeros(ids.shape, dtype=np.int32)
        first = self._padding_columns(self.offset - ids.shape[1], ids.shape[1])
        for b, book in enumerate(self.books):
            out[b, first[b] :] = book.ends(book.mark() - (ids.shape[1] - int(first[b]))) - 1
        return out

    def base_lengths(self) -> np.ndarray:
        """Returns how many base ids each sequence has read, [B] int32."""
        return np.array([book.base_length for book in self.books], dtype=np.int32)

    def base_lengths_after(self, ids: np.ndarray) -> np.ndarray:
        """Returns how many base ids each sequence would have read after ids [B, L] more, [B] int32."""
        first, books = self._padding_columns(self.offset, ids.shape[1]), [book.copy() for book in self.books]
        for b, book in enumerate(books):
            book.push(ids[b, first[b] :])
        return np.array([book.base_length for book in books], dtype=np.int32)

    def spans(self) -> np.ndarray:
        """Returns the number of base ids of each slot's entry, [B, codebook_size] int32; 0 for a slot without an entry.

        Do not change the array: the state keeps it.
        """
        for b, book in enumerate(self.books):
            first = 0 if self.can_evict_entries else self._span_counts[b]
            self._spans[b, first : len(book)] = book.padded_entries(first, len(book) - first)[1]
            self._span_counts[b] = len(book)
        return self._spans

    def _padding_columns(self, begin: int, length: int) -> np.ndarray:
        """Returns per sequence how many of the `length` columns from column `begin` on are left padding, [B]."""
        return np.clip(np.array(self.left_padding) - begin, 0, length)

    def padded_id_log(self, pad_id: int) -> np.ndarray:
        """Returns every id read, [B, offset] uint32, with `pad_id` in the left padding."""
        out = np.full((len(self.books), self.offset), pad_id, dtype=np.uint32)
        for b, book in enumerate(self.books):
            out[b, self.offset - book.mark() :] = book.ids
        return out

    def evicted_since_read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Finds those of ids [B, L], the last L ids read, whose slots have got another entry since.

        Returns their sequences [N] and columns [N], and the entries that these ids stood for when they were read:
        base_ids [N, merge_size] and lengths [N].
        """
        first, found = self._padding_columns(self.offset - ids.shape[1], ids.shape[1]), []
        vocab_size = self.books[0].params.vocab_size
        for b, book in enumerate(self.books):
            columns = first[b] + np.flatnonzero(ids[b, first[b] :] >= vocab_size)
            rows, lengths = (
                x[columns - ids.shape[1]] for x in book.logged_base_ids(book.mark() - ids.shape[1] + int(first[b]))
            )
            now = [x[ids[b, columns].astype(np.int64) - vocab_size] for x in book.padded_entries(0, len(book))]
            other = entries_differ((rows, lengths), now)
            found.append((np.full(other.sum(), b), columns[other], rows[other], lengths[other].astype(np.int64)))
        sequence, columns, rows, lengths = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return sequence, columns, rows, lengths

    # ---- mlx-lm's cache protocol

    @property
    def state(self) -> tuple[Any, ...]:
        """The parts that are saved, in their order.

        Version; params as JSON; the id logs of all sequences, joined; the logs' lengths; left padding; offset;
        long_rope. The params are one object, or a list of one per sequence if start entries differ. If any sequence has
        tuned rows, an eighth part follows: the packs' fingerprints as JSON, a list of one or null per sequence.
        """
        logs = [np.asarray(book.ids) for book in self.books]
        tuned = _tuned_to_json(self.tuned)
        return (
            STATE_VERSION if tuned is None else TUNED_VERSION,
            params_to_json([book.params for book in self.books]),
            mx.array(np.concatenate(logs)),
            mx.array(np.array([len(log) for log in logs], dtype=np.int64)),
            mx.array(np.array(self.left_padding, dtype=np.int64)),
            self.offset,
            self.long_rope,
            *(() if tuned is None else (tuned,)),
        )

    @state.setter
    def state(self, value: Sequence[Any]) -> None:
        """Rebuilds the state from saved parts, of version 1 or 2. Raises `ModelError` for another version."""
        sizes = {STATE_VERSION: 7, TUNED_VERSION: 8}  # number of parts in each version
        if sizes.get(value[0]) != len(value):
            known = " or ".join(map(str, sizes))
            raise ModelError(
                f"saved cache: ZipState version {value[0]} is not {known}, or parts of it are missing; make a new cache"
            )
        _, params, ids, lengths, left_padding, offset, long_rope, *marks = value
        padding, log = np.array(left_padding), np.array(ids)
        expected = np.maximum(0, int(offset) - padding)
        if np.any(padding < 0) or not np.array_equal(np.array(lengths), expected) or len(log) != expected.sum():
            raise ModelError(f"saved cache: id logs of {np.array(lengths).tolist()} ids do not fit offset {offset}")
        books = _make_codebooks(params_from_json(params), len(padding))
        tuned: list[Tuned] = [*_tuned_from_json(marks[0], len(books))] if marks else [None] * len(books)
        for book, part in zip(books, np.split(log, np.cumsum(expected)[:-1]), strict=True):
            book.push(part)
        self._set_up_fields(books, tuned, padding.tolist(), int(offset), bool(long_rope))

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> ZipState:
        """Returns the state with these saved parts, rebuilt by replaying the id logs.

        Raises `CodecError` or `ModelError` if the parts are damaged.
        """
        made = cls.__new__(cls)
        made.state = state
        return made

    def is_trimmable(self) -> bool:
        """Returns True: codebooks can be rewound to any length."""
        return True

    def trim(self, n: int) -> int:
        """Forgets the last n ids of every sequence, n >= 0, and returns how many were forgotten."""
        if n < 0:
            raise ModelError(f"cannot trim {n} ids from a cache")
        n = min(n, self.offset)
        self.offset -= n
        for b, book in enumerate(self.books):
            held = book.padded_entries(0, len(book)) if self.can_evict_entries else ()
            book.rewind(max(0, self.offset - self.left_padding[b]))
            if self.can_evict_entries:
                now = book.padded_entries(0, len(book))
                self._mark_rows_missing(b, np.flatnonzero(entries_differ([x[: len(book)] for x in held], now)))
                self.replaced[b] = {slot for slot in self.replaced[b] if slot < len(book)}
            self.encoded_outputs[b] = min(self.encoded_outputs[b], len(book))
            if self.places is None:
                self.encoded_inputs[len(book) :] = False
            self._span_counts[b] = min(self._span_counts[b], len(book))
            self._spans[b, len(book) :] = 0
        return n

    def size(self) -> int:
        """Returns the number of ids read per sequence, left padding included."""
        return self.offset

    def empty(self) -> bool:
        """Returns whether no id has been read."""
        return self.offset == 0

    # ---- sequences that join and leave, as in mlx-lm's `BatchKVCache`

    @classmethod
    def merge(cls, states: Sequence[ZipState]) -> ZipState:
        """Returns one state with the sequences of all states, in this order. The first state itself if it is a batch's.

        The result takes over the codebooks, so do not use the given states afterwards. Shorter sequences get left
        padding. Raises `ModelError`, leaving the states unchanged, if the codecs differ (start entries may) or
        LongRoPE's factors differ.
        """
        first, *others = states
        for other in others:
            first._raise_unless_joinable(other)
        if first.places is not None:
            made = first
        else:
            made, others = cls.__new__(cls), [first, *others]
            made.books, made.tuned, made.left_padding, made.row_answers = [], [], [], []
            made.offset, made.long_rope = 0, first.long_rope
            made._reset_loop_fields()
            made._clear_rows(first.books[0].params.codebook_size, shared=True)
        for one in others:
            made._append_sequences(one)
        return made

    def _append_sequences(self, other: ZipState) -> None:
        """Adds the sequences of another state after this one's. This must be the state of a batch."""
        self._add_sequences_with_rows(other)
        offset = max(self.offset, other.offset)
        padding = [(self, n) for n in self.left_padding] + [(other, n) for n in other.left_padding]
        self.left_padding = [offset - one.offset + n for one, n in padding]
        self.row_answers = [*self.row_answers, *other.row_answers]
        self.offset = offset
        self._reset_spans()

    def filter(self, indices: Sequence[int]) -> None:
        """Keeps only the sequences at these indices, in this order, and removes left padding that all of them share.

        The shared padding must have been read.
        """
        padding = [self.left_padding[i] for i in indices]
        less = min(padding)
        self._keep_sequences(indices)
        self.row_answers = [self.row_answers[i] for i in indices]
        self.left_padding, self.offset = [n - less for n in padding], self.offset - less
        self._reset_spans()

    def extract(self, index: int, rows: bool = True) -> ZipState:
        """Returns a copy of one sequence, without its left padding. This state does not change.

        rows: whether to copy the sequence's rows; if not, the next model call fills the copy's row tables.
        """
        made = ZipState.__new__(ZipState)
        offset = max(0, self.offset - self.left_padding[index])
        made._set_up_fields([self.books[index].copy()], [self.tuned[index]], [0], offset, self.long_rope)
        made.row_answers = [dict(self.row_answers[index])]
        if rows:
            self._copy_sequence_rows_to(index, made)
        return made

    def _raise_unless_joinable(self, other: ZipState) -> None:
        if not self.books[0].params.is_equal_except_start(other.books[0].params):
            raise ModelError("the caches to merge were made with different codec parameters")
        if self.long_rope != other.long_rope:
            raise ModelError("the caches to merge were filled with different factors of LongRoPE, short and long")

    @property
    def nbytes(self) -> int:
        """Bytes of the row tables and id logs."""
        return self.inputs.nbytes + self.outputs.nbytes + sum(4 * book.mark() for book in self.books)

    def __deepcopy__(self, memo: dict[int, Any]) -> ZipState:
        twin = ZipState.__new__(ZipState)
        twin.left_padding = list(self.left_padding)
        twin.books = [book.copy() for book in self.books]
        twin.offset, twin.long_rope = self.offset, self.long_rope
        twin.row_answers = [dict(one) for one in self.row_answers]
        twin._reset_loop_fields()
        twin._spans, twin._span_counts = self._spans.copy(), list(self._span_counts)
        self._copy_rows_to(twin)
        return twin

    def __copy__(self) -> ZipState:
        return copy.deepcopy(self)  # a shallow copy would share codebooks


def _make_codebooks(params: CodecParams | Sequence[CodecParams], batch: int) -> list[Codebook]:
    """Returns a new codebook per sequence. params: one codec for all, or one per sequence.

    Raises `ModelError` if there is not one codec per sequence, or the codecs differ in more than their start entries.
    """
    codecs = [params] * batch if isinstance(params, CodecParams) else list(params)
    if len(codecs) != batch:
        raise ModelError(f"there are {len(codecs)} codecs for {batch} sequence(s)")
    if not all(codecs[0].is_equal_except_start(codec) for codec in codecs):
        raise ModelError("the sequences of one cache may differ in their start entries only, not in other parameters")
    return [Codebook(codec) for codec in codecs]


def _tuned_rows_of_pack(book: Codebook, tuned: Tuned, pack: Pack | None) -> Tuned:
    """Checks that a sequence began with `pack`, and returns the sequence's tuned rows, taken from `pack`.

    book: the sequence's codebook. tuned: the tuned rows known so far, returned if `pack` is None. Raises `ModelError`
    if the sequence began with other entries or other rows.
    """
    if pack is None:
        return tuned
    own = book.params.start or ()
    mark, given = tuned_fingerprint(tuned), pack.tuned_fingerprint
    if own != pack.entries or mark != given:
        raise ModelError(
            f"the cache was begun with another pack ({_describe_pack(own, mark)}) than the one given "
            f"({_describe_pack(pack.entries, given)}): give the pack that it was begun with, or make a new cache"
        )
    return tuned if pack.rows is None else pack


def _describe_pack(entries: Sequence[Any], mark: str | None) -> str:
    """Describes a pack in a few words, for messages. mark: the fingerprint of its tuned rows, None if it has none."""
    rows = "" if mark is None else f", tuned rows {mark[:12]}"
    return f"{len(entries)} entries{rows}" if len(entries) else "no entries"


def _leave_lazy(*arrays: mx.array) -> None:
    """Does nothing: the arrays stay lazy until a value is read."""


@contextmanager
def submit_parts_early(state: ZipState) -> Iterator[None]:
    """Context manager: while the block runs, the device computes parts of a step before the whole step is built."""
    state.submit = mx.async_eval
    try:
        yield
    finally:
        state.submit = _leave_lazy


def find_zip_state(cache: Sequence[Any]) -> ZipState | None:
    """Returns the cache's `ZipState`, which is its last entry, or None for a plain model's cache."""
    last = cache[-1] if cache else None
    return last if isinstance(last, ZipState) else None


def kv_caches(cache: Sequence[Any]) -> Sequence[Any]:
    """Returns the KV caches in a cache: all entries but the `ZipState`."""
    return cache if find_zip_state(cache) is None else cache[:-1]


# ---- parts of a state as JSON, for mlx-lm's cache files


def _tuned_to_json(tuned: Sequence[Tuned]) -> str | None:
    """Returns the fingerprints of tuned packs as JSON, one or null per sequence; None if no sequence has one."""
    if all(one is None for one in tuned):
        return None
    return json.dumps([tuned_fingerprint(one) for one in tuned])


def _tuned_from_json(text: str, batch: int) -> list[str | None]:
    """Returns the fingerprints that `_tuned_to_json` wrote for `batch` sequences. Raises `ModelError` if damaged."""
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"saved cache: the fingerprints of its packs cannot be read: {error}") from error
    if not isinstance(found, list) or len(found) != batch or not all(isinstance(x, str | None) for x in found):
        raise ModelError(
            f"saved cache: {found!r:.80} is not a list of {batch} fingerprints of packs, one or null per sequence"
        )
    return found
