"""AdaptBPE in plain Python, slow and obvious, which the tests compare `mlx_zip.vocab.adaptbpe` with.

A token below 256 is a byte; token 256 + m is the result of merge m. A word is a list of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mlx_zip.vocab.adaptbpe.merge_list import BYTES, MergeList

Word = list[int]


def merge(word: Word, parts: Sequence[int], made: int) -> Word:
    """Returns a word with each occurrence of the pair `parts` replaced by the token `made`, from left to right."""
    out, at = [], 0
    while at < len(word):
        if word[at : at + 2] == list(parts):
            out.append(made)
            at += 2
        else:
            out.append(word[at])
            at += 1
    return out


def split(word: Word, merges: MergeList, token: int, virtual: set[int]) -> Word:
    """Returns a word with each occurrence of `token` split into its parts, and these further if they are virtual."""

    def pieces(x: int) -> Word:
        if x != token and x not in virtual:
            return [x]
        left, right = merges.parts[x - BYTES].tolist()
        return pieces(left) + pieces(right)

    return [y for x in word for y in (pieces(x) if x == token else [x])]


def encode(merges: MergeList, word: bytes, ranks: Sequence[int]) -> Word:
    """Encodes one piece: applies the merges `ranks` in this order."""
    tokens = list(word)
    for rank in ranks:
        tokens = merge(tokens, merges.parts[rank].tolist(), BYTES + rank)
    return tokens


def replay(merges: MergeList, word: bytes, n: int, virtual: Sequence[int], promoted: Sequence[int]) -> Word:
    """Encodes one piece: applies the first n merges, then for each swap splits virtual[i] and applies promoted[i]."""
    tokens, gone = encode(merges, word, range(n)), set()
    for p, q in zip(virtual, promoted, strict=True):
        gone.add(BYTES + p)
        tokens = split(tokens, merges, BYTES + p, gone)
        tokens = merge(tokens, merges.parts[q].tolist(), BYTES + q)
    return tokens


def final(merges: MergeList, word: bytes, n: int, virtual: Sequence[int], promoted: Sequence[int]) -> Word:
    """Encodes one piece: applies the first n and the promoted merges, then splits every virtual token."""
    tokens, gone = encode(merges, word, [*range(n), *promoted]), {BYTES + p for p in virtual}
    for token in gone:
        tokens = split(tokens, merges, token, gone)
    return tokens


def kept(merges: MergeList, word: bytes, ranks: Sequence[int]) -> Word:
    """Encodes one piece: applies all merges, then splits the tokens of those not in `ranks`."""
    tokens, gone = encode(merges, word, range(len(merges))), {BYTES + r for r in range(len(merges))}
    gone -= {BYTES + rank for rank in ranks}
    for token in gone:
        tokens = split(tokens, merges, token, gone)
    return tokens


def adapt(
    merges: MergeList,
    words: Sequence[tuple[bytes, int]],
    n: int,
    margin: int = 0,
    max_swaps: int | None = None,
    tie: str = "high",
    counting: str = "overlapping",
) -> list[tuple[int, int, int, int, int]]:
    """Returns for each swap (p, its count, q, its count, number of tokens in the texts after the swap).

    Arguments are those of `adapt_merges`, but words are (piece, count) pairs. Counts are made anew for every swap.
    """
    corpus = [(encode(merges, word, range(n)), count) for word, count in words]
    for rank in merges.unfinished:
        corpus = [(split(word, merges, BYTES + rank, set()), count) for word, count in corpus]
    actual, left, gone, swaps = set(range(merges.letters, n)), set(range(n, len(merges))), set(), []
    ranks = {tuple(parts): rank for rank, parts in enumerate(merges.parts.tolist())}
    while actual and left and (max_swaps is None or len(swaps) < max_swaps):
        tokens: Counter[int] = Counter()
        pairs: Counter[int] = Counter()
        for word, count in corpus:
            for x in word:
                tokens[x - BYTES] += count
            for pair, places in occurrences(word, counting).items():
                if pair in ranks:
                    pairs[ranks[pair]] += count * places
        p = min(actual, key=lambda rank: (tokens[rank], -rank if tie == "high" else rank))
        q = min(left, key=lambda rank: (-pairs[rank], rank))
        if pairs[q] <= tokens[p] + margin:
            break
        actual ^= {p, q}
        left.remove(q)
        gone.add(BYTES + p)
        parts = merges.parts[q].tolist()
        corpus = [(merge(split(w, merges, BYTES + p, gone), parts, BYTES + q), count) for w, count in corpus]
        swaps.append((p, tokens[p], q, pairs[q], sum(len(word) * count for word, count in corpus)))
    return swaps


def occurrences(word: Word, counting: str) -> dict[tuple[int, int], int]:
    """Counts each pair of neighbours in a word: "overlapping" at every position, "firing" only where it would merge."""
    places = Counter(pairwise(word))
    if counting == "overlapping":
        return places
    return {pair: len(word) - len(merge(word, pair, -1)) for pair in places}
