"""Learns the entries of a codebook pack from a corpus of base ids.

Candidates are the frequent runs of the corpus. A pack is tried by encoding the corpus with it, as the runtime would;
what is used least leaves, a part at a time, since an entry's use depends on what else is there. Then pairs of what is
emitted next to one another are tried as entries, and pruned again, as long as the corpus becomes shorter. The idea is
MultiTok's (arXiv 2410.21548), its dictionary pruned by use; MultiTok's own trainer is `mlx_zip.vocab.multitok`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import CodecParams, compress
from mlx_zip.codec.ids import as_ids
from mlx_zip.errors import DataError

WINDOW = 256  # base ids that are compressed together: short, since packs are for short texts
POOL = 12  # candidates per entry wanted
KEPT = 0.75  # of the entries, from one pruning to the next
REFINED = 0.9  # the same, among pairs that were added to a pack
ROUNDS = 12
LEAST = 2  # occurrences of a candidate
TRIMS = (0.95, 0.995)  # of the entries, from one size to the next where a row of the head has a price; then finer
TRIED = 16  # entries, the least used, each of which is left out to see what it saves

Entry = tuple[int, ...]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Learned:
    """A pack, the most used entries first, and what it does to the corpus: ids with and without it, uses per entry."""

    entries: tuple[Entry, ...]
    ids: int
    ids_without: int
    base_ids: int
    uses: tuple[int, ...]

    def cost(self, head_cost: float) -> float:
        """Steps of the corpus, each longer by `head_cost` of a step for every entry, whose row the head reads."""
        return self.ids * (1 + head_cost * len(self.entries))


def learn(
    params: CodecParams,
    sequences: Iterable[Any],
    size: int,
    *,
    window: int = WINDOW,
    head_cost: float = 0.0,
    progress: Callable[[str, int, int], None] = lambda stage, entries, ids: None,
) -> Learned:
    """The `size` entries that shorten the sequences (of base ids) most, together with what the codebook grows itself.

    params: the codec they are for; its start entries are left out of account, its codebook_size is what a request may
    hold. sequences: of base ids each, as `as_ids` takes them. window: base ids that are compressed on their own, at
    most. head_cost: what a row more of the head costs, as a fraction of a step (`mlx_zip.models.step_bytes`); the pack
    then ends where an entry more would cost more than it saves. progress(stage, entries, ids of the corpus). Fewer
    entries come where the corpus has no more runs that recur. Raises `DataError` for an empty corpus, a size beyond the
    codebook, an empty window and a negative cost, `CodecError` for ids that are no base ids.
    """
    if window < 1:
        raise DataError(f"a window must have at least 1 base id, got {window}")
    if not 1 <= size <= params.codebook_size:
        raise DataError(f"a pack of {size} entries does not fit a codebook of {params.codebook_size}")
    if not 0 <= head_cost < float("inf"):
        raise DataError(f"the cost of a row (--head-cost) must be a number of 0 or more, got {head_cost}")
    corpus = _Corpus(params, sequences, window)
    pool = corpus.candidates(POOL * size)
    for entries in _shrinking(len(pool), size, KEPT):
        pool = corpus.best(pool, entries)
        progress("prune", len(pool), -1)
    best = corpus.tried(pool[:size])
    for _ in range(ROUNDS):
        made = corpus.tried(corpus.refined(best.entries, size))
        progress("refine", len(made.entries), made.ids)
        if made.ids >= best.ids:
            break
        best = made
    return corpus.trimmed(best, head_cost, progress) if head_cost else best


def measured(params: CodecParams, entries: Sequence[Entry], sequences: Iterable[Any], window: int = WINDOW) -> Learned:
    """Compresses sequences with a pack as it is, such as held-out text. Arguments and errors as of `learn`."""
    return _Corpus(params, sequences, window).measured(entries)


def _shrinking(start: int, end: int, factor: float) -> Iterator[int]:
    """Sizes from below `start` to `end`."""
    size = start
    while size > end:
        size = max(end, int(size * factor))
        yield size


class _Corpus:
    """Windows of base ids, to be encoded with one pack after another."""

    def __init__(self, params: CodecParams, sequences: Iterable[Any], window: int) -> None:
        self.params = replace(params, start=None)
        self.windows = [
            ids[at : at + window] for ids in map(as_ids, sequences) for at in range(0, len(ids), window) if len(ids)
        ]
        self.base_ids = sum(map(len, self.windows))
        if not self.base_ids:
            raise DataError("the corpus is empty: a pack is learned from text")
        self.ids_without = sum(len(compress(self.params, ids)[0]) for ids in self.windows)

    def candidates(self, most: int) -> list[Entry]:
        """The runs of 2 to merge_size ids that promise most: occurrences times ids saved by each."""
        found: list[tuple[Int64s, Int64s, int]] = []
        ids, can_merge = self._joined()
        for n, (first, counts) in enumerate(_runs(ids, can_merge, self.params.merge_size), start=2):
            found.append((first, counts * (n - 1), n))
        if not found:
            return []
        scores = np.concatenate([score for _, score, _ in found])
        first = np.concatenate([at for at, _, _ in found])
        lengths = np.concatenate([np.full(len(at), n) for at, _, n in found])
        chosen = np.argsort(-scores, kind="stable")[:most]
        return [
            tuple(ids[at : at + n].tolist())
            for at, n in zip(first[chosen].tolist(), lengths[chosen].tolist(), strict=True)
        ]

    def _joined(self) -> tuple[Int64s, NDArray[np.bool_]]:
        """All windows end to end, with a border behind each, and which ids may be part of an entry."""
        border = np.array([-1])
        ids = np.concatenate([part for window in self.windows for part in (window.astype(np.int64), border)])
        return ids, (ids >= 0) & ~np.isin(ids, self.params.disabled_ids)

    def best(self, entries: Sequence[Entry], size: int) -> list[Entry]:
        """The `size` entries that are used most when all are there; never one that is used once only.

        Uses alone count: where an entry goes, shorter ones step in, so that its length tells little of what is lost.
        """
        _, uses, _ = self._encoded(entries)
        chosen = np.argsort(-uses, kind="stable")[:size]
        return [entries[i] for i in chosen.tolist() if uses[i] >= LEAST]

    def tried(self, entries: Sequence[Entry]) -> Learned:
        """A pack in order of use, and what it does."""
        return self.measured(self.best(entries, len(entries)))

    def measured(self, entries: Sequence[Entry]) -> Learned:
        """What a pack does, as it is."""
        length, uses, _ = self._encoded(entries)
        return Learned(tuple(entries), length, self.ids_without, self.base_ids, tuple(uses.tolist()))

    # ---- a pack whose rows have a price

    def trimmed(self, pack: Learned, head_cost: float, progress: Callable[[str, int, int], None]) -> Learned:
        """The part of a pack that costs least: sizes are tried on the way down, finer around the best of them."""
        for factor in TRIMS:
            path = [pack, *self._downwards(pack, factor)]
            at = min(range(len(path)), key=lambda i: path[i].cost(head_cost))
            progress("trim", len(path[at].entries), path[at].ids)
            best, pack = path[at], path[max(0, at - 1)]
        while best.entries and (smaller := self._without_one(best)).cost(head_cost) <= best.cost(head_cost):
            best = smaller
        return self.measured([best.entries[i] for i in np.argsort(-np.array(best.uses), kind="stable").tolist()])

    def _downwards(self, pack: Learned, factor: float) -> Iterator[Learned]:
        """Smaller and smaller packs: the least used entries leave, of few the one that saves least."""
        while pack.entries:
            if len(pack.entries) <= TRIED:
                pack = self._without_one(pack)
            else:
                kept = np.argsort(-np.array(pack.uses), kind="stable")[: int(len(pack.entries) * factor)]
                pack = self.measured([pack.entries[i] for i in kept.tolist()])
            yield pack

    def _without_one(self, pack: Learned) -> Learned:
        """A pack without that one of its least used entries that saves least."""
        least = np.argsort(pack.uses, kind="stable")[:TRIED].tolist()
        return min((self.measured(pack.entries[:i] + pack.entries[i + 1 :]) for i in least), key=lambda one: one.ids)

    def refined(self, entries: Sequence[Entry], size: int) -> list[Entry]:
        """A pack of `size` from another and the pairs that it emits next to one another."""
        _, _, pairs = self._encoded(entries, pairs=True)
        there = set(entries)
        new = [pair for pair, _ in sorted(pairs.items(), key=lambda item: (-item[1], item[0])) if pair not in there]
        pool = [*entries, *new[: size // 2]]
        for n in _shrinking(len(pool), size, REFINED):
            pool = self.best(pool, n)
        return pool

    def _encoded(self, entries: Sequence[Entry], pairs: bool = False) -> tuple[int, Int64s, dict[Entry, int]]:
        """With a pack: ids of the corpus, and uses per entry.

        pairs: also how often what two neighbours spell occurs so, where both are base ids or entries of the pack and
        it is no longer than an entry may be.
        """
        grown = replace(self.params, codebook_size=max(self.params.codebook_size, len(entries)), start=entries or None)
        vocab, uses, length = grown.vocab_size, np.zeros(len(entries), np.int64), 0
        together: dict[tuple[int, int], int] = {}
        for window in self.windows:
            ids = compress(grown, window)[0].astype(np.int64)
            length += len(ids)
            ours = ids[(ids >= vocab) & (ids < vocab + len(entries))] - vocab
            uses += np.bincount(ours, minlength=len(entries))
            if pairs:
                for pair in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
                    together[pair] = together.get(pair, 0) + 1
        return length, uses, self._spelled(entries, together)

    def _spelled(self, entries: Sequence[Entry], together: dict[tuple[int, int], int]) -> dict[Entry, int]:
        vocab, disabled, out = self.params.vocab_size, set(self.params.disabled_ids), dict[Entry, int]()
        for pair, count in together.items():
            if count < LEAST or max(pair) >= vocab + len(entries) or not disabled.isdisjoint(pair):
                continue
            spelled = tuple(x for one in pair for x in (entries[one - vocab] if one >= vocab else (one,)))
            if len(spelled) <= self.params.merge_size:
                out[spelled] = out.get(spelled, 0) + count
        return out


def _runs(ids: Int64s, can_merge: NDArray[np.bool_], longest: int) -> Iterator[tuple[Int64s, Int64s]]:
    """For n = 2..longest: where each different run of n ids begins first, and how often it occurs; `LEAST` at least.

    A run is looked for only where the runs one shorter, of which it is made, occur as often.
    """
    _, single = np.unique(ids, return_inverse=True)
    kinds = int(single.max()) + 1
    runs = np.where(can_merge, single, -1)
    for n in range(2, longest + 1):
        at = np.flatnonzero((runs[:-1] >= 0) & (runs[1:] >= 0))
        keys = runs[at] * kinds + single[at + n - 1]
        _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        often = counts >= LEAST
        if not often.any():
            return
        name = np.where(often, np.cumsum(often) - 1, -1)
        runs = np.full(len(ids), -1, np.int64)
        runs[at] = name[inverse]
        yield at[first[often]], counts[often]
