"""Canonical decoding: ids that the compressor would not have written next get no probability, unless they hold most.

Models learn from canonical ids. There, behind an id that stands for the base ids u, no id begins with the base id b
if u + b was an entry already when the id was chosen: the longest match would have been taken. A model cannot know that
well, for it depends on all entries at once, and gives such ids probability that is lost; a greedy one even writes them,
and then spells out what one hypertoken would have said. Setting them to zero never makes canonical ids less likely. It
is "canonicality by conditioning" (arXiv 2506.07956) for a codebook that grows; zip2zip's own runtime does not do it.

But where such ids hold most of the probability, the model has begun to spell something out and is sure how it goes on:
"didn" and then "'t", where "didn't" is an entry. Kept from that, it breaks the word. So there nothing is excluded: one
id more is the smaller harm (docs/reports/stories.md has the measurement).

In a starting codebook u + b + c may be an entry where u + b is none. Then b alone may follow u, but not b + c, neither
as one id nor as two: so what began at an earlier id counts as long as an entry may still come of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from itertools import takewhile

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import ConfigError

BaseIds = tuple[int, ...]
MOST = 0.5  # of the probability: an id that is not canonical may stand where all such ids hold more


class Followers:
    """The entries of a growing codebook, by what they begin with: which ids cannot follow some base ids.

    Raises `ConfigError` for a codebook whose entries may leave: what could not follow them then can.
    """

    def __init__(self, book: Codebook) -> None:
        if book.params.policy != "freeze":
            raise ConfigError(f"canonical decoding needs a codebook of policy freeze, not {book.params.policy}")
        self.vocab_size, self.size = book.params.vocab_size, 0
        self._known: set[BaseIds] = set()
        self._endings: defaultdict[BaseIds, list[tuple[int, BaseIds]]] = defaultdict(list)  # (slot, rest), by beginning
        self._begin: defaultdict[BaseIds, list[int]] = defaultdict(list)  # slots, by what they begin with
        self.grow(book)

    def grow(self, book: Codebook) -> None:
        """Takes in the entries that the same codebook has installed since."""
        if len(book) == self.size:
            return
        rows, lengths = book.rows(self.size, len(book) - self.size)
        entries = [tuple(row[:length]) for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)]
        self._known.update(entries)
        for slot, entry in enumerate(entries, self.size):
            self._add(slot, entry)
        self.size = len(book)

    def _add(self, slot: int, entry: BaseIds) -> None:
        for n in range(1, len(entry) + 1):
            self._begin[entry[:n]].append(slot)
        for n in range(len(entry) - 1, 0, -1):
            self._endings[entry[:n]].append((slot, entry[n:]))
            if entry[:n] in self._known:  # what is shorter is listed for that entry, which excludes as much and more
                break

    def excluded(self, base_ids: BaseIds, installed: int) -> list[int]:
        """Ids that cannot follow `base_ids`, whose first id was chosen when `installed` entries existed.

        installed: no fewer than existed when this was made.
        """
        out: list[int] = []
        for _, rest in takewhile(lambda ending: ending[0] < installed, self._endings.get(base_ids, ())):
            out += rest if len(rest) == 1 else ()
            out += [self.vocab_size + slot for slot in self._begin.get(rest, ())]
        return out


class Exclusions:
    """Follows a codebook id by id: which ids cannot stand behind the last one."""

    def __init__(self, book: Codebook) -> None:
        self.book, self._followers, self._longest = book, Followers(book), book.params.merge_size
        self._open: list[tuple[BaseIds, int]] = []  # base ids from a recent id on, entries when it was chosen
        self._excluded: list[int] = []

    def read(self, one: int, installed: int) -> list[int]:
        """Once behind each id that the codebook reads -> the ids that cannot follow it.

        installed: entries when it was chosen.
        """
        self._followers.grow(self.book)
        if one in self._excluded:
            self.begin_part()
        last = tuple(self.book.expand(one).tolist())
        longer = [(begun + last, n) for begun, n in self._open if len(begun + last) < self._longest]
        self._open = [*longer, (last, installed)]
        self._excluded = [id_ for begun, n in self._open for id_ in self._followers.excluded(begun, n)]
        return self._excluded

    def begin_part(self) -> None:
        """Says that all ids so far were chosen without regard to what follows."""
        self._open = []


class CanonicalDecoding:
    """Logits processor of one sequence: (ids, logits [1, W]) -> logits, excluded ids at -inf unless they hold the most.

    To be called once behind the prompt and once behind each id. The prompt's last id was chosen without regard to what
    would follow, so nothing is excluded there, nor where the codebook has read more than one id since the last call, or
    has been rewound: behind the next turn's prompt, say. (A prompt of one id would be taken for an emitted one: make a
    new processor for each request.)
    """

    def __init__(self, book: Codebook) -> None:
        self.book, self._exclusions, self._installed, self._next = book, None, 0, (0, 0)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The id is the codebook's last, so `tokens` is not read."""
        mark, rewinds = self.book.mark(), self.book.rewinds
        if self._exclusions is None or (mark, rewinds) != self._next:
            self._exclusions, excluded = Exclusions(self.book), []
        else:
            excluded = self._exclusions.read(self.book.last, self._installed)
        self._installed, self._next = len(self.book), (mark + 1, rewinds)
        if not excluded:
            return logits
        canonical = mx.array(logits)
        canonical[:, mx.array(excluded)] = -mx.inf
        return unless_most(canonical, logits)


def unless_most(canonical: mx.array, logits: mx.array) -> mx.array:
    """Logits [..., W] with excluded ids at -inf, and as they were -> [..., W]: these where excluded ids hold `MOST`."""
    before, left = (mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True) for x in (logits, canonical))
    return mx.where(left >= before + math.log(1 - MOST), canonical, logits)


def excluded_behind(
    book: Codebook, ids: Uint32s, ends: Collection[int] = ()
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What cannot follow each of some ids uint32 [n], read from `book` on, which is left as it was.

    ends: indices of ids that were chosen without regard to what follows. Returns pairs as two arrays int64 [pairs]: the
    index of an id, and an id that cannot stand behind it.
    """
    book, at, out = book.copy(), [], []
    exclusions = Exclusions(book)
    for index, one in enumerate(ids.tolist()):
        installed = len(book)
        book.push(one)
        excluded = exclusions.read(one, installed)
        if index in ends:
            exclusions.begin_part()
            continue
        at += [index] * len(excluded)
        out += excluded
    return np.array(at, np.int64), np.array(out, np.int64)
