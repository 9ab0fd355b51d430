"""Prepared data as training reads them: several prepared folders as one, and some samples of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.training.prepare.shards import Sample, Shards, grows


class Joined:
    """Several prepared folders read as one, in the order given.

    Folders prepared without hypertokens (merge size 1 or codebook size 0) may be among others, whose codec is then that
    of all: their samples are plain. Raises `DataError` when the codecs differ otherwise.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.parts = [Shards(folder) for folder in folders]
        first = next((part for part in self.parts if grows(part.params)), self.parts[0])
        self.params = first.params
        as_plain = replace(self.params, codebook_size=0, merge_size=1, start=None)
        for part in self.parts:
            if part.params not in (self.params, as_plain):
                raise DataError(f"{part.folder} was prepared for another codec than {first.folder}")
        self._plain = [part.params != self.params for part in self.parts]
        self._ends = list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Sample:
        number = bisect_right(self._ends, i)
        if not 0 <= i < len(self):
            raise IndexError(i)
        sample = self.parts[number][i - (self._ends[number - 1] if number else 0)]
        return replace(sample, plain=True) if self._plain[number] else sample

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Ids of every sample, int64 [len(self)]."""
        return np.concatenate([part.lengths for part in self.parts])

    @property
    def base_ids(self) -> NDArray[np.int64]:
        """Base ids of every sample, int64 [len(self)]."""
        return np.concatenate([part.base_ids for part in self.parts])

    @property
    def starts(self) -> NDArray[np.int64]:
        """Entries of every sample's starting codebook, int64 [len(self)]."""
        return np.concatenate([part.starts for part in self.parts])

    def __str__(self) -> str:
        return ", ".join(str(part.folder) for part in self.parts)


class Chosen:
    """Some samples of prepared data, numbered as in the whole data; all others have length 0 and are never read.

    chosen: bool [samples], which ones.
    """

    def __init__(self, data: Joined, chosen: NDArray[np.bool_]) -> None:
        self.data, self.params, self.chosen = data, data.params, chosen

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Sample:
        return self.data[i]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Ids of every sample, 0 for those that are not chosen, int64 [len(self)]."""
        return np.where(self.chosen, self.data.lengths, 0)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Entries of every sample's starting codebook, int64 [len(self)]."""
        return self.data.starts

    @property
    def base_ids(self) -> NDArray[np.int64]:
        """Base ids of every sample, 0 for those that are not chosen, int64 [len(self)]."""
        return np.where(self.chosen, self.data.base_ids, 0)

    def __str__(self) -> str:
        return str(self.data)
