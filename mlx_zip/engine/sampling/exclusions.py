"""Canonical ids: which ids the compressor would never write next; canonical decoding forbids them.

Models are trained on the compressor's output, called canonical. The compressor always takes the longest match. So after
an id that stands for the base ids u, the compressor never writes an id that begins with the base id b if u + b was an
entry already when the first of these ids was chosen. A model cannot learn this well, because it depends on all entries,
so the model wastes probability on such ids. With greedy decoding it may even write them, and so use several ids where
one hypertoken would do. Giving these ids probability zero never makes canonical ids less likely. This is "canonicality
by conditioning" (arXiv 2506.07956) for a codebook that grows; zip2zip's own runtime does not do it.

Start entries need more care: u + b + c may be an entry although u + b is not. Then b may follow u, but b + c may not,
neither as one id nor as two. So the base ids of several recent ids are kept as long as an entry may begin with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import ConfigError

BaseIds = tuple[int, ...]
MAX_EXCLUDED_SHARE = 0.5  # if the ids to exclude together have more probability than this, none is excluded


class _EntryPrefixes:
    """Entries by the base ids that they begin with.

    known: all entries. slots_by_prefix: base ids -> the slots of all entries that begin with them. suffixes_by_prefix:
    base ids -> (slot, the entry's other base ids) of entries that begin with them, in slot order, without entries that
    are excluded through a shorter entry anyway (see `add`).
    """

    def __init__(self) -> None:
        self.known: set[BaseIds] = set()
        self.slots_by_prefix: defaultdict[BaseIds, list[int]] = defaultdict(list)
        self.suffixes_by_prefix: defaultdict[BaseIds, list[tuple[int, BaseIds]]] = defaultdict(list)

    def add(self, first: int, entries: Iterable[BaseIds], others: Collection[BaseIds] = ()) -> None:
        """Adds entries, which take the slots from `first` on. others: entries that are known but not added here."""
        entries = list(entries)
        self.known.update(entries)
        for slot, entry in enumerate(entries, first):
            for n in range(1, len(entry) + 1):
                self.slots_by_prefix[entry[:n]].append(slot)
            for n in range(len(entry) - 1, 0, -1):
                self.suffixes_by_prefix[entry[:n]].append((slot, entry[n:]))
                if entry[:n] in self.known or entry[:n] in others:
                    break  # for shorter prefixes, the entry entry[:n] excludes at least as much


class _StartEntries(_EntryPrefixes):
    """The entries that codebooks begin with. They never change, so what they exclude is found once."""

    def __init__(self, params: CodecParams) -> None:
        super().__init__()
        self.add(0, params.start or ())
        self._vocab_size = params.vocab_size
        self._found: dict[BaseIds, tuple[list[int], frozenset[BaseIds]]] = {}

    def forbidden_after(self, base_ids: BaseIds) -> tuple[list[int], frozenset[BaseIds]]:
        """Returns the ids that cannot follow `base_ids` because of the start entries alone.

        Also returns what follows `base_ids` in each start entry that begins with them.
        """
        if base_ids not in self.suffixes_by_prefix:
            return _NOTHING
        if (found := self._found.get(base_ids)) is None:
            rests = [rest for _, rest in self.suffixes_by_prefix[base_ids]]
            ids = [rest[0] for rest in rests if len(rest) == 1]
            ids += [self._vocab_size + slot for rest in rests for slot in self.slots_by_prefix.get(rest, ())]
            found = self._found[base_ids] = ids, frozenset(rests)
        return found


_NOTHING: tuple[list[int], frozenset[BaseIds]] = [], frozenset()


@lru_cache(maxsize=4)
def _start_entries(params: CodecParams) -> _StartEntries:
    return _StartEntries(params)


class CanonicalIds:
    """Finds, for one sequence, which ids cannot follow what its codebook has read.

    Call `excluded` after the prompt and after each emitted id. Nothing is excluded right after a prompt, because the
    prompt was compressed without knowing what would follow. A prompt is recognized by more than one id read since the
    last call, or by a rewound codebook. (A prompt of a single id would be taken for an emitted id, so make a new
    object for each request.)

    Raises `ConfigError` if the codebook's policy is not freeze: when an entry is evicted, ids that it excluded are
    allowed again.
    """

    def __init__(self, book: Codebook) -> None:
        if book.params.policy != "freeze":
            raise ConfigError(f"canonical decoding needs a codebook of policy freeze, not {book.params.policy}")
        self.book, self._start = book, _start_entries(book.params)
        self._grown, self._size = _EntryPrefixes(), 0  # entries after the start entries; number of all entries in both
        # _next: the codebook's (mark, rewinds) after one more id, None before the first call. _installed: number of
        # entries at the last call. _excluded: what the last call returned. _recent: for each recent id with which an
        # entry may still begin: the base ids from it on, and the number of entries when it was chosen.
        self._next: tuple[int, int] | None = None
        self._installed, self._excluded = 0, list[int]()
        self._recent: list[tuple[BaseIds, int]] = []

    def follow_codebook(self, book: Codebook) -> None:
        """Makes this follow `book` from now on: the codebook followed so far, or a copy that has read the same ids."""
        if self._next is not None and self._next[1] == self.book.rewinds:
            self._next = self._next[0], book.rewinds
        self.book = book

    def excluded(self) -> list[int]:
        """Returns the ids that cannot follow what the codebook has read. Call this at least once after each id."""
        mark, rewinds = self.book.mark(), self.book.rewinds
        if (mark + 1, rewinds) == self._next:
            return self._excluded
        if (mark, rewinds) == self._next:
            self._add_new_entries()
            self._excluded = self._excluded_after(self.book.last)
        else:
            self._grown, self._size = _EntryPrefixes(), len(self.book.params.start or ())
            self._add_new_entries()
            self._recent, self._excluded = [], []
        self._installed, self._next = len(self.book), (mark + 1, rewinds)
        return self._excluded

    def end_part(self) -> None:
        """Lets any id follow the ids read so far, because they were compressed without the ids after them."""
        self._recent = []

    def _add_new_entries(self) -> None:
        """Adds the entries that the codebook has installed since the last call."""
        if (size := len(self.book)) == self._size:
            return
        entries = (self.book.entry(slot) for slot in range(self._size, size))
        self._grown.add(self._size, entries, self._start.known)
        self._size = size

    def _excluded_after(self, one: int) -> list[int]:
        """Returns the ids that cannot follow `one`, the id that the codebook has read since the last call."""
        if one in self._excluded:
            self._recent = []  # chosen because nothing was forbidden: forget what came before
        last, longest = self.book.base_ids_of(one), self.book.params.merge_size
        longer = [(begun + last, n) for begun, n in self._recent if len(begun + last) < longest]
        self._recent = [*longer, (last, self._installed)]
        return [id_ for begun, n in self._recent for id_ in self.forbidden_after(begun, n)]

    def forbidden_after(self, base_ids: BaseIds, installed: int) -> list[int]:
        """Returns the ids that cannot follow `base_ids`, because together they would be an entry.

        installed: number of entries when the id that `base_ids` begin with was chosen; at least as many as existed
        after the prompt.
        """
        start, grown, vocab = self._start, self._grown, self.book.params.vocab_size
        ids, rests = start.forbidden_after(base_ids)
        out = ids.copy()
        for rest in rests & grown.slots_by_prefix.keys():
            out += [vocab + one for one in grown.slots_by_prefix[rest]]
        for slot, rest in grown.suffixes_by_prefix.get(base_ids, ()):
            if slot >= installed:
                break
            out += rest if len(rest) == 1 else ()
            out += [vocab + one for one in start.slots_by_prefix.get(rest, ())]
            out += [vocab + one for one in grown.slots_by_prefix.get(rest, ())]
        return out


def find_excluded_ids(
    book: Codebook, ids: Uint32s, ends: Collection[int] = ()
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Finds which ids cannot follow each of the given ids, and returns pairs as two arrays int64 [pairs].

    A pair is an index into `ids`, and an id that cannot follow the id at this index. book: the codebook before the ids;
    it is not changed. ids: uint32 [n]. ends: indices at which a prompt, or another part that was compressed without
    the ids after it, ends; any id may follow there.
    """
    book, at, out = book.copy(), [], []
    canonical = CanonicalIds(book)
    canonical.excluded()
    for index, one in enumerate(ids.tolist()):
        book.push(one)
        excluded = canonical.excluded()
        if index in ends:
            canonical.end_part()
            continue
        at += [index] * len(excluded)
        out += excluded
    return np.array(at, np.int64), np.array(out, np.int64)
