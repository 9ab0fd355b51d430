"""MultiTok: how fast phrases are learned and used, what they cost in memory, and how far a corpus shrinks by setting.

Speed is measured on given unit numbers, on one core, with the calls into the library and the arrays they make, in
processor time of the thread, so that waits for the core do not count. It is compared with a plain encoder in Python
over tuples, written here from the rules: that stands for the published code, which is such a loop and is not part of
this project; both must give the same ids. Trials of the two alternate.

Ratios are tokens after over units before (the paper's r, definition 1), over the samples learned from and, with
--held-out, over others by the dictionary as it then is, whose words are units too, as in the published code. With
--tokenizer the units are its ids; `per_word` then has tokens over words.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from mlx_zip.bench.record import summary, surroundings
from mlx_zip.errors import MlxZipError
from mlx_zip.text.documents import read_corpus
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.multitok import (
    PRUNINGS,
    Dictionary,
    Samples,
    Settings,
    Tokens,
    Words,
    growth_bound,
    leading,
    prune,
    rewrite,
)

# (percent of samples, window) -> r of the paper's table I on 25,000 reviews; 0: Max
PAPER_WORDS = {(100, 0): 0.57, (100, 2): 0.60, (50, 0): 0.80, (50, 2): 0.83, (25, 2): 0.93}
PAPER_PRUNED = {0: 0.65, 2: 0.66}  # by window; "published", K = 1, all samples
PAPER_TOKENS = {"gpt2": {(50, 2): 0.81, (33, 2): 0.88}}
WINDOWS = (0, 2)
AT_MOST = (1, 2)
SLOW_TRIALS = 3  # of plain Python at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench multitok`."""
    add = parser.add_argument
    add("--text", nargs="+", metavar="FILE", help="samples to learn from: .txt or .jsonl, also with .gz")
    add("--held-out", nargs="+", metavar="FILE", help="other samples, encoded with the learned dictionary")
    add(
        "--tokenizer",
        help="vocabulary file, as `bench tokens` takes it, whose ids are the units; then only ratios are measured",
    )
    add("--only", choices=("speed", "ratios"), help="what to measure (default: both; with --tokenizer ratios)")
    add("--trials", type=int, default=9, help="trials per measurement (default: 9)")


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per result. Raises `MlxZipError` before anything long."""
    if not args.text:
        raise MlxZipError("--text is missing")
    if args.trials < 1:
        raise MlxZipError(f"--trials must be at least 1, got {args.trials}")
    if args.tokenizer and args.only == "speed":
        raise MlxZipError("--only speed measures words: leave --tokenizer out")
    corpus = Corpus(args)
    speeds = [] if args.tokenizer or args.only == "ratios" else _speeds(corpus, args.trials)
    for line in [*speeds, *([] if args.only == "speed" else _ratios(corpus))]:
        shown = {"bench": "multitok", **line, "data": corpus.record}
        print(json.dumps({**shown, **surroundings(*corpus.libraries)}), flush=True)
        print(f"{line['what']}: {line['setting']}", file=sys.stderr)
    return 0


class Corpus:
    """Samples of units: `learned` to learn from, `held_out` others or None."""

    def __init__(self, args: argparse.Namespace) -> None:
        read = lambda files: [document.text for document in read_corpus(files).documents] if files else []
        texts, others = read(args.text), read(args.held_out)
        self.words = sum(len(text.split()) for text in texts)
        if args.tokenizer is None:
            split: Callable[[str], Any] = str.split
            self.units: Words | Tokens = Words.in_order(map(str.split, [*texts, *others]))
            self.name, self.libraries = "words", ()
        else:
            vocabulary = read_vocabulary(args.tokenizer)
            split, self.units = vocabulary.encode, Tokens(vocabulary.size)
            self.name, self.libraries = vocabulary.name, (vocabulary.library,)
        number = lambda samples: Samples.of([self.units.numbers(split(sample)) for sample in samples])
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

    def dictionary(self, window: int, percent: float = 100) -> tuple[Dictionary, Samples]:
        """A dictionary that learned from the first `percent` of the samples, and the ids of all."""
        made = Dictionary(Settings(self.units, window))
        first, rest = self.learned.cut(leading(len(self.learned), percent))
        return made, Samples.join([made.train(first), made.pass_by(rest)])


# ---- speed


def _speeds(corpus: Corpus, trials: int) -> Iterator[dict[str, Any]]:
    samples, tuples = corpus.learned, [tuple(sample.tolist()) for sample in corpus.learned]
    for window in WINDOWS:
        dictionary, ids = corpus.dictionary(window)
        known, plain_ids = plain_train(tuples, corpus.units.size, window)
        if plain_ids != ids.lists():
            raise MlxZipError("the plain encoder gives other ids than the library: one of them is wrong")
        setting = {"window": window}
        learn = lambda window=window: Dictionary(Settings(corpus.units, window)).train(samples)
        slow = lambda window=window: plain_train(tuples, corpus.units.size, window)
        bytes_per_phrase = (dictionary.nbytes - 4 * corpus.units.size) / len(dictionary)
        yield {
            "what": "train",
            "setting": setting,
            **_beside(len(samples.ids), trials, learn, slow),
            "phrases": len(dictionary),
            "bytes_per_phrase": round(bytes_per_phrase, 2),
        }
        use = lambda dictionary=dictionary: dictionary.encode_all(samples)
        slow = lambda known=known: [plain_encode(known, sample) for sample in tuples]
        if slow() != use().lists():
            raise MlxZipError("the plain encoder gives other ids than the library: one of them is wrong")
        yield {"what": "encode", "setting": setting, **_beside(len(samples.ids), trials, use, slow)}
        pruned = prune(dictionary, 1)
        for matching in ("longest", "walk"):
            use = lambda pruned=pruned, matching=matching: pruned.encode_all(samples, matching=matching)
            yield {
                "what": "encode",
                "setting": {**setting, "pruned": 1, "matching": matching},
                **_beside(len(samples.ids), trials, use, None),
            }


def plain_train(
    samples: Sequence[tuple[int, ...]], units: int, window: int
) -> tuple[dict[tuple[int, ...], int], list[list[int]]]:
    """Phrases and units by their runs, with ids from 1 on, and the ids of the samples: a loop over tuples."""
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


def plain_encode(known: dict[tuple[int, ...], int], sample: tuple[int, ...]) -> list[int]:
    """The ids of one sample by phrases that stay as they are, of any length: a loop over tuples."""
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


def _beside(n_units: int, trials: int, ours: Callable[[], Any], plain: Callable[[], Any] | None) -> dict[str, Any]:
    """Millions of units per second, of ours and of plain Python, whose trials are fewer."""
    ours()  # warm-up
    mine, other = [], []
    for trial in range(trials):
        mine.append(_rate(ours, n_units))
        if plain is not None and trial < SLOW_TRIALS:
            other.append(_rate(plain, n_units))
    record = {"unit": "million units per s", "ours": summary(mine)}
    if other:
        record |= {"plain_python": summary(other), "ratio": round(median(mine) / median(other), 1)}
    return record


def _rate(call: Callable[[], Any], n_units: int) -> float:
    begun = time.thread_time()
    call()
    return n_units / (time.thread_time() - begun) / 1e6


# ---- ratios


def _ratios(corpus: Corpus) -> Iterator[dict[str, Any]]:
    paper = PAPER_TOKENS.get(corpus.name, {}) if isinstance(corpus.units, Tokens) else PAPER_WORDS
    settings = dict.fromkeys([*paper, *((percent, window) for percent in (100, 50) for window in WINDOWS)])
    for percent, window in settings:
        dictionary, ids = corpus.dictionary(window, percent)
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
            **_of_others(corpus, dictionary),
        }
        if percent == 100:
            yield from _prunings(corpus, dictionary, ids, setting)


def _prunings(
    corpus: Corpus, dictionary: Dictionary, ids: Samples, setting: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    window = setting["window"]
    for at_most in AT_MOST:
        bound = growth_bound(dictionary, at_most)
        for mode in PRUNINGS:
            pruned = prune(dictionary, at_most, mode)
            again = rewrite(dictionary, pruned, ids)
            as_paper = mode == "published" and at_most == 1 and isinstance(corpus.units, Words)
            yield {
                "what": "pruned",
                "setting": {**setting, "at_most": at_most, "mode": mode},
                "ratio": round(len(again.ids) / len(corpus.learned.ids), 4),
                "phrases": len(pruned),
                "memory_bytes": pruned.nbytes,
                "paper": PAPER_PRUNED.get(window) if as_paper else None,
                "growth": round(len(again.ids) / len(ids.ids), 4),
                "lemma_printed": round(bound.printed, 4),
                "lemma_corrected": round(bound.corrected, 4),
                **_of_others(corpus, pruned),
            }


def _of_others(corpus: Corpus, dictionary: Dictionary) -> dict[str, Any]:
    """Ratios of the held-out samples, by the most units that a phrase may have then."""
    if corpus.held_out is None:
        return {}
    n = len(corpus.held_out.ids)
    return {"held_out": {w: round(len(dictionary.encode_all(corpus.held_out, w).ids) / n, 4) for w in WINDOWS}}
