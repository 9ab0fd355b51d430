"""Learns the entries of a codebook pack from a corpus of base ids.

Candidates are the frequent runs of the corpus. A pack is measured by compressing the corpus with it, as the runtime
would. The least used entries are removed, a part at a time, because the uses of an entry depend on the others. Then
pairs of neighbouring emitted ids are tried as entries, and the pack is pruned again, as long as the corpus becomes
shorter. The idea is that of MultiTok (arXiv 2410.21548), whose dictionary is pruned by use; MultiTok's own trainer is
`mlx_zip.vocab.multitok`.

Entries are ranked by uses alone, not by uses times length: when an entry is removed, shorter entries take over. With a
head cost, each entry's row in the head makes every step longer, by the row's share of the bytes that a step reads. The
search then removes entries in fine steps around the best size, and leaves single entries out at the end. On small
cases, the result costs no more than the best of all subsets of the pack (tests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import CodecParams, compress
from mlx_zip.codec.ids import as_ids
from mlx_zip.errors import DataError

WINDOW = 256  # base ids that are compressed together: few, because packs help short texts
POOL = 12  # candidates per wanted entry
KEPT = 0.75  # share of the entries that each pruning step keeps
REFINED = 0.9  # like KEPT, but after pairs were added to a pack
ROUNDS = 12
LEAST = 2  # minimum occurrences of a candidate
TRIMS = (0.95, 0.995)  # with a head cost: share of the entries kept at each step, coarse and fine
DROP_TRIALS = 16  # number of least used entries that are tried for removal

Entry = tuple[int, ...]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class LearnedPack:
    """A pack and its effect on a corpus.

    entries: most used first. ids: number of ids that the corpus is compressed to with the pack. ids_without: number of
    ids that it is compressed to without a pack. base_ids: length of the corpus. uses: how often each entry was emitted.
    """

    entries: tuple[Entry, ...]
    ids: int
    ids_without: int
    base_ids: int
    uses: tuple[int, ...]

    def cost(self, head_cost: float) -> float:
        """Returns the cost of generating the corpus, in steps: ids * (1 + head_cost * number of entries)."""
        return self.ids * (1 + head_cost * len(self.entries))


def learn_pack(
    params: CodecParams,
    sequences: Iterable[Any],
    size: int,
    *,
    window: int = WINDOW,
    head_cost: float = 0.0,
    progress: Callable[[str, int, int], None] = lambda stage, entries, ids: None,
) -> LearnedPack:
    """Learns up to `size` entries that shorten sequences of base ids most, when the codec adds its own entries as well.

    params: the codec of the pack; its start entries are ignored, and its codebook_size limits the pack and the codec's
    own entries together. sequences: sequences of base ids, see `as_ids`. window: maximum base ids that are compressed
    together. head_cost: cost that each entry adds to a step, as a fraction of the step (`mlx_zip.models.loading`);
    entries that cost more than they save are left out. progress is called with (stage, number of entries, ids of the
    compressed corpus or -1 if not counted). The pack is smaller than `size` if not enough runs recur. Raises
    `DataError` if the corpus is empty, the size exceeds the codebook, the window is below 2 or the cost is negative;
    `CodecError` if an id is not a base id.
    """
    if window < 2:
        raise DataError(
            f"a window (--window) must have at least 2 base ids, because an entry has at least 2, got {window}"
        )
    if not 1 <= size <= params.codebook_size:
        raise DataError(f"a pack of {size} entries does not fit a codebook of {params.codebook_size}")
    if not 0 <= head_cost < float("inf"):
        raise DataError(f"the cost of a row (--head-cost) must be a number of 0 or more, got {head_cost}")
    corpus = _Corpus(params, sequences, window)
    pool = corpus.candidates(POOL * size)
    for entries in _shrinking_sizes(len(pool), size, KEPT):
        pool = corpus.most_used_entries(pool, entries)
        progress("prune", len(pool), -1)
    best = corpus.measure_ranked(pool[:size])
    for _ in range(ROUNDS):
        made = corpus.measure_ranked(corpus.refine_entries(best.entries, size))
        progress("refine", len(made.entries), made.ids)
        if made.ids >= best.ids:
            break
        best = made
    return corpus.trim_pack(best, head_cost, progress) if head_cost else best


def measure_pack(
    params: CodecParams, entries: Sequence[Entry], sequences: Iterable[Any], window: int = WINDOW
) -> LearnedPack:
    """Returns the effect of a given pack on sequences, for example of held-out text.

    entries: the pack. Other arguments and errors: see `learn_pack`.
    """
    return _Corpus(params, sequences, window).measure_pack(entries)


def _shrinking_sizes(start: int, end: int, factor: float) -> Iterator[int]:
    """Yields sizes from `factor` times `start` down to `end`, each `factor` times the last; none if start <= end."""
    size = start
    while size > end:
        size = max(end, int(size * factor))
        yield size


class _Corpus:
    """A corpus, cut into windows of at most `window` base ids that are compressed separately. Measures packs on it."""

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
        """Returns at most `most` runs of 2 to merge_size ids: those that would save most ids if used everywhere."""
        found: list[tuple[Int64s, Int64s, int]] = []
        ids, can_merge = self._joined_windows()
        for n, (first, counts, _) in enumerate(recurring_runs(ids, can_merge, self.params.merge_size), start=2):
            found.append((first, counts * (n - 1), n))
        if not found:
            return []
        scores = np.concatenate([score for _, score, _ in found])
        first = np.concatenate([at for at, _, _ in found])
        lengths = np.concatenate([np.full(len(at), n) for at, _, n in found])
        order = np.argsort(-scores, kind="stable")
        best_first = zip(first[order].tolist(), lengths[order].tolist(), strict=True)
        runs = (tuple(ids[at : at + n].tolist()) for at, n in best_first)
        return list(islice(runs, most))

    def _joined_windows(self) -> tuple[Int64s, NDArray[np.bool_]]:
        """Returns the ids of all windows, each window followed by -1, and for each id whether it may be in an entry."""
        border = np.array([-1])
        ids = np.concatenate([part for window in self.windows for part in (window.astype(np.int64), border)])
        return ids, (ids >= 0) & ~np.isin(ids, self.params.disabled_ids)

    def most_used_entries(self, entries: Sequence[Entry], size: int) -> list[Entry]:
        """Returns the `size` most used entries, most used first, when the corpus is compressed with all of `entries`.

        Entries used less than `LEAST` times are left out. Only uses count, not lengths: when an entry is removed,
        shorter entries replace it almost everywhere.
        """
        _, uses, _ = self._compress_windows(entries)
        chosen = np.argsort(-uses, kind="stable")[:size]
        return [entries[i] for i in chosen.tolist() if uses[i] >= LEAST]

    def measure_ranked(self, entries: Sequence[Entry]) -> LearnedPack:
        """Measures the pack of `entries`, ordered by use, without those used less than `LEAST` times."""
        return self.measure_pack(self.most_used_entries(entries, len(entries)))

    def measure_pack(self, entries: Sequence[Entry]) -> LearnedPack:
        """Compresses the corpus with a given pack and returns the pack with its effect."""
        length, uses, _ = self._compress_windows(entries)
        return LearnedPack(tuple(entries), length, self.ids_without, self.base_ids, tuple(uses.tolist()))

    # ---- packs with a head cost

    def trim_pack(self, pack: LearnedPack, head_cost: float, progress: Callable[[str, int, int], None]) -> LearnedPack:
        """Returns the part of a pack with the lowest cost: tries smaller sizes, then finer steps around the best one.

        head_cost, progress: see `learn_pack`.
        """
        for factor in TRIMS:
            path = [pack, *self._shrinking_packs(pack, factor)]
            at = min(range(len(path)), key=lambda i: path[i].cost(head_cost))
            progress("trim", len(path[at].entries), path[at].ids)
            best, pack = path[at], path[max(0, at - 1)]
        while best.entries and (smaller := self._without_one(best)).cost(head_cost) <= best.cost(head_cost):
            best = smaller
        return self.measure_pack([best.entries[i] for i in np.argsort(-np.array(best.uses), kind="stable").tolist()])

    def _shrinking_packs(self, pack: LearnedPack, factor: float) -> Iterator[LearnedPack]:
        """Yields smaller and smaller packs, down to an empty pack.

        A pack of more than `DROP_TRIALS` entries keeps the share `factor` of its entries, the most used; a smaller pack
        loses the entry that saves least.
        """
        while pack.entries:
            if len(pack.entries) <= DROP_TRIALS:
                pack = self._without_one(pack)
            else:
                kept = np.argsort(-np.array(pack.uses), kind="stable")[: int(len(pack.entries) * factor)]
                pack = self.measure_pack([pack.entries[i] for i in kept.tolist()])
            yield pack

    def _without_one(self, pack: LearnedPack) -> LearnedPack:
        """Returns the pack without one of its `DROP_TRIALS` least used entries: the one whose loss adds fewest ids."""
        least = np.argsort(pack.uses, kind="stable")[:DROP_TRIALS].tolist()
        return min(
            (self.measure_pack(pack.entries[:i] + pack.entries[i + 1 :]) for i in least), key=lambda one: one.ids
        )

    def refine_entries(self, entries: Sequence[Entry], size: int) -> list[Entry]:
        """Returns at most `size` entries: the most used of `entries` and of the runs in pairs of emitted ids."""
        _, _, pairs = self._compress_windows(entries, pairs=True)
        there = set(entries)
        new = [pair for pair, _ in sorted(pairs.items(), key=lambda item: (-item[1], item[0])) if pair not in there]
        pool = [*entries, *new[: size // 2]]
        for n in _shrinking_sizes(len(pool), size, REFINED):
            pool = self.most_used_entries(pool, n)
        return pool

    def _compress_windows(self, entries: Sequence[Entry], pairs: bool = False) -> tuple[int, Int64s, dict[Entry, int]]:
        """Compresses the corpus with a pack -> (number of ids, uses of each entry, run of base ids -> its count).

        pairs: whether to count the runs that two neighbouring emitted ids stand for; see `_pair_runs`.
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
        return length, uses, self._pair_runs(entries, together)

    def _pair_runs(self, entries: Sequence[Entry], together: dict[tuple[int, int], int]) -> dict[Entry, int]:
        """Returns the runs of base ids that pairs of emitted ids stand for, with their counts.

        together: counts of the pairs. Leaves out pairs that occur less than `LEAST` times, pairs with a disabled id or
        an entry that is not in the pack, and runs longer than merge_size.
        """
        vocab, disabled, out = self.params.vocab_size, set(self.params.disabled_ids), dict[Entry, int]()
        for pair, count in together.items():
            if count < LEAST or max(pair) >= vocab + len(entries) or not disabled.isdisjoint(pair):
                continue
            spelled = tuple(x for one in pair for x in (entries[one - vocab] if one >= vocab else (one,)))
            if len(spelled) <= self.params.merge_size:
                out[spelled] = out.get(spelled, 0) + count
        return out


def recurring_runs(ids: Int64s, can_merge: NDArray[np.bool_], longest: int) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Yields, for n = 2..longest: the first place of each distinct run of n ids, how often the run occurs, and `runs`.

    runs [len(ids)]: number of the distinct run that begins at each place, -1 if no listed run begins there. can_merge:
    whether each id may be in a run. Only runs that occur at least `LEAST` times are listed. A run is looked for only
    where both runs of n - 1 ids that it contains are listed.
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
        yield at[first[often]], counts[often], runs
