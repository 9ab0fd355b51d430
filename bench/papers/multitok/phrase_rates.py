"""MultiTok: how fast phrases are learned and used, their memory, and the compression of a corpus by setting.

Speed is that of encoding unit numbers on one core, including calls into the library and new arrays. It is measured in
processor time of the thread, so that waits for the core do not count, and compared with an encoder in plain Python over
tuples. That encoder is written here in the manner of the published code, which is not part of this project; both must
give the same ids. Trials of the two alternate.

A ratio is the number of tokens after encoding divided by the number of units before (the paper's r, definition 1), in
the samples that phrases are learned from. --held-out adds the ratios of other samples, encoded with the learned
dictionary; words that occur only in these samples are units too, as in the published code. With --tokenizer the units
are the tokenizer's ids, and `per_word` is tokens divided by words.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.recording import summarize_samples, time_call
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
SLOW_TRIALS = 3  # most trials of plain Python


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench multitok` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add("--text", nargs="+", metavar="FILE", help="texts to learn phrases from: .txt or .jsonl, also .gz")
    add(
        "--held-out",
        nargs="+",
        metavar="FILE",
        help="texts to encode with the phrases learned from --text: .txt or .jsonl, also .gz (default: none)",
    )
    add(
        "--tokenizer",
        help="vocabulary file of `bench tokens`; phrases are made of its ids, and only ratios are measured (default: "
        "phrases are made of words)",
    )
    add(
        "--only",
        choices=("speed", "ratios"),
        help="measure only the speed of encoding, or only the ratios of tokens to units (default: both; with "
        "--tokenizer ratios)",
    )
    flag("--trials", 9, "timed calls per measurement")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures speed and ratios and yields a record per result.

    Raises `MlxZipError` if a flag or file cannot be used, before anything is measured.
    """
    if not args.text:
        raise MlxZipError("--text is missing")
    check_flags_at_least(args, 1, "trials")
    if args.tokenizer and args.only == "speed":
        raise MlxZipError("--only speed measures words: leave --tokenizer out")
    corpus = PhraseCorpus(args)
    speeds = [] if args.tokenizer or args.only == "ratios" else speed_records(corpus, args.trials)
    for line in [*speeds, *([] if args.only == "speed" else ratio_records(corpus))]:
        yield {"bench": "multitok", **line, "data": corpus.record}
        print(f"{line['what']}: {line['setting']}", file=sys.stderr)


