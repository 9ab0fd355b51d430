"""Sums over the base ids of each entry of a codebook, kept up to date while the codebook grows.

Penalties need them at every step, and most entries are as they were at the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_zip.codec import Codebook


class EntrySums:
    """For each entry of a codebook, the sums of some terms over its base ids.

    terms: arrays [V + 1] over base ids, with 0 in the last place. They may be changed between updates.
    """

    def __init__(self, terms: Sequence[np.ndarray], merge_size: int) -> None:
        self._terms = terms
        self._rows, self._lengths = np.zeros((0, merge_size), np.uint32), np.zeros(0, np.uint8)
        self._sums = np.zeros((len(terms), 0), np.float32)

    def update(self, book: Codebook, changed: np.ndarray) -> np.ndarray:
        """Returns the sums [number of terms, entries], computed anew for new entries and those with a changed base id.

        changed [V + 1] bool: base ids whose terms may have changed since the last update.
        """
        rows, lengths = book.rows(0, len(book))
        n, width = rows.shape
        known = min(n, len(self._lengths))
        stale = np.ones(n, bool)
        stale[:known] = lengths[:known] != self._lengths[:known]
        found = changed.take(rows, mode="clip")  # padding may be no base id; it makes some entries stale in vain
        found[:known] |= rows[:known] != self._rows[:known]
        stale[np.flatnonzero(found) // width] = True
        sums = np.empty((len(self._terms), n), np.float32)
        sums[:, :known] = self._sums[:, :known]
        if len(at := np.flatnonzero(stale)):
            entries = np.where(np.arange(width) < lengths[at, None], rows[at], len(changed) - 1)
            for of, term in zip(sums, self._terms, strict=True):
                of[at] = term[entries].sum(axis=1)
        self._rows, self._lengths, self._sums = rows, lengths, sums
        return sums
