"""`ZipState`: the codebooks, hyper rows and positions of one request.

A `ZipState` is the last entry of the prompt cache that `model.make_cache()` returns, and has the methods that mlx-lm
expects of a cache entry, so mlx-lm's own save, load, trim and copy work on it. Codebooks are a function of the ids
read, so a saved state holds only the codec's parameters, the log of ids read and the fingerprints of packs with tuned
rows. After loading, rows are encoded again, or taken from the pack, at the next model call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from mlx_zip.codec import CodecParams
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.hyper import HeadTable, RowTable, TurningTable
from mlx_zip.state.evictions import Evicted, differ, evicted_in_call
from mlx_zip.state.saved import checked_state, params_from_json, params_to_json, tuned_from_json, tuned_to_json
from mlx_zip.state.starts import Tuned, books_of, checked_tuned, same_but_start, start_of

STATE_VERSION, TUNED_VERSION = 1, 2

Answers = dict[str, tuple[int, ...]]  # text -> base ids
HostIds = int | np.ndarray  # ids of one call: [B, L] uint32, or a number for one id of a single sequence


class Advance(NamedTuple):
    """How many entries are installed after a call.

    live [B]: after the whole call. available [B, L]: after each of its ids. Both are plain numbers if the call had one
    id of one sequence. evicted: entries that were evicted within a call of several ids, under a policy other than
    freeze.
    """

    live: np.ndarray | int
    available: np.ndarray | int
    evicted: tuple[Evicted, ...] = ()


class ZipState:
    """Codebooks and rows of B sequences, one codebook each.

    params: the codec of all sequences, or one per sequence; these may differ in their start entries only. left_padding
    [B]: per sequence, how many of its first ids are padding. books: one `Codebook` per sequence. offset: ids read per
    sequence, left padding included; equals the KV caches' length. long_rope: whether the KV caches were filled with
    LongRoPE's long factors. inputs, outputs: the tables of input and output rows. second_bodies: how many steps of
    generation ran the decoder's body twice (`mlx_zip.models.ahead`). submit: called by a model call with arrays that it
    will not change any more, so that a decode loop can have them computed while the rest is built; by default it does
    nothing. Neither of the last two is saved or copied.

    encoded_inputs [B, codebook_size]: whether the slot's entry has its input row in the table. encoded_outputs: per
    sequence, a count n such that the first n slots were given output rows; replaced: per sequence, the slots among them
    whose row is out of date, because they hold another entry now.

    tuned: per sequence, the pack with tuned rows that it began with, only its fingerprint in a state loaded from
    a file, or None. tuned_bound: whether the tuned rows are in the tables. row_answers: per sequence, text ->
    base ids of each answer that was generated with the cache; copied with the state, but not saved.
    """

    def __init__(
        self,
        params: CodecParams | Sequence[CodecParams],
        left_padding: Sequence[int] = (0,),
        tuned: Sequence[Tuned] | None = None,
    ) -> None:
        self.left_padding = [int(n) for n in left_padding]
        self.books = books_of(params, len(self.left_padding))
        self.tuned: list[Tuned] = [None] * len(self.books) if tuned is None else list(tuned)
        self.offset = 0
        self.long_rope = False
        self.row_answers: list[Answers] = [{} for _ in self.books]
        self._fitting: CodecParams | None = None  # a codec that `fits` has found to fit
        self._forget_loop()
        self._forget_rows()

    @property
    def params(self) -> CodecParams:
        """The codec of every sequence, start entries included. Sequence b's own is `books[b].params`.

        Raises `ModelError` when the sequences have different start entries: there is no one codec then.
        """
        first = self.books[0].params
        if any(book.params is not first and book.params != first for book in self.books):
            raise ModelError("the sequences of this cache began with different packs: read each book's params")
        return first

    @property
    def answers(self) -> Answers:
        """The answers of the first sequence, as a map that may be added to."""
        return self.row_answers[0]

    def fits(self, params: CodecParams) -> bool:
        """Returns whether a model with this codec can continue this state: all but the start entries must be equal."""
        if params is not self._fitting and same_but_start(self.books[0].params, params):
            self._fitting = params  # every step asks about the same codec again
        return params is self._fitting

    def __repr__(self) -> str:
        """Returns sizes per sequence, never arrays."""
        sizes = [(book.mark(), len(book), book.base_length) for book in self.books]
        if len(sizes) == 1:
            return "<ZipState: {} ids, {} entries, {} base tokens>".format(*sizes[0])
        ids, entries, base = (list(part) for part in zip(*sizes, strict=True))
        return f"<ZipState of {len(sizes)} sequences: {ids} ids, {entries} entries, {base} base tokens>"

    def _forget_loop(self) -> None:
        """Sets what a decode loop keeps here to how it is before one begins."""
        self.second_bodies = 0
        self.submit: Callable[..., None] = _keep_lazy

    def read_in_turns(self) -> None:
        """Makes the table of input rows a `TurningTable`, for bodies that begin before the host has read their id."""
        if not isinstance(self.inputs, TurningTable):
            self.inputs = TurningTable.of(self.inputs)

    def _forget_rows(self) -> None:
        """Empties the row tables; the next model call fills them again."""
        batch = len(self.books)
        self.inputs: RowTable = RowTable(batch)
        self.outputs = HeadTable(batch)
        self.encoded_inputs = np.zeros((batch, self.books[0].params.codebook_size), dtype=bool)
        self.encoded_outputs = [0] * batch
        self.replaced: list[set[int]] = [set() for _ in range(batch)]
        self._spans, self._spanned = np.zeros(self.encoded_inputs.shape, np.int32), [0] * batch
        self.tuned_bound = all(one is None for one in self.tuned)

    def begun_with(self, packs: Sequence[Any]) -> None:
        """Takes tuned rows from the packs that the sequences of a saved state began with.

        packs: one per sequence, None to change nothing. Raises `ModelError` for a pack that a sequence did not begin
        with, `DataError` for a file that is no pack.
        """
        starts = [start_of(pack) for pack in packs]
        self.tuned = [checked_tuned(*one) for one in zip(self.books, self.tuned, starts, strict=True)]

    def mark_tuned_rows(self, sides: Sequence[str]) -> None:
        """Marks the rows of all tuned packs as encoded on these sides, "input" or "output"; the other side stays."""
        for b, (one, book) in enumerate(zip(self.tuned, self.books, strict=True)):
            n = 0 if one is None else len(book.params.start or ())
            if "input" in sides:
                self.encoded_inputs[b, :n] = True
            if "output" in sides:
                self.encoded_outputs[b] = max(n, self.encoded_outputs[b])
        self.tuned_bound = True

    # ---- one model call

    def takes_one(self) -> bool:
        """Returns whether `advance` takes a single id as a number: for one sequence whose padding has been read."""
        return len(self.books) == 1 and self.offset >= self.left_padding[0]

    def advance(self, ids: HostIds) -> Advance:
        """Pushes ids to the codebooks and returns how many entries are installed then. An illegal id changes nothing.

        Raises `CodecError` for an id that is neither a base id nor an installed hypertoken, `ModelError` when the
        batch size is not this state's.
        """
        if isinstance(ids, int):
            book = self.books[0]
            new, live = book.push(ids), len(book)
            self.offset += 1
            if self.can_evict and len(new):
                self._mark_rows_missing(0, new.slots)
            return Advance(live, live)
        batch, length = ids.shape
        if batch != len(self.books):
            raise ModelError(f"the cache was made for {len(self.books)} sequence(s), the ids have {batch}")
        first = self._padding_columns(self.offset, length)
        before = np.array([len(book) for book in self.books])
        marks = [book.mark() for book in self.books]
        held = [book.rows(0, len(book)) for book in self.books] if self.can_evict else []
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
        evicted: list[Evicted] = []
        for b, (entries, new) in enumerate(zip(held, pushed, strict=False)):  # `held` is empty under freeze
            self._mark_rows_missing(b, new.slots)
            evicted += evicted_in_call(b, entries, new, int(first[b]))
        return Advance(live, before[:, None] + np.cumsum(available, axis=1), tuple(evicted))

    def base_positions(self, ids: np.ndarray) -> np.ndarray:
        """Returns positions [B, L] int32 of ids [B, L], the last L ids read, in position mode `base_token_end`.

        An id's position is the index of its last base id within the sequence, counted from 0; in the padding it is 0.

        Source: position mode `base_token_end` of zip2zip 0.2.0.
        """
        out = np.zeros(ids.shape, dtype=np.int32)
        first = self._padding_columns(self.offset - ids.shape[1], ids.shape[1])
        for b, book in enumerate(self.books):
            spans = book.logged(book.mark() - (ids.shape[1] - int(first[b])))[1].astype(np.int64)
            out[b, first[b] :] = book.base_length - spans.sum() + np.cumsum(spans) - 1
        return out

    def base_lengths(self) -> np.ndarray:
        """Returns how many base ids each sequence has read, [B] int32."""
        return np.array([book.base_length for book in self.books], dtype=np.int32)

    def spans(self) -> np.ndarray:
        """Returns the length in base ids of each slot's entry, [B, codebook_size] int32; 0 without one. Do not change
        it: the state returns the array again.
        """
        for b, book in enumerate(self.books):
            first = 0 if self.can_evict else self._spanned[b]
            self._spans[b, first : len(book)] = book.rows(first, len(book) - first)[1]
            self._spanned[b] = len(book)
        return self._spans

    def _padding_columns(self, begin: int, length: int) -> np.ndarray:
        """Returns per sequence how many of the `length` columns from column `begin` on are left padding, [B]."""
        return np.clip(np.array(self.left_padding) - begin, 0, length)

    def log(self, pad_id: int) -> np.ndarray:
        """Returns every id read, [B, offset] uint32, with `pad_id` in the left padding."""
        out = np.full((len(self.books), self.offset), pad_id, dtype=np.uint32)
        for b, book in enumerate(self.books):
            out[b, self.offset - book.mark() :] = book.ids
        return out

    def missing_outputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns where installed entries have no output row yet, as (sequence [N], slot [N])."""
        done = zip(self.encoded_outputs, self.replaced, self.books, strict=True)
        missing = [np.array([*sorted(replaced), *range(n, len(book))], np.int64) for n, replaced, book in done]
        return _sequence_and_slot(missing)

    def only_missing_output(self) -> int | None:
        """Returns the slot to encode if there is one sequence and exactly one output row is missing, else None."""
        encoded, replaced = self.encoded_outputs[0], self.replaced[0]
        if len(self.books) != 1 or len(self.books[0]) - encoded + len(replaced) != 1:
            return None
        return next(iter(replaced), encoded)

    def outputs_encoded(self) -> bool:
        """Returns whether every installed entry has its output row."""
        return self.encoded_outputs == list(map(len, self.books)) and not any(self.replaced)

    def mark_outputs_encoded(self) -> None:
        """Marks every installed entry's output row as encoded."""
        self.encoded_outputs = [len(book) for book in self.books]
        if self.can_evict:
            self.replaced = [set() for _ in self.books]

    @property
    def can_evict(self) -> bool:
        """Whether entries may be evicted, so that a slot holds different entries at different times."""
        return self.books[0].params.policy != "freeze"

    def _mark_rows_missing(self, b: int, slots: np.ndarray) -> None:
        """Marks both rows of these slots of sequence b as missing, because the slots hold other entries than before."""
        self.encoded_inputs[b, slots] = False
        self.replaced[b].update(slots[slots < self.encoded_outputs[b]].tolist())

    def evicted_since_read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Finds those among ids [B, L], the last L ids read, whose slots hold other entries now than when read.

        Returns their sequences [N] and columns [N], and the entries that they stood for when they were read: base_ids
        [N, merge_size] and lengths [N].
        """
        first, found = self._padding_columns(self.offset - ids.shape[1], ids.shape[1]), []
        vocab_size = self.books[0].params.vocab_size
        for b, book in enumerate(self.books):
            columns = first[b] + np.flatnonzero(ids[b, first[b] :] >= vocab_size)
            rows, lengths = (x[columns - ids.shape[1]] for x in book.logged(book.mark() - ids.shape[1] + int(first[b])))
            now = [x[ids[b, columns].astype(np.int64) - vocab_size] for x in book.rows(0, len(book))]
            other = differ((rows, lengths), now)
            found.append((np.full(other.sum(), b), columns[other], rows[other], lengths[other].astype(np.int64)))
        sequence, columns, rows, lengths = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return sequence, columns, rows, lengths

    def missing_inputs(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns which of slots [B, L] have no input row yet, each once, as (sequence [N], slot [N]).

        A -1 in slots stands for no hypertoken.
        """
        read = [np.unique(row[row >= 0]) for row in slots]
        return _sequence_and_slot([row[~done[row]] for row, done in zip(read, self.encoded_inputs, strict=True)])

    def missing_installed_inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns where installed entries have no input row yet, as (sequence [N], slot [N])."""
        books = zip(self.encoded_inputs, self.books, strict=True)
        return _sequence_and_slot([np.flatnonzero(~done[: len(book)]) for done, book in books])

    def entries(self, sequence: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the entries at (sequence [N], slots [N]) as base_ids [N, merge_size], padded, and lengths [N]."""
        base_ids = np.empty((len(slots), self.books[0].params.merge_size), dtype=np.uint32)
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
        """The parts that are saved: version; params as JSON; the id logs of all sequences, one after the other; their
        lengths; left padding; offset; long_rope.

        The params are one object, or a list of one per sequence when their start entries differ. If any sequence has
        tuned rows, an eighth part follows: the packs' fingerprints as JSON, a list of one or null per sequence.
        """
        logs = [np.asarray(book.ids) for book in self.books]
        tuned = tuned_to_json(self.tuned)
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
        """Rebuilds the state from saved parts, of version 1 or 2."""
        params, ids, lengths, left_padding, offset, long_rope, *marks = checked_state(
            value, {STATE_VERSION: 7, TUNED_VERSION: 8}
        )
        padding, log = np.array(left_padding), np.array(ids)
        expected = np.maximum(0, int(offset) - padding)
        if np.any(padding < 0) or not np.array_equal(np.array(lengths), expected) or len(log) != expected.sum():
            raise ModelError(f"saved cache: id logs of {np.array(lengths).tolist()} ids do not fit offset {offset}")
        books = books_of(params_from_json(params), len(padding))
        tuned: list[Tuned] = [*tuned_from_json(marks[0], len(books))] if marks else [None] * len(books)
        for book, part in zip(books, np.split(log, np.cumsum(expected)[:-1]), strict=True):
            book.push(part)
        self.left_padding, self.books, self.tuned = padding.tolist(), books, tuned
        self.offset, self.long_rope = int(offset), bool(long_rope)
        self.row_answers, self._fitting = [{} for _ in books], None
        self._forget_loop()
        self._forget_rows()

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
            held = book.rows(0, len(book)) if self.can_evict else ()
            book.rewind(max(0, self.offset - self.left_padding[b]))
            if self.can_evict:
                now = book.rows(0, len(book))
                self._mark_rows_missing(b, np.flatnonzero(differ([x[: len(book)] for x in held], now)))
                self.replaced[b] = {slot for slot in self.replaced[b] if slot < len(book)}
            self.encoded_outputs[b] = min(self.encoded_outputs[b], len(book))
            self.encoded_inputs[b, len(book) :] = False
            self._spanned[b] = min(self._spanned[b], len(book))
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
        """Returns one state with the sequences of all states, in this order. It takes their codebooks over, so the
        states given must not be used any more.

        Shorter sequences get left padding. Raises `ModelError`, with nothing changed, for no states, and as `extend`.
        """
        if not states:
            raise ModelError("there are no caches to merge")
        for other in states[1:]:
            states[0]._check_joins(other)
        made = cls.__new__(cls)
        made._take_over(states)
        return made

    def extend(self, other: ZipState) -> None:
        """Adds the sequences of another state after this one's. It takes their codebooks over, so the other state must
        not be used any more.

        Shorter sequences get left padding. Raises `ModelError`, with nothing changed, for another codec (start entries
        may differ), and where LongRoPE's factors differ.
        """
        self._check_joins(other)
        self._take_over([self, other])

    def _take_over(self, states: Sequence[ZipState]) -> None:
        """Makes this state that of all sequences of `states`, in this order."""
        offset = max(one.offset for one in states)
        self.left_padding = [offset - one.offset + n for one in states for n in one.left_padding]
        self.books = [book for one in states for book in one.books]
        self.tuned = [tuned for one in states for tuned in one.tuned]
        self.row_answers = [answers for one in states for answers in one.row_answers]
        self.offset, self.long_rope, self._fitting = offset, states[0].long_rope, states[0]._fitting
        self._forget_loop()
        self._forget_rows()

    def filter(self, indices: Sequence[int]) -> None:
        """Keeps the sequences at these indices only, in this order, and forgets left padding that all of them have.

        Raises `ModelError`, with nothing changed, for no index, and for one that is out of range or occurs twice.
        """
        self._check_indices(indices)
        padding = [self.left_padding[i] for i in indices]
        less = min(padding)
        if less > self.offset:
            raise ModelError(f"{less} columns are left padding, of which {self.offset} are read: read them first")
        self.books, self.tuned = [self.books[i] for i in indices], [self.tuned[i] for i in indices]
        self.row_answers = [self.row_answers[i] for i in indices]
        self.left_padding, self.offset = [n - less for n in padding], self.offset - less
        self._forget_rows()

    def extract(self, index: int) -> ZipState:
        """Returns a copy of one sequence, without its left padding. This state does not change.

        Raises `ModelError` for an index that is out of range.
        """
        self._check_indices([index])
        made = ZipState.__new__(ZipState)
        made.books, made.tuned = [self.books[index].copy()], [self.tuned[index]]
        made.row_answers, made._fitting = [dict(self.row_answers[index])], self._fitting
        made.left_padding, made.offset = [0], max(0, self.offset - self.left_padding[index])
        made.long_rope = self.long_rope
        made._forget_loop()
        made._forget_rows()
        return made

    def _check_joins(self, other: ZipState) -> None:
        """Raises `ModelError` if the sequences of another state cannot join this one's."""
        if not same_but_start(self.books[0].params, other.books[0].params):
            raise ModelError("the caches to merge were made with different codec parameters")
        if self.long_rope != other.long_rope:
            raise ModelError("the caches to merge were filled with different factors of LongRoPE, short and long")

    def _check_indices(self, indices: Sequence[int]) -> None:
        """Raises `ModelError` unless indices name at least one sequence, each once."""
        if not len(indices) or len(set(indices)) < len(indices):
            raise ModelError(f"indices must name at least one sequence, each once, got {list(indices)}")
        if not all(0 <= i < len(self.books) for i in indices):
            raise ModelError(f"the cache has {len(self.books)} sequence(s), the indices are {list(indices)}")

    @property
    def nbytes(self) -> int:
        """Bytes of the row tables and id logs."""
        return self.inputs.nbytes + self.outputs.nbytes + sum(4 * book.mark() for book in self.books)

    def __deepcopy__(self, memo: dict[int, Any]) -> ZipState:
        twin = ZipState.__new__(ZipState)
        twin.left_padding = list(self.left_padding)
        twin.books = [book.copy() for book in self.books]
        twin.offset, twin.long_rope = self.offset, self.long_rope
        twin.row_answers, twin._fitting = [dict(one) for one in self.row_answers], self._fitting
        twin._forget_loop()
        twin.inputs, twin.outputs = self.inputs.copy(), cast(HeadTable, self.outputs.copy())
        twin.encoded_inputs = self.encoded_inputs.copy()
        twin.encoded_outputs = list(self.encoded_outputs)
        twin.replaced = [set(slots) for slots in self.replaced]
        twin._spans, twin._spanned = self._spans.copy(), list(self._spanned)
        twin.tuned, twin.tuned_bound = list(self.tuned), self.tuned_bound
        return twin

    def __copy__(self) -> ZipState:
        return copy.deepcopy(self)  # a shallow copy would share codebooks


def _keep_lazy(*arrays: mx.array) -> None:
    """Does nothing: the arrays stay lazy until a value is read."""


@contextmanager
def submitting(state: ZipState) -> Iterator[None]:
    """Inside, the device begins with a step's parts while the rest of the step is still built."""
    state.submit = mx.async_eval
    try:
        yield
    finally:
        state.submit = _keep_lazy


def find_state(cache: Sequence[Any]) -> ZipState | None:
    """Returns the cache's `ZipState`, or None for a plain model's cache."""
    return next((entry for entry in cache if isinstance(entry, ZipState)), None)


def _sequence_and_slot(slots: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns slots that are listed per sequence as two arrays, (sequence [N], slot [N])."""
    return np.repeat(np.arange(len(slots)), [len(row) for row in slots]), np.concatenate(slots)
