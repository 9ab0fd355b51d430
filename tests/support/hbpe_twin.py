"""The second stage of hierarchical BPE in plain Python, slow and obvious, which the tests compare `hbpe` with.

The rules are those of `mlx_zip.vocab.hbpe.patch_merges`; pairs are recounted for every merge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from mlx_zip.vocab.hbpe.patch_merges import FIRST_MERGE, MARK

Pair = tuple[int, int]


def learn(tokens: Iterable[bytes], patch_size: int) -> list[tuple[Pair, int, int]]:
    """Learns merges -> for each: (pair of symbols, occurrences of the pair, number of tokens that it made fit)."""
    pool = [list(token) for token in set(tokens) if len(token) + 1 > patch_size]
    out = []
    while pool:
        counts = Counter(pair for token in pool for pair in pairwise(token))
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        merged = [replace(token, pair, FIRST_MERGE + len(out)) for token in pool]
        pool = [token for token in merged if len(token) + 1 > patch_size]
        out.append((pair, counts[pair], len(merged) - len(pool)))
    return out


def encode(pairs: Sequence[Pair], token: bytes, patch_size: int | None) -> list[int]:
    """Returns the patch of a token: applies merges until it fits `patch_size` symbols, or all if that is None.

    pairs: the pair of symbols that each merge joins.
    """
    symbols = list(token)
    for k, pair in enumerate(pairs):
        if patch_size is not None and len(symbols) + 1 <= patch_size:
            break
        symbols = replace(symbols, pair, FIRST_MERGE + k)
    return [*symbols, MARK]


def replace(symbols: list[int], pair: Pair, symbol: int) -> list[int]:
    """Returns the symbols with each occurrence of `pair` replaced by `symbol`, from left to right."""
    if pair[0] not in symbols or pair[1] not in symbols:  # nearly always so, and quickly seen
        return symbols
    out, at = [], 0
    while at < len(symbols):
        merged = tuple(symbols[at : at + 2]) == pair
        out.append(symbol if merged else symbols[at])
        at += 1 + merged
    return out
