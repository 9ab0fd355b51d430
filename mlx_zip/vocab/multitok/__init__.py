"""MultiTok (arXiv 2410.21548): learns phrases of words, or of a tokenizer's ids, from texts, as LZW does.

    words = Words.from_samples(sample.split() for sample in corpus)
    dictionary = Dictionary(Settings(words, window=2))
    ids = dictionary.train(dictionary.number_units(sample.split() for sample in corpus))
    small = prune(dictionary, at_most=1)
    small.encode(words.numbers("some more text".split()))

`docs/reports/multitok.md` reports results; `tests/support/multitok_twin.py` has the same rules in plain Python.
"""

from mlx_zip.vocab.multitok.dictionary import MATCHINGS, Dictionary
from mlx_zip.vocab.multitok.pruning import Rewriter, prune, renumber_ids, rewrite_ids
from mlx_zip.vocab.multitok.units import (
    PRUNINGS,
    Pruning,
    Samples,
    Settings,
    Tokens,
    Totals,
    Words,
    count_leading_samples,
)

__all__ = [
    "MATCHINGS",
    "PRUNINGS",
    "Dictionary",
    "Pruning",
    "Rewriter",
    "Samples",
    "Settings",
    "Tokens",
    "Totals",
    "Words",
    "count_leading_samples",
    "prune",
    "renumber_ids",
    "rewrite_ids",
]
