"""AdaptBPE: finds the merges that texts do not need and the merges that replace them.

Source: arXiv 2601.21665, algorithm 1. A list is cut to its first N merges, the actual ones: their tokens may be
emitted. Then merges are swapped as long as q is more frequent than p. p is the actual merge whose token is rarest in
the texts. p becomes virtual: its tokens are split into their parents, but later merges can still use p. q is the merge
outside the list whose parents are neighbours most often. q becomes actual. The paper leaves two points open. Here,
`adapt_merges` defines how ties are broken, and a virtual merge never becomes actual again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np

from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.merge_list import BYTES, BpeEncoder, MergeList, Schedule

TIES = ("high", "low")
COUNTINGS = ("overlapping", "firing")


@dataclass(frozen=True)
class Swap:
    """One swap: ranks and counts of p (now virtual) and q (now actual), and the number of tokens after the swap."""

    p: int
    p_count: int
    q: int
    q_count: int
    n_tokens: int


@dataclass(frozen=True)
class Adaptation:
    """The result of `adapt_merges`: the first `n` merges, and the swaps in order."""

    n: int
    swaps: tuple[Swap, ...] = ()

    @property
    def virtual(self) -> list[int]:
        """Ranks of the merges that became virtual, in order of the swaps."""
        return [swap.p for swap in self.swaps]

    @property
    def promoted(self) -> list[int]:
        """Ranks of the merges that became actual, in order of the swaps. A promoted merge may become virtual later."""
        return [swap.q for swap in self.swaps]


def adapt_merges(
    merges: MergeList,
    words: Mapping[bytes, int],
    n: int,
    *,
    margin: int = 0,
    max_swaps: int | None = None,
    tie: str = "high",
    counting: str = "overlapping",
    progress: Callable[[Swap], Any] = lambda swap: None,
) -> Adaptation:
    """Adapts the first n merges of a list to texts by swapping merges (p leaves, q enters; see the module).

    words: the pieces of the texts and how often each occurs. n: number of merges, letters included; letters are never
    swapped. margin: q's count must exceed p's by more than this. max_swaps: None for no limit. tie: "high" takes as p
    the highest rank among equally rare merges, "low" the lowest; q is always the lowest rank among equally frequent
    merges. counting: "overlapping" counts a pair of neighbours at every position, "firing" only where it would be
    merged: in x x x, the pair x x counts twice or once. progress is called after each swap. Raises `DataError` if an
    argument is out of range.
    """
    _check_merge_count(merges, n)
    _check_swap_settings(margin, max_swaps, tie, counting)
    corpus = _SwapCorpus(merges, words, n, tie, counting)
    swaps: list[Swap] = []
    while max_swaps is None or len(swaps) < max_swaps:
        pair = corpus.find_next_swap()
        if pair is None or corpus.pairs[pair[1]] <= corpus.counts[pair[0] + BYTES] + margin:
            break
        p, q = pair
        counts = corpus.counts[p + BYTES], corpus.pairs[q]
        corpus.apply_swap(p, q)
        swaps.append(Swap(p, counts[0], q, counts[1], corpus.n_tokens))
        progress(swaps[-1])
    return Adaptation(n, tuple(swaps))


def most_frequent_merges(merges: MergeList, words: Mapping[bytes, int], k: int) -> list[int]:
    """Returns the ranks, rising, of the k merges whose tokens occur most often when all merges are applied to texts.

    words: the pieces of the texts and how often each occurs. Among equally frequent merges, lower ranks are taken
    first. Letters are always included and count in k.
    """
    _check_merge_count(merges, k)
    tokens, ends = BpeEncoder(merges, pieces="whole").encode_pieces(list(words))
    weights = np.repeat(np.fromiter(words.values(), np.int64, len(words)), np.diff(ends, prepend=0))
    counts = np.bincount(tokens, weights, BYTES + len(merges))[BYTES:]
    counts[: merges.letters] = counts.max(initial=0) + 1
    return sorted(np.argsort(-counts, kind="stable")[:k].tolist())


def _check_merge_count(merges: MergeList, n: int) -> None:
    least, most = merges.letters, len(merges)
    if not least <= n <= most:
        raise DataError(f"{n - least} merges to keep are not 0..{most - least}, the number of merges in the list")


def _check_swap_settings(margin: int, max_swaps: int | None, tie: str, counting: str) -> None:
    if margin < 0 or (max_swaps is not None and max_swaps < 0):
        raise DataError("margin and max_swaps must be at least 0")
    if tie not in TIES:
        raise DataError(f"tie {tie!r} is none of {', '.join(TIES)}")
    if counting not in COUNTINGS:
        raise DataError(f"counting {counting!r} is none of {', '.join(COUNTINGS)}")


class _SwapCorpus:
    """The texts while merges are swapped: words as lists of tokens, counts of tokens and pairs, candidates for swaps.

    words, weights: the tokens of each distinct word, and how often the word occurs. counts: occurrences of each token.
    pairs: for each merge outside the vocabulary, by rank, how often its two parents are neighbours. with_token: by
    token, indices of the words that hold or held the token. with_pair: by rank of a merge, indices of the words in
    which its parents are or were neighbours. left_out: pair of tokens -> rank of the merge outside the vocabulary.
    rare, frequent: heaps of candidates for p and q; outdated items are skipped.
    """

    def __init__(self, merges: MergeList, words: Mapping[bytes, int], n: int, tie: str, counting: str) -> None:
        self.parts: list[tuple[int, int]] = list(map(tuple, merges.parts.tolist()))
        self.left_out = {pair: n + i for i, pair in enumerate(self.parts[n:])}
        self.virtual: set[int] = set()  # tokens
        self.sign = -1 if tie == "high" else 1
        self.ranks = self._addable_ranks if counting == "overlapping" else self._addable_ranks_that_merge
        self.counts, self.pairs = [0] * (BYTES + len(merges)), [0] * len(merges)
        self.with_token: defaultdict[int, set[int]] = defaultdict(set)
        self.with_pair: defaultdict[int, set[int]] = defaultdict(set)
        tokens, ends = BpeEncoder(merges, Schedule.plain(len(merges), n), "whole").encode_pieces(list(words))
        flat, borders = tokens.tolist(), [0, *ends.tolist()]
        self.words = [flat[start:end] for start, end in pairwise(borders)]
        self.weights = list(words.values())
        self.n_tokens = sum(len(word) * weight for word, weight in zip(self.words, self.weights, strict=True))
        for at, word in enumerate(self.words):
            self._add_counts(at, word)
        self.lowest = BYTES + merges.letters  # lowest token that may become virtual
        self.rare = [(self.counts[BYTES + rank], self.sign * rank) for rank in range(merges.letters, n)]
        self.frequent = [(-count, rank) for rank, count in enumerate(self.pairs) if rank >= n]
        heapify(self.rare)
        heapify(self.frequent)

    def find_next_swap(self) -> tuple[int, int] | None:
        """Returns the ranks (p, q) of the next swap; None if no merge is left to swap out, or none to swap in."""
        rare, frequent = self.rare, self.frequent
        while rare and (BYTES + (p := self.sign * rare[0][1]) in self.virtual or rare[0][0] != self.counts[BYTES + p]):
            heappop(rare)
        while frequent and (self.parts[q := frequent[0][1]] not in self.left_out or -frequent[0][0] != self.pairs[q]):
            heappop(frequent)
        return (self.sign * rare[0][1], frequent[0][1]) if rare and frequent else None

    def apply_swap(self, p: int, q: int) -> None:
        """Splits the tokens of p and joins the parents of q in all words, and updates the counts."""
        gone, made, pair = BYTES + p, BYTES + q, self.parts[q]
        touched = self.with_token.pop(gone, set()) | self.with_pair.pop(q, set())
        self.virtual.add(gone)
        del self.left_out[pair]
        pieces = self._tokens_after_split(gone)
        tokens, pairs = {made}, set()
        for at in touched:
            old = self.words[at]
            new = _join_pair(_replace_token(old, gone, pieces), pair, made)
            if new == old:
                continue
            weight = self.weights[at]
            self.words[at] = new
            self.n_tokens += weight * (len(new) - len(old))
            tokens.update(old)
            pairs.update(self._subtract_counts(old, weight))
            tokens.update(new)
            pairs.update(self._add_counts(at, new))
        for token in tokens:
            if token >= self.lowest and token not in self.virtual:
                heappush(self.rare, (self.counts[token], self.sign * (token - BYTES)))
        for rank in pairs:
            heappush(self.frequent, (-self.pairs[rank], rank))

    def _tokens_after_split(self, token: int) -> list[int]:
        """Returns the tokens that a token is split into, given the merges that are virtual now."""
        if token not in self.virtual:
            return [token]
        left, right = self.parts[token - BYTES]
        return self._tokens_after_split(left) + self._tokens_after_split(right)

    def _add_counts(self, at: int, word: list[int]) -> list[int]:
        weight, ranks = self.weights[at], self.ranks(word)
        for token in word:
            self.counts[token] += weight
            self.with_token[token].add(at)
        for rank in ranks:
            self.pairs[rank] += weight
            self.with_pair[rank].add(at)
        return ranks

    def _subtract_counts(self, word: list[int], weight: int) -> list[int]:
        ranks = self.ranks(word)
        for token in word:
            self.counts[token] -= weight
        for rank in ranks:
            self.pairs[rank] -= weight
        return ranks

    def _addable_ranks(self, word: list[int]) -> list[int]:
        """Returns the ranks of the merges outside the vocabulary that join neighbours in a word, once per position."""
        return [rank for rank in map(self.left_out.get, pairwise(word)) if rank is not None]

    def _addable_ranks_that_merge(self, word: list[int]) -> list[int]:
        """Like `_addable_ranks`, but for x x x with equal tokens counts one pair, because only one can be merged."""
        ranks, taken = [], -1  # taken: index of the second token of the last pair of equal tokens; -1: none
        for at, pair in enumerate(pairwise(word)):
            rank = self.left_out.get(pair)
            if rank is None or (pair[0] == pair[1] and at == taken):
                continue
            ranks.append(rank)
            taken = at + 1 if pair[0] == pair[1] else -1
        return ranks


def _replace_token(word: Sequence[int], token: int, pieces: Sequence[int]) -> list[int]:
    return [y for x in word for y in (pieces if x == token else (x,))] if token in word else list(word)


def _join_pair(word: list[int], pair: tuple[int, int], made: int) -> list[int]:
    """Returns a word with each occurrence of `pair` replaced by the token `made`, from left to right."""
    if pair[0] not in word:
        return word
    out, at, end = [], 0, len(word) - 1
    while at <= end:
        if at < end and word[at] == pair[0] and word[at + 1] == pair[1]:
            out.append(made)
            at += 2
        else:
            out.append(word[at])
            at += 1
    return out