class PhraseCorpus:
    """The texts of a run as samples of units.

    learned: samples of --text. held_out: samples of --held-out, or None. units: vocabulary of the units. words: number
    of words in --text. record: description of the texts in a JSON line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        read = lambda files: [document.text for document in read_corpus(files).documents] if files else []
        texts, others = read(args.text), read(args.held_out)
        self.words = sum(len(text.split()) for text in texts)
        self.name, self.units, split = units_of_texts(args.tokenizer, [*texts, *others])
        number = lambda samples: Samples.from_sequences([self.units.numbers(split(sample)) for sample in samples])
        self.learned, self.held_out = number(texts), number(others) if others else None
        self.record = {
            "files": [name.rsplit("/", 1)[-1] for name in (*args.text, *(args.held_out or []))],
            "units_are": self.name,
            "units": self.units.size,
            "samples": len(texts),
            "corpus_units": len(self.learned.ids),
            "words": self.words,
        }

    def learn_dictionary(self, window: int, percent: float = 100) -> tuple[Dictionary, Samples]:
        """Returns a dictionary learned from the first `percent` percent of the samples, and the ids of all samples.

        window: most units in a phrase; 0: no limit.
        """
        made = Dictionary(Settings(self.units, window))
        first, rest = self.learned.split_at(count_leading_samples(len(self.learned), percent))
        return made, Samples.join([made.train(first), made.encode_as_single_units(rest)])


def units_of_texts(tokenizer: str | None, texts: Sequence[str]) -> tuple[str, Words | Tokens, Any]:
    """Returns the name of the units, the vocabulary of units, and a function that splits a text into units.

    Units are the ids of `tokenizer`; if `tokenizer` is None, the words of the texts.
    """
    if tokenizer is None:
        return "words", Words.from_samples(map(str.split, texts)), str.split
    vocabulary = read_vocabulary(tokenizer)
    return vocabulary.name, Tokens(vocabulary.size), vocabulary.encode


# ---- speed


def speed_records(corpus: PhraseCorpus, trials: int) -> Iterator[dict[str, Any]]:
    samples, tuples = corpus.learned, [tuple(sample.tolist()) for sample in corpus.learned]
    for window in WINDOWS:
        dictionary, ids = corpus.learn_dictionary(window)
        known, plain_ids = learn_phrases_in_plain_python(tuples, corpus.units.size, window)
        if plain_ids != ids.to_lists():
            raise MlxZipError("the plain encoder gives other ids than the library: one of them is wrong")
        setting = {"window": window}
        learn = lambda window=window: Dictionary(Settings(corpus.units, window)).train(samples)
        slow = lambda window=window: learn_phrases_in_plain_python(tuples, corpus.units.size, window)
        bytes_per_phrase = (dictionary.nbytes - 4 * corpus.units.size) / len(dictionary)
        yield {
            "what": "train",
            "setting": setting,
            **compare_speeds(len(samples.ids), trials, learn, slow),
            "phrases": len(dictionary),
            "bytes_per_phrase": round(bytes_per_phrase, 2),
        }
        use = lambda dictionary=dictionary: dictionary.encode_all(samples)
        slow = lambda known=known: [encode_in_plain_python(known, sample) for sample in tuples]
        if slow() != use().to_lists():
            raise MlxZipError("the plain encoder gives other ids than the library: one of them is wrong")
        yield {"what": "encode", "setting": setting, **compare_speeds(len(samples.ids), trials, use, slow)}
        pruned = prune(dictionary, 1)
        for matching in ("longest", "walk"):
            use = lambda pruned=pruned, matching=matching: pruned.encode_all(samples, matching=matching)
            yield {
                "what": "encode",
                "setting": {**setting, "pruned": 1, "matching": matching},
                **compare_speeds(len(samples.ids), trials, use, None),
            }


def learn_phrases_in_plain_python(
    samples: Sequence[tuple[int, ...]], units: int, window: int
) -> tuple[dict[tuple[int, ...], int], list[list[int]]]:
    """Learns phrases in plain Python; returns the id of each unit and phrase (from 1 on), and the ids of each sample.

    samples: unit numbers. units: number of units. window: most units in a phrase; 0: no limit.
    """
    known: dict[tuple[int, ...], int] = {(unit,): 1 + unit for unit in range(units)}
    encoded = []
    for sample in samples:
        ids, at, n = [], 0, len(sample)
        while at < n:
            end = at + 1
            stop = n if window == 0 else min(n, at + window)
            while end < stop and sample[at : end + 1] in known:
                end += 1
            ids.append(known[sample[at:end]])
            if end < stop:
                known[sample[at : end + 1]] = 1 + len(known)
            at = end
        encoded.append(ids)
    return known, encoded


def encode_in_plain_python(known: dict[tuple[int, ...], int], sample: tuple[int, ...]) -> list[int]:
    """Encodes a sample in plain Python without learning; returns its ids. known: the id of each unit and phrase."""
    ids, at, n = [], 0, len(sample)
    while at < n:
        end, id = at + 1, known[sample[at : at + 1]]
        while end < n:
            longer = known.get(sample[at : end + 1])
            if longer is None:
                break
            end, id = end + 1, longer
        ids.append(id)
        at = end
    return ids


def compare_speeds(
    n_units: int, trials: int, ours: Callable[[], Any], plain: Callable[[], Any] | None
) -> dict[str, Any]:
    """Times two functions that process the same `n_units` units, alternately; returns their speeds and the ratio.

    Speeds are in millions of units per second. plain: the version in plain Python, which gets at most `SLOW_TRIALS`
    trials; None if there is none.
    """
    ours()  # warm-up
    mine, other = [], []
    for trial in range(trials):
        mine.append(_million_units_per_s(ours, n_units))
        if plain is not None and trial < SLOW_TRIALS:
            other.append(_million_units_per_s(plain, n_units))
    record = {"unit": "million units per s", "ours": summarize_samples(mine)}
    if other:
        record |= {"plain_python": summarize_samples(other), "ratio": round(median(mine) / median(other), 1)}
    return record


def _million_units_per_s(call: Callable[[], Any], n_units: int) -> float:
    return n_units / time_call(call, clock=time.thread_time) / 1e6


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
