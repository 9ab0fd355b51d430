"""`SequenceRows`: the codebooks of B sequences, their row tables, and which rows are in the tables.

Each distinct entry of a batch has one place in a shared table, so a step multiplies with one matrix and picks each
sequence's columns by an index. Entries of a pack that all sequences began with need no index, because their places are
their slots. Places are given in rising order, so that a step writes its new rows as one slice. When the table would
grow, unused places are freed all at once, so that no step has to count references.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_zip.codec import Codebook, Installed
from mlx_zip.models.rows.row_tables import CAPACITY_STEP, ColumnTable, RowTable, TwoCopyTable
from mlx_zip.packs.entries import pad_entries
from mlx_zip.packs.pack import Tuned, tuned_fingerprint


class SequenceRows:
    """Codebooks and rows of B sequences.

    books: one `Codebook` per sequence. tuned: per sequence, the pack with tuned rows that it began with; the pack's
    fingerprint, if the state was loaded from a file; or None. bound: per sequence, whether its tuned rows are in the
    tables.

    inputs, outputs: the tables of input and output rows. places: the places of a batch's entries in these tables; None
    for a single request, where an entry's place is its slot.

    encoded_inputs [places]: whether the entry at a place has its input row in the table. encoded_outputs: per
    sequence, a number n; the first n slots have been given output rows. replaced: per sequence, those of the first n
    slots whose output row is out of date, because the slot holds another entry now.
    """

    books: list[Codebook]
    tuned: list[Tuned]

    def _clear_rows(self, codebook_size: int, shared: bool) -> None:
        """Empties the row tables; the next model call fills them again. shared: whether a batch shares the tables."""
        batch, limit = len(self.books), None if shared else codebook_size
        self.inputs: RowTable = RowTable(limit)
        self.outputs = ColumnTable(limit)
        self.places = Places(batch, codebook_size) if shared else None
        self.encoded_inputs = np.zeros(0 if shared else codebook_size, dtype=bool)
        self.encoded_outputs = [0] * batch
        self.replaced: list[set[int]] = [set() for _ in range(batch)]
        self.bound = [one is None for one in self.tuned]

    def _copy_rows_to(self, twin: SequenceRows) -> None:
        twin.inputs, twin.outputs = self.inputs.copy(), cast(ColumnTable, self.outputs.copy())
        twin.places = None if self.places is None else self.places.copy()
        twin.encoded_inputs = self.encoded_inputs.copy()
        twin.encoded_outputs = list(self.encoded_outputs)
        twin.replaced = [set(slots) for slots in self.replaced]
        twin.tuned, twin.bound = list(self.tuned), list(self.bound)

    @property
    def can_evict_entries(self) -> bool:
        """Whether entries may be evicted, so that a slot holds different entries at different times."""
        return self.books[0].params.policy != "freeze"

    def use_two_copies_of_inputs(self) -> None:
        """Makes the table of input rows a `TwoCopyTable`, which can be written while a step on the device reads it."""
        if not isinstance(self.inputs, TwoCopyTable):
            self.inputs = TwoCopyTable.from_table(self.inputs)

    # ---- output rows

    def missing_outputs(self) -> list[list[int]]:
        """Returns for each sequence the slots of installed entries that have no output row yet."""
        done = zip(self.encoded_outputs, self.replaced, self.books, strict=True)
        return [[*sorted(replaced), *range(n, len(book))] for n, replaced, book in done]

    def only_missing_output(self) -> int | None:
        """Returns the slot to encode if this is a single request with exactly one output row missing, else None."""
        encoded, replaced = self.encoded_outputs[0], self.replaced[0]
        if self.places is not None or len(self.books[0]) - encoded + len(replaced) != 1:
            return None
        return next(iter(replaced), encoded)

    def has_all_output_rows(self) -> bool:
        """Returns whether every installed entry has its output row."""
        return self.encoded_outputs == list(map(len, self.books)) and not any(self.replaced)

    def mark_outputs_encoded(self) -> None:
        """Marks every installed entry's output row as encoded."""
        self.encoded_outputs = [len(book) for book in self.books]
        if self.can_evict_entries:
            self.replaced = [set() for _ in self.books]

    def encoded_rows(self) -> tuple[int, np.ndarray]:
        """Returns which entries of a single sequence have their rows in the tables, for `mark_encoded_again`."""
        return self.encoded_outputs[0], self.encoded_inputs.copy()

    def mark_encoded_again(self, before: tuple[int, np.ndarray]) -> None:
        """After ids were trimmed and the same ids read again, marks the rows still in the tables as encoded.

        before: what `encoded_rows` returned before the trim. Under policies that evict, nothing is marked: slots may
        have held several entries.
        """
        n = len(self.books[0])
        if not self.can_evict_entries:
            self.encoded_outputs[0] = max(self.encoded_outputs[0], min(before[0], n))
            self.encoded_inputs[:n] |= before[1][:n]

    def _mark_rows_missing(self, b: int, slots: np.ndarray) -> None:
        if self.places is None:
            self.encoded_inputs[slots] = False
        self.replaced[b].update(slots[slots < self.encoded_outputs[b]].tolist())

    # ---- input rows

    def missing_inputs(self, slots: np.ndarray) -> np.ndarray:
        """Returns the places [N], each once, of the entries in slots [B, L] that have no input row yet.

        A slot of -1 stands for an id that is not a hypertoken. The entries must have their output rows.
        """
        if slots.shape[1] == 1:  # a step: for a few ids, numpy would be slower
            places = {self._place_of_slot(b, slot) for b, slot in enumerate(slots[:, 0].tolist()) if slot >= 0}
            return np.array([place for place in sorted(places) if not self.encoded_inputs[place]], np.int64)
        sequence, column = np.nonzero(slots >= 0)
        places = np.unique(self.places_of(sequence, slots[sequence, column]))
        return places[~self.encoded_inputs[places]]

    def has_input_row(self, b: int, slot: int) -> bool:
        """Returns whether a slot of sequence b holds an entry whose input row is in the table."""
        return slot < len(self.books[b]) and bool(self.encoded_inputs[self._place_of_slot(b, slot)])

    def _place_of_slot(self, b: int, slot: int) -> int:
        return slot if self.places is None else int(self.places.index[b, slot])

    def missing_installed_inputs(self) -> np.ndarray:
        """Returns the places of installed entries that have no input row yet: [N]."""
        n = len(self.books[0] if self.places is None else self.places)
        return np.flatnonzero(~self.encoded_inputs[:n])

    def places_of(self, sequence: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Returns the places of the entries at (sequence, slots), in the shape of `slots`."""
        return slots if self.places is None else self.places.index[sequence, slots]

    # ---- between slots and places, on the device

    def slots_covered(self) -> int:
        """Returns how many slots `places_at_slots` accepts; the number changes seldom, so that shapes seldom change.

        For a single request, the capacity of the input table; for a batch, at least the entries of any sequence.
        """
        if self.places is None:
            return self.inputs.capacity
        want = max(CAPACITY_STEP, -(-max(map(len, self.books)) // CAPACITY_STEP) * CAPACITY_STEP)
        return min(want, self.places.index.shape[1])

    def values_by_slot(self, values: mx.array, first: int) -> mx.array:
        """Returns values [B, L, places] in the order of slots, [B, L, slots], for the slots from `first` on."""
        if self.places is None:
            return values
        index = mx.array(self.places.index[:, None, first : self.slots_covered()])
        return mx.take_along_axis(values, mx.broadcast_to(index, (*values.shape[:2], index.shape[2])), axis=-1)

    def places_at_slots(self, slots: mx.array) -> mx.array:
        """Returns the places [B, 1] of slots [B, 1], which must be below `slots_covered()`.

        For an entry without an input row, the place may be any place of the input table.
        """
        if self.places is None:
            return slots
        index = np.minimum(self.places.index[:, : self.slots_covered()], max(0, self.inputs.capacity - 1))
        return mx.take_along_axis(mx.array(index), slots, axis=1)

    def entries(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the entries at places [N], N > 0, as base_ids [N, merge_size], padded, and lengths [N]."""
        if self.places is not None:
            return self._unpack_keys([self.places.keys[place] for place in places.tolist()])
        first = int(places.min())
        base_ids, lengths = self.books[0].padded_entries(first, int(places.max()) - first + 1)
        return base_ids[places - first], lengths[places - first].astype(np.int64)

    def _unpack_keys(self, keys: Sequence[EntryKey]) -> tuple[np.ndarray, np.ndarray]:
        words = [np.frombuffer(key if isinstance(key, bytes) else key[1], np.uint32) for key in keys]
        return pad_entries(words, self.books[0].params.merge_size, self.books[0].params.fill)

    # ---- tuned rows

    def put_tuned_rows(self, b: int, output: mx.array, inputs: mx.array | None = None) -> None:
        """Puts the tuned rows [P, D] of sequence b into the tables, unless the tables have them.

        inputs: None if both sides have equal rows. Input rows are then copied from the output rows when they are read.
        """
        n = len(output)
        if self.places is None:
            self.outputs.put_run(0, output)
            if inputs is not None:
                self.inputs.put_run(0, inputs)
                self.encoded_inputs[:n] = True
        else:
            keys = self._entry_keys(b, range(n))
            places = self._places_with_output_rows(keys, lambda chosen: output[mx.array(chosen)])
            if inputs is not None:
                self._add_input_rows(places, lambda chosen: inputs[mx.array(chosen)])
            self._set_places(b, range(n), places)
        self.encoded_outputs[b], self.bound[b] = max(n, self.encoded_outputs[b]), True

    # ---- rows that the sequences of a batch share

    def share_outputs(self, encode: Callable[[np.ndarray, np.ndarray], mx.array]) -> None:
        """Gives a place to each entry of a batch that has no output row; encodes the rows that no sequence has.

        encode(base_ids [N, merge_size], lengths [N]) makes rows [N, D].
        """
        missing = self.missing_outputs()
        keys = [book.entry_words(slot) for book, slots in zip(self.books, missing, strict=True) for slot in slots]
        places = self._places_with_output_rows(
            keys, lambda chosen: encode(*self._unpack_keys([keys[i] for i in chosen]))
        )
        for b, slots in enumerate(missing):
            self._set_places(b, slots, places)
            places = places[len(slots) :]
        self.mark_outputs_encoded()

    def _places_with_output_rows(self, keys: Sequence[EntryKey], rows: Callable[[list[int]], mx.array]) -> list[int]:
        """Returns the places of entries. New entries get the next places, and their output rows are written.

        rows(indices into `keys`) returns the output rows of the new entries.
        """
        assert self.places is not None
        self._free_places_for(sum(key not in self.places.place_of for key in keys))  # may renumber places
        of, first = self.places.place_of, dict[EntryKey, int]()  # two sequences may have the same new entry
        for i, key in enumerate(keys):
            if key not in of:
                first.setdefault(key, i)
        if first:
            self.outputs.put_run(len(self.places), rows(list(first.values())))
            self.places.add(list(first))
            more = len(self.places) - len(self.encoded_inputs)
            if more > 0:
                self.encoded_inputs = np.pad(self.encoded_inputs, (0, more + CAPACITY_STEP))
        return [of[key] for key in keys]

    def _set_places(self, b: int, slots: Sequence[int], places: Sequence[int]) -> None:
        assert self.places is not None
        for slot, place in zip(slots, places, strict=False):
            self.places.set_place(b, slot, place)

    def _add_input_rows(self, places: Sequence[int] | np.ndarray, rows: Callable[[list[int]], mx.array]) -> None:
        """Puts the input rows that are missing at these places of a batch into the table.

        rows(indices into `places`) returns input rows.
        """
        at = np.array(places, np.int64)
        chosen = np.flatnonzero(~self.encoded_inputs[at])
        if len(chosen):
            self.inputs.put_rows(at[chosen], rows(chosen.tolist()))
            self.encoded_inputs[at] = True

    def _free_places_for(self, n: int) -> None:
        """Frees unused places if `n` more would make the table grow, but only if a quarter of it then stays free."""
        assert self.places is not None
        if n and len(self.places) + n > self.outputs.capacity:
            used = self._used_places()
            if len(used) + n <= self.outputs.capacity * 3 // 4:
                self._keep_places(used)

    def _used_places(self) -> np.ndarray:
        """Returns the places of the entries that sequences have now, in the order of sequences and slots."""
        assert self.places is not None
        parts = [self.places.index[b, self._slots_with_output_rows(b)] for b in range(len(self.books))]
        every = np.concatenate([*parts, np.zeros(0, np.int32)])
        return every[np.sort(np.unique(every, return_index=True)[1])]

    def _slots_with_output_rows(self, b: int) -> np.ndarray:
        slots = np.arange(self.encoded_outputs[b])
        return slots[~np.isin(slots, list(self.replaced[b]))] if self.replaced[b] else slots

    def _keep_places(self, used: np.ndarray) -> None:
        """Frees all places but `used` [N], which become the places 0 to N - 1."""
        assert self.places is not None
        places, outputs, inputs = self.places.select(used), self.outputs.select(used), self.inputs.select(used)
        encoded = self.encoded_inputs[used]
        self.places, self.outputs, self.inputs, self.encoded_inputs = places, outputs, inputs, encoded

    # ---- sequences that join and leave

    def _entry_keys(self, b: int, slots: Sequence[int]) -> list[EntryKey]:
        """Returns the keys of the entries in some slots of sequence b. An entry with a tuned row has its own key."""
        book, mark = self.books[b], tuned_fingerprint(self.tuned[b])
        tuned = 0 if mark is None else len(book.params.start or ())
        return [(mark, book.entry_words(slot)) if mark and slot < tuned else book.entry_words(slot) for slot in slots]

    def _add_sequences_with_rows(self, other: SequenceRows) -> None:
        """Adds the sequences of `other` to this batch's state, and those of their rows that this state lacks."""
        assert self.places is not None
        for b in range(len(other.books)):
            slots = other._slots_with_output_rows(b)
            theirs = other.places_of(np.full(len(slots), b), slots)
            ours = self._places_with_output_rows(
                other._entry_keys(b, slots.tolist()), lambda chosen, at=theirs: other.outputs.rows_at(at[chosen])
            )
            read = np.flatnonzero(other.encoded_inputs[theirs])
            if len(read):
                self._add_input_rows(
                    np.array(ours)[read], lambda chosen, at=theirs[read]: other.inputs.rows_at(at[chosen])
                )
            self.places = self.places.with_sequence(slots, ours)
            self.books, self.tuned = [*self.books, other.books[b]], [*self.tuned, other.tuned[b]]
            self.bound, self.replaced = [*self.bound, other.bound[b]], [*self.replaced, other.replaced[b]]
            self.encoded_outputs = [*self.encoded_outputs, other.encoded_outputs[b]]

    def _keep_sequences(self, indices: Sequence[int]) -> None:
        """Keeps the rows of these sequences only, in this order. Frees unused places if over half of all are unused."""
        self.books, self.tuned = [self.books[i] for i in indices], [self.tuned[i] for i in indices]
        self.bound, self.replaced = [self.bound[i] for i in indices], [self.replaced[i] for i in indices]
        self.encoded_outputs = [self.encoded_outputs[i] for i in indices]
        if self.places is not None:
            self.places = self.places.of_only_sequences(indices)
            used = self._used_places()
            if 2 * len(used) < len(self.places):
                self._keep_places(used)

    def _copy_sequence_rows_to(self, b: int, made: SequenceRows) -> None:
        """Copies sequence b's rows to `made`, a single request's state with a copy of its codebook and no rows."""
        slots, n, limit = self._slots_with_output_rows(b), self.encoded_outputs[b], self.books[b].params.codebook_size
        places = np.zeros(n, np.int64)
        places[slots] = self.places_of(np.full(len(slots), b), slots)
        made.outputs, made.inputs = self.outputs.select(places, limit), self.inputs.select(places, limit).copy()
        made.encoded_inputs[slots] = self.encoded_inputs[places[slots]]
        made.encoded_outputs, made.replaced, made.bound = [n], [set(self.replaced[b])], [self.bound[b]]


# ---- where the rows of a batch's entries are in the tables that its sequences share

EntryKey = (
    bytes | tuple[str, bytes]
)  # an entry's base ids as 32-bit words; if its row is tuned, (the pack's fingerprint, these words)


class Places:
    """The places of the distinct entries of B sequences in one pair of row tables.

    Sequences with equal entries share the entry's place and rows. Places are given in rising order; the places of
    entries that no sequence has any more are reused after `select`.

    index [B, codebook_size] int32: the place of the entry in each slot; meaningless for slots without an output row.
    keys: the entry at each place. place_of: each entry's place.
    """

    def __init__(self, batch: int, codebook_size: int) -> None:
        self.index = np.zeros((batch, codebook_size), np.int32)
        self.keys: list[EntryKey] = []
        self.place_of: dict[EntryKey, int] = {}
        self._equal_slots: int | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: Sequence[EntryKey]) -> None:
        """Gives each of these entries, which have no place in the row table yet, the next free place."""
        for key in keys:
            self.keys.append(key)
            self.place_of[key] = len(self.keys) - 1

    def set_place(self, b: int, slot: int, place: int) -> None:
        """Records that the entry in a slot of sequence b has this place."""
        self.index[b, slot] = place
        if self._equal_slots is not None and slot < self._equal_slots and slot != place:
            self._equal_slots = None

    def count_slots_with_equal_places(self, limit: int) -> int:
        """Returns a number n <= limit such that the first n slots of every sequence have the places 0 to n - 1.

        limit: a number of slots that have an entry in every sequence. The first call sets n, and later calls return no
        more; n is computed again when sequences have joined or left.
        """
        if self._equal_slots is None:
            wrong = np.flatnonzero((self.index[:, :limit] != np.arange(limit)).any(axis=0))
            self._equal_slots = int(wrong[0]) if len(wrong) else limit
        return min(self._equal_slots, limit)

    def with_sequence(self, slots: np.ndarray, places: Sequence[int]) -> Places:
        """Returns places with one more sequence, whose entries in slots [N] have these places."""
        row = np.zeros((1, self.index.shape[1]), np.int32)
        row[0, slots] = places
        return self._with_index(np.concatenate([self.index, row]))

    def of_only_sequences(self, indices: Sequence[int]) -> Places:
        """Returns places for these sequences only, in this order."""
        return self._with_index(self.index[list(indices)])

    def _with_index(self, index: np.ndarray) -> Places:
        """Returns places with another index. The entries move to the result: do not use this object afterwards."""
        made = copy.copy(self)
        made.index, made._equal_slots = index, None
        return made

    def select(self, places: np.ndarray) -> Places:
        """Returns places for the entries at `places` [N] only, which get the places 0 to N - 1."""
        made, number = Places(0, 0), np.zeros(max(1, len(self.keys)), np.int32)
        number[places] = np.arange(len(places))
        made.index = number[self.index]
        made.add([self.keys[place] for place in places.tolist()])
        return made

    def copy(self) -> Places:
        """Returns an independent copy."""
        twin = copy.copy(self)
        twin.index, twin.keys, twin.place_of = self.index.copy(), list(self.keys), dict(self.place_of)
        return twin


