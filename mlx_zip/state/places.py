"""`Places`: where the rows of a batch's entries are in the row tables that its sequences share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Key = bytes | tuple[str, bytes]  # an entry's base ids as 32-bit words; with tuned rows, after the pack's fingerprint


class Places:
    """The places of the distinct entries of B sequences in one pair of row tables.

    Two sequences that have the same entry share its place, and so its rows. Places are given in rising order; those of
    entries that no sequence has any more are given again after `kept`.

    index [B, codebook_size] int32: the place of the entry in each slot; of no meaning for slots without output row.
    keys: the entry at each place. `of`: each entry's place.
    """

    def __init__(self, batch: int, codebook_size: int) -> None:
        self.index = np.zeros((batch, codebook_size), np.int32)
        self.keys: list[Key] = []
        self.of: dict[Key, int] = {}
        self._same: int | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: Sequence[Key]) -> None:
        """Gives these entries, which have no place yet, the next places."""
        for key in keys:
            self.keys.append(key)
            self.of[key] = len(self.keys) - 1

    def put(self, b: int, slot: int, place: int) -> None:
        """Notes that the entry in a slot of sequence b has this place."""
        self.index[b, slot] = place
        if self._same is not None and slot < self._same and slot != place:
            self._same = None

    def same(self, limit: int) -> int:
        """Returns a number n <= limit such that the first n slots of every sequence have the places 0 to n - 1.

        limit: a number of slots that have an entry in every sequence. The first call sets n, and later calls return
        no more; n is found anew when sequences have joined or left.
        """
        if self._same is None:
            wrong = np.flatnonzero((self.index[:, :limit] != np.arange(limit)).any(axis=0))
            self._same = int(wrong[0]) if len(wrong) else limit
        return min(self._same, limit)

    def joined(self, slots: np.ndarray, places: Sequence[int]) -> Places:
        """Returns places with one more sequence, whose entries in slots [N] have these places."""
        row = np.zeros((1, self.index.shape[1]), np.int32)
        row[0, slots] = places
        return self._with(np.concatenate([self.index, row]))

    def of_sequences(self, indices: Sequence[int]) -> Places:
        """Returns places for these sequences only, in this order."""
        return self._with(self.index[list(indices)])

    def _with(self, index: np.ndarray) -> Places:
        """Returns places with another index of the same entries, which takes the place of this one."""
        made = Places(0, 0)
        made.index, made.keys, made.of = index, self.keys, self.of
        return made

    def kept(self, places: np.ndarray) -> Places:
        """Returns places for the entries at `places` [N] only, which get the places 0 to N - 1."""
        made, number = Places(0, 0), np.zeros(max(1, len(self.keys)), np.int32)
        number[places] = np.arange(len(places))
        made.index = number[self.index]
        made.add([self.keys[place] for place in places.tolist()])
        return made

    def copy(self) -> Places:
        """Returns an independent copy."""
        twin = Places(0, 0)
        twin.index, twin.keys, twin.of, twin._same = self.index.copy(), list(self.keys), dict(self.of), self._same
        return twin


def entries_of(keys: Sequence[Key], merge_size: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns entries as base_ids [N, merge_size] uint32, padded with `pad_id`, and lengths [N]."""
    base_ids, lengths = np.full((len(keys), merge_size), pad_id, np.uint32), np.empty(len(keys), np.int64)
    for i, key in enumerate(keys):
        words = np.frombuffer(key if isinstance(key, bytes) else key[1], np.uint32)
        base_ids[i, : len(words)], lengths[i] = words, len(words)
    return base_ids, lengths
