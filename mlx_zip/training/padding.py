"""The sizes that a batch's arrays are padded to, so that shapes recur.

A step that is compiled is traced and compiled again for every new combination of shapes. So compiled steps get few
sizes, most of which follow from two of them (`FEW`); other steps get close ones (`CLOSE`).
"""

from __future__ import annotations

from dataclasses import dataclass

PER_OCTAVE = 8  # close sizes per doubling: at most 12.5 % padding


@dataclass(frozen=True)
class Padding:
    """Rules for the sizes of a batch's arrays. few: whether sizes are coarse and tied to each other."""

    few: bool = False

    def length(self, n: int) -> int:
        """Returns the positions of a sample, given those of the longest."""
        return bucket(n, 32, 2) if self.few else bucket(n)

    def entries(self, n: int) -> int:
        """Returns the number of distinct entries."""
        return bucket(n, 64, 2) if self.few else bucket(n, 32)

    def pairs(self, n: int) -> int:
        """Returns the number of pairs of a position and an id that is excluded there."""
        return bucket(n, 64, 1) if self.few else bucket(n, 32)

    def slots(self, n: int, length: int, codebook_size: int) -> int:
        """Returns the slots of a sample; length: its padded positions, each of which may have installed an entry."""
        if not self.few:
            return bucket(n, 32)
        return max(bucket(n, 32, 2), min(length, bucket(codebook_size, 32, 2)))

    def read(self, n: int, entries: int) -> int:
        """Returns the number of entries that inputs use; entries: the padded number of all of them."""
        if not self.few:
            return bucket(n, 32)
        size = entries
        while size % 2 == 0 and size // 2 >= max(n, 32):
            size //= 2
        return size


def bucket(n: int, least: int = 8, per_octave: int = PER_OCTAVE) -> int:
    """Returns the size to pad n values to, at least `least`: one of `per_octave` evenly spaced sizes per doubling."""
    step = max(least, (1 << max(0, n - 1).bit_length()) // (2 * per_octave))
    return max(least, -(-n // step) * step)


CLOSE, FEW = Padding(), Padding(few=True)
