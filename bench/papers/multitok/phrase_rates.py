"""MultiTok: the compression of a corpus by setting, and the memory of the phrases.

A ratio is the number of tokens after encoding divided by the number of units before (the paper's r, definition 1), in
the samples that phrases are learned from. --held-out adds the ratios of other samples, encoded with the learned
dictionary; words that occur only in these samples are units too, as in the published code. With --tokenizer the units
are the tokenizer's ids, and `per_word` is tokens divided by words.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_zip.bench.recording import print_record
from mlx_zip.errors import CodecError, MlxZipError
from mlx_zip.text.documents import read_corpus
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.multitok import (
    PRUNINGS,
    Dictionary,
    Samples,
    Settings,
    Tokens,
    Words,
    count_leading_samples,
    prune,
    rewrite_ids,
)

# (percent of samples, window) -> r of the paper's table I on 25,000 reviews; 0: Max
PAPER_WORDS = {(100, 0): 0.57, (100, 2): 0.60, (50, 0): 0.80, (50, 2): 0.83, (25, 2): 0.93}
PAPER_PRUNED = {0: 0.65, 2: 0.66}  # window -> r with pruning mode "published", K = 1, all samples
PAPER_TOKENS = {"gpt2": {(50, 2): 0.81, (33, 2): 0.88}}
WINDOWS = (0, 2)  # measured limits of units in a phrase; 0: no limit
AT_MOST = (1, 2)  # phrases used at most this often are pruned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench multitok` to a parser."""
    add = parser.add_argument
    add("--text", nargs="+", metavar="FILE", help="texts to learn phrases from: .txt or .jsonl, also .gz")
    add(
        "--held-out",
        nargs="+",
        metavar="FILE",
        help="texts to encode with the phrases learned from --text: .txt or .jsonl, also .gz (default: none)",
    )
    add(
        "--tokenizer",
        help="vocabulary file of `bench tokens`; phrases are made of its ids (default: phrases are made of words)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures ratios and prints one JSON line per result.

    Raises `MlxZipError` if a flag or file cannot be used, before anything is measured.
    """
    if not args.text:
        raise MlxZipError("--text is missing")
    corpus = PhraseCorpus(args)
    for line in ratio_records(corpus):
        print_record({"bench": "multitok", **line, "data": corpus.record})
        print(f"{line['what']}: {line['setting']}", file=sys.stderr)
    return 0


class PhraseCorpus:
    """The texts of a run as samples of units.

    learned: samples of --text. held_out: samples of --held-out, or None. units: vocabulary of the units. words: number
    of words in --text. record: description of the texts in a JSON line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        read = lambda files: [document.text for document in read_corpus(files).documents] if files else []
        texts, others = read(args.text), read(args.held_out)
        self.words = sum(len(text.split()) for text in texts)
        if args.tokenizer is None:
            split: Callable[[str], Any] = str.split
            self.units: Words | Tokens = Words.from_samples(map(str.split, [*texts, *others]))
            self.name = "words"
        else:
            vocabulary = read_vocabulary(args.tokenizer)
            split, self.units = vocabulary.encode, Tokens(vocabulary.size)
            self.name = vocabulary.name
        number = lambda samples: Samples.from_sequences([self.units.numbers(split(sample)) for sample in samples])
        self.learned, self.held_out = number(texts), number(others) if others else None
        self.record = {
            "files": [*args.text, *(args.held_out or [])],
            "units_are": self.name,
            "units": self.units.size,
            "samples": len(texts),
            "corpus_units": len(self.learned.ids),
            "words": self.words,
        }
        self.record["files"] = [name.rsplit("/", 1)[-1] for name in self.record["files"]]

    def learn_dictionary(self, window: int, percent: float = 100) -> tuple[Dictionary, Samples]:
        """Returns a dictionary learned from the first `percent` percent of the samples, and the ids of all samples.

        window: most units in a phrase; 0: no limit.
        """
        made = Dictionary(Settings(self.units, window))
        first, rest = self.learned.split_at(count_leading_samples(len(self.learned), percent))
        return made, Samples.join([made.train(first), made.encode_as_single_units(rest)])


# ---- ratios


def ratio_records(corpus: PhraseCorpus) -> Iterator[dict[str, Any]]:
    paper = PAPER_TOKENS.get(corpus.name, {}) if isinstance(corpus.units, Tokens) else PAPER_WORDS
    settings = dict.fromkeys([*paper, *((percent, window) for percent in (100, 50) for window in WINDOWS)])
    for percent, window in settings:
        dictionary, ids = corpus.learn_dictionary(window, percent)
        setting = {"percent": percent, "window": window}
        stats = dictionary.stats()
        kept = ("phrases", "never_used", "used_once", "longest", "phrases_by_length", "memory_bytes")
        yield {
            "what": "ratio",
            "setting": setting,
            "ratio": round(stats["ratio"], 4),
            "tokens": len(ids.ids),
            "per_word": round(len(ids.ids) / corpus.words, 4),
            "paper": paper.get((percent, window)),
            **{name: stats[name] for name in kept},
            **held_out_ratios(corpus, dictionary),
        }
        if percent == 100:
            yield from pruned_ratio_records(corpus, dictionary, ids, setting)


def pruned_ratio_records(
    corpus: PhraseCorpus, dictionary: Dictionary, ids: Samples, setting: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    window = setting["window"]
    for at_most in AT_MOST:
        bound = growth_bound(dictionary, at_most)
        for mode in PRUNINGS:
            pruned = prune(dictionary, at_most, mode)
            again = rewrite_ids(dictionary, pruned, ids)
            in_paper = mode == "published" and at_most == 1 and isinstance(corpus.units, Words)
            yield {
                "what": "pruned",
                "setting": {**setting, "at_most": at_most, "mode": mode},
                "ratio": round(len(again.ids) / len(corpus.learned.ids), 4),
                "phrases": len(pruned),
                "memory_bytes": pruned.nbytes,
                "paper": PAPER_PRUNED.get(window) if in_paper else None,
                "growth": round(len(again.ids) / len(ids.ids), 4),
                "lemma_printed": round(bound.printed, 4),
                "lemma_corrected": round(bound.corrected, 4),
                **held_out_ratios(corpus, pruned),
            }


@dataclass(frozen=True)
class Bound:
    """Upper bounds of lemma 1 on the growth of a corpus when phrases used up to K times are removed.

    printed: as in the paper, (N + sum_k lambda_k (w - 1)) / N; it does not hold, because a phrase used k times is
    replaced k times. corrected: with k lambda_k instead; it holds if a phrase is replaced by at most its units. N:
    tokens. lambda_k: number of phrases used k times. w: units of the longest phrase.
    """

    printed: float
    corrected: float


def growth_bound(dictionary: Dictionary, at_most: int) -> Bound:
    """Returns lemma 1's bounds for K = `at_most`. Raises `CodecError` if the dictionary was trained on no tokens."""
    longest, tokens = int(dictionary.lengths.max()), dictionary.totals.tokens
    if not tokens:
        raise CodecError("the dictionary was trained on nothing, so there is no growth to bound")
    used = dictionary.uses[dictionary.settings.units.size :].astype(np.int64)
    used = used[(used > 0) & (used <= at_most)]
    return Bound(1 + len(used) * (longest - 1) / tokens, 1 + int(used.sum()) * (longest - 1) / tokens)


def held_out_ratios(corpus: PhraseCorpus, dictionary: Dictionary) -> dict[str, Any]:
    """Returns the held-out samples' ratios of tokens to units, by window; {} if there are no held-out samples."""
    if corpus.held_out is None:
        return {}
    n = len(corpus.held_out.ids)
    return {"held_out": {w: round(len(dictionary.encode_all(corpus.held_out, w).ids) / n, 4) for w in WINDOWS}}
