"""MultiTok's own experiment at small scale: does a classifier learn as well, and sooner, from phrases as from words?

A one-layer transformer with random embeddings of its own is trained on labelled texts, once per way of encoding them
and seed. A record has accuracy and area under the ROC curve on other texts after every epoch, training loss by epoch,
C(eps) (definition 2 of the paper: the epochs after which the loss stays below eps for ten, or to the end) in epochs, in
seconds and in seconds of the processor, rows of the table, tokens. What differs from the paper's set-up (section IV) is
described in `.labelled` and `.classifier`.

With --out the lines are a file that is whole after every run; what it holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.bench.plots import save
from mlx_zip.bench.record import surroundings
from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.files import whole_file
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.multitok import Tokens, Words

from .classifier import RATE, learn
from .classify_tables import losses
from .labelled import PLAIN, Labelled, Setting, encode, read_labelled

RECORD = Path(__file__).resolve().parent / "records" / "classify.jsonl"
Line = dict[str, Any]
_COUNTS = ("samples", "test_samples", "words", "epochs", "batch_size")
_SAME = ("setting", "seed", "words", "epochs", "batch_size", "learning_rate", "data")  # one run, if all are equal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench classify`."""
    add = parser.add_argument
    add(
        "--train",
        type=Path,
        metavar="FILE",
        help="labelled texts: .jsonl with text and label, or .tsv of both, also with .gz",
    )
    add("--test", type=Path, metavar="FILE", help="other labelled texts, to judge")
    add("--tokenizer", help="vocabulary file, as `bench tokens` takes it, whose ids are the units (default: words)")
    add(
        "--settings",
        nargs="+",
        default=[PLAIN, "100,Max-Max", "100,2-2", "50,2-1"],
        metavar="S",
        help="plain, or PERCENT,WINDOW-WINDOW[,>=USES] as in the paper's table I (default: plain 100,Max-Max 100,2-2 "
        "50,2-1)",
    )
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds, one run each (default: 0 1 2)")
    add("--samples", type=int, metavar="N", help="texts to learn from at most (default: all)")
    add("--test-samples", type=int, metavar="N", help="texts to judge at most (default: all)")
    add("--words", type=int, default=256, help="words of a text at most, for every encoding (default: 256)")
    add("--epochs", type=int, default=20, help="epochs (default: 20)")
    add("--batch-size", type=int, default=1000, help="texts per step (default: 1000)")
    add("--learning-rate", type=float, default=RATE, help=f"learning rate of Adam (default: {RATE})")
    add(
        "--out",
        type=Path,
        metavar="RECORD",
        help="record to add lines to; runs that it has are skipped (default: lines are printed)",
    )
    add(
        "--figure",
        type=Path,
        metavar="FILE.svg",
        help="draw the loss by epochs and seconds from --out or the record, and train nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per setting and seed, or adds it to --out. Raises `MlxZipError` before anything long."""
    if args.figure is not None:
        save(losses(read_lines(args.out or RECORD)), args.figure)
        return 0
    settings = _checked(args)
    done = read_lines(args.out) if args.out and args.out.exists() else []
    keep(args.out, done)  # a missing folder is an error now and not after a run
    train, test = _texts(args)
    name, units, split = _units(args.tokenizer, [*train.texts, *test.texts])
    pieces = [[split(text) for text in part.texts] for part in (train, test)]
    classes = sorted({*train.labels, *test.labels})
    answers = [np.array([classes.index(label) for label in part.labels]) for part in (train, test)]
    data = {
        "train": args.train.name,
        "test": args.test.name,
        "samples": [len(train.texts), len(test.texts)],
        "units_are": name,
    }
    for text, setting in zip(args.settings, settings, strict=True):
        begun = time.process_time()
        encoded = encode(setting, units, *pieces)
        took = time.process_time() - begun
        for seed in args.seeds:
            line: Line = {
                "bench": "classify",
                "setting": text,
                "seed": seed,
                "data": data,
                **{name: getattr(args, name) for name in _SAME if hasattr(args, name)},
            }
            if any(all(line[name] == other.get(name) for name in _SAME) for other in done):
                continue
            line |= {
                "ratio": round(encoded.ratio, 4),
                "per_word": round(len(encoded.train.ids) / train.words, 4),
                "encode_processor_s": round(took, 2),
                **learn(encoded, answers, len(classes), seed, args),
                "load_average": round(os.getloadavg()[0], 1),
                **surroundings("mlx"),
            }
            done.append(line)
            keep(args.out, done)
            print(f"{args.train.name}, {name}, {text}, seed {seed}: accuracy {line['accuracy']}", file=sys.stderr)
    return 0


def _checked(args: argparse.Namespace) -> list[Setting]:
    if missing := [f"--{name}" for name in ("train", "test") if getattr(args, name) is None]:
        raise MlxZipError(f"{' and '.join(missing)} missing; or give --figure to draw what the record holds")
    for name in _COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise MlxZipError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if low := [seed for seed in args.seeds if seed < 0]:
        raise MlxZipError(f"--seeds must be at least 0, got {low[0]}")
    if not 0 < args.learning_rate < float("inf"):
        raise MlxZipError(f"--learning-rate must be above 0, got {args.learning_rate}")
    return [Setting.parse(text) for text in args.settings]


def _texts(args: argparse.Namespace) -> tuple[Labelled, Labelled]:
    train = read_labelled(args.train).some(args.samples, args.words)
    return train, read_labelled(args.test).some(args.test_samples, args.words)


def _units(tokenizer: str | None, texts: Sequence[str]) -> tuple[str, Words | Tokens, Any]:
    if tokenizer is None:
        return "words", Words.in_order(map(str.split, texts)), str.split
    vocabulary = read_vocabulary(tokenizer)
    return vocabulary.name, Tokens(vocabulary.size), vocabulary.encode


def read_lines(path: Path) -> list[Line]:
    """Reads the lines of a record. Raises `DataError` naming it."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a record: {error}") from error
    if wrong := [number for number, line in enumerate(lines, 1) if not isinstance(line, dict)]:
        raise DataError(f"{path} cannot be read as a record: line {wrong[0]} is no JSON object")
    return lines


def keep(path: Path | None, lines: Sequence[Line]) -> None:
    """Writes all lines, the file whole or not at all; without a path prints the last. Raises `DataError`."""
    if path is None:
        if lines:
            print(json.dumps(lines[-1]), flush=True)
        return
    try:
        with whole_file(path) as partial:
            partial.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise DataError(f"--out {path} cannot be written: {error.strerror or error}") from error
