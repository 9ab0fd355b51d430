"""Canonical decoding: an id that the compressor would not have written next gets no probability.

Models learn from canonical ids. There, behind an id that stands for the base ids u, no id begins with the base id b
if u + b was an entry already when the id was chosen: the longest match would have been taken. A model cannot know that
well, for it depends on all entries at once, and gives such ids probability that is lost; a greedy one even writes them,
and then spells out what one hypertoken would have said. Setting them to zero costs nothing of what canonical text can
say, and never makes it less likely. It is "canonicality by conditioning" (arXiv 2506.07956) for a codebook that grows;
zip2zip's own runtime does not do it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import takewhile

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook
from mlx_zip.codec.ids import Uint32s


class Followers:
    """The entries of a growing codebook, by what they begin with: which ids cannot follow an id."""

    def __init__(self, book: Codebook) -> None:
        self.vocab_size, self.size = book.params.vocab_size, 0
        self._longer: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)  # (slot, last base id)
        self._begin: defaultdict[int, list[int]] = defaultdict(list)  # slots, by first base id
        self.grow(book)

    def grow(self, book: Codebook) -> None:
        """Takes in the entries that the same codebook has installed since."""
        if len(book) == self.size:
            return
        rows, lengths = book.rows(self.size, len(book) - self.size)
        for slot, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True), self.size):
            self._longer[tuple(row[: length - 1])].append((slot, row[length - 1]))
            self._begin[row[0]].append(slot)
        self.size = len(book)

    def excluded(self, base_ids: tuple[int, ...], installed: int) -> list[int]:
        """Ids that cannot follow one that stands for `base_ids` and was chosen when `installed` entries existed."""
        out: list[int] = []
        for _, base_id in takewhile(lambda entry: entry[0] < installed, self._longer.get(base_ids, ())):
            out.append(base_id)
            out += [self.vocab_size + slot for slot in self._begin.get(base_id, ())]
        return out


class OnlyCanonical:
    """Logits processor of one sequence: (ids, logits [1, W]) -> logits, excluded ids at -inf.

    To be called once behind the prompt and once behind each id. The prompt's last id was chosen without regard to what
    would follow, so nothing is excluded there.
    """

    def __init__(self, book: Codebook) -> None:
        self.book, self._followers, self._installed = book, None, 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The id is the codebook's last, so `tokens` is not read."""
        if self._followers is None:
            self._followers, excluded = Followers(self.book), []
        else:
            self._followers.grow(self.book)
            excluded = self._followers.excluded(last_read(self.book), self._installed)
        self._installed = len(self.book)
        if excluded:
            logits[:, mx.array(excluded)] = -mx.inf
        return logits


def last_read(book: Codebook) -> tuple[int, ...]:
    """The base ids of the last id that a codebook has read."""
    return tuple(book.expand(book.ids[-1:]).tolist())


def excluded_behind(
    book: Codebook, ids: Uint32s, ends: Collection[int] = ()
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What cannot follow each of some ids uint32 [n], read from `book` on, which is left as it was.

    ends: indices of ids that were chosen without regard to what follows. Returns pairs as two arrays int64 [pairs]: the
    index of an id, and an id that cannot stand behind it.
    """
    book, at, out = book.copy(), [], []
    followers = Followers(book)
    for index, one in enumerate(ids.tolist()):
        installed = len(book)
        book.push(one)
        followers.grow(book)
        if index not in ends:
            excluded = followers.excluded(tuple(book.expand([one]).tolist()), installed)
            at += [index] * len(excluded)
            out += excluded
    return np.array(at, np.int64), np.array(out, np.int64)
