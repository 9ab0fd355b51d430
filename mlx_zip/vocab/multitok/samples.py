"""Sequences of different lengths, stored as two arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s, as_ids

Ends = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Samples:
    """m sequences, joined: ids (or units) uint32 [n], ends uint64 [m]; sequence k ends before ends[k].

    Ids after the last end belong to a sequence that is still open. Iterating yields the m sequences as views.
    """

    ids: Uint32s
    ends: Ends

    @classmethod
    def of(cls, sequences: Iterable[Any]) -> Samples:
        """Returns sequences of ids as samples. The types of a sequence, and errors, are those of `as_ids`."""
        arrays = [as_ids(sequence) for sequence in sequences]
        ids = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
        return cls(ids, np.cumsum([len(array) for array in arrays], dtype=np.uint64))

    @classmethod
    def join(cls, parts: Iterable[Samples]) -> Samples:
        """Returns parts joined in order; ids after the last end of a part belong to the first sequence of the next."""
        parts = [cls.of([]), *parts]
        starts = np.cumsum([0, *(len(part.ids) for part in parts[:-1])]).astype(np.uint64)
        ends = [part.ends + start for part, start in zip(parts, starts, strict=True)]
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Uint32s]:
        start = 0
        for end in self.ends.tolist():
            yield self.ids[start:end]
            start = end

    def lists(self) -> list[list[int]]:
        """Returns the m sequences as lists."""
        return [sequence.tolist() for sequence in self]

    def cut(self, first: int) -> tuple[Samples, Samples]:
        """Returns the first `first` sequences and the others, as two samples."""
        at = self.ends[first - 1] if first else np.uint64(0)
        return Samples(self.ids[: int(at)], self.ends[:first]), Samples(self.ids[int(at) :], self.ends[first:] - at)