# ---- entries that are evicted within one call, under a policy other than freeze


@dataclass(frozen=True)
class EvictedEntry:
    """An entry that was evicted within a call of L ids.

    sequence, slot: where the entry was installed. begin, end: the slot held the entry after each id in columns begin to
    end - 1 of the call. base_ids [merge_size]: padded; the first `length` of them are real.
    """

    sequence: int
    slot: int
    begin: int
    end: int
    base_ids: np.ndarray
    length: int


def entries_differ(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Returns whether each of N entries differs in `some` and `others`, [N] bool.

    some, others: (base_ids [N, merge_size], lengths [N]).
    """
    return (some[0] != others[0]).any(axis=1) | (some[1] != others[1])


def evicted_in_call(b: int, held: tuple[np.ndarray, np.ndarray], new: Installed, first: int) -> list[EvictedEntry]:
    """Returns the entries of sequence b that were evicted within a call.

    held: the sequence's entries before the call, as (base_ids, lengths). new: the entries that the call installed.
    first: the column of the sequence's first id in the call, after any left padding.
    """
    now, out = dict(enumerate(zip([0] * len(held[0]), *held, strict=True))), []
    entries = zip(new.slots.tolist(), (first + new.at).tolist(), new.base_ids, new.lengths, strict=True)
    for slot, column, base_ids, length in entries:
        if slot in now and now[slot][0] < column:
            out.append(EvictedEntry(b, slot, now[slot][0], column, now[slot][1], int(now[slot][2])))
        now[slot] = column, base_ids, length
    return out
