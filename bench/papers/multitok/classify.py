"""MultiTok's own experiment at small scale: does a classifier learn as well from phrases as from words, and sooner?

A one-layer transformer with randomly initialised embeddings is trained on labelled texts, once per encoding of the
texts and per seed. A record has accuracy and area under the ROC curve on test texts after every epoch, the training
loss by epoch, C(eps) in epochs, seconds and processor seconds, the rows of the embedding table, and tokens. C(eps) is
definition 2 of the paper: the epochs after which the loss stays below eps for ten epochs, or to the end. Differences
from the paper's set-up (section IV) are described in `.labelled` and `.classifier`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.records import Record
from mlx_zip.errors import MlxZipError

from .classifier import RATE, train_classifier
from .labelled import PLAIN, EncodingSetting, LabelledTexts, encode_texts, read_labelled
from .phrase_rates import units_of_texts

_COUNTS = ("samples", "test_samples", "words", "epochs", "batch_size")
_KEPT = ("words", "epochs", "batch_size", "learning_rate")  # flags that the record includes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench classify` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add(
        "--train",
        type=Path,
        metavar="FILE",
        help="labelled texts to train on: .jsonl with the fields text and label, or .tsv of text and label, also .gz",
    )
    add("--test", type=Path, metavar="FILE", help="labelled texts to measure accuracy on, in the formats of --train")
    add(
        "--tokenizer",
        help="vocabulary file of `bench tokens`; phrases are made of its ids (default: phrases are made of words)",
    )
    flag(
        "--settings",
        [PLAIN, "100,Max-Max", "100,2-2", "50,2-1"],
        "ways to encode texts, as in the paper's table I: plain (no phrases), or per cent of --train that phrases "
        "are learned from, most units per phrase in --train and in --test (Max: no limit), least uses of a phrase",
        metavar="S",
    )
    flag("--seeds", [0, 1, 2], "random seeds, one training run each")
    add("--samples", type=int, metavar="N", help="use at most N texts of --train (default: all)")
    add("--test-samples", type=int, metavar="N", help="use at most N texts of --test (default: all)")
    flag("--words", 256, "use at most this many words of each text")
    flag("--epochs", 20, "number of passes over --train")
    flag("--batch-size", 1000, "texts per training step")
    flag("--learning-rate", RATE, "learning rate of Adam")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trains and measures a classifier per setting and seed; yields a record for each.

    Raises `MlxZipError` if a flag or file cannot be used, before any training.
    """
    settings = check_flags(args)
    train, test = read_texts(args)
    name, units, split = units_of_texts(args.tokenizer, [*train.texts, *test.texts])
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
        encoded = encode_texts(setting, units, *pieces)
        took = time.process_time() - begun
        for seed in args.seeds:
            line: Record = {
                "bench": "classify",
                "setting": text,
                "seed": seed,
                "data": data,
                **{name: getattr(args, name) for name in _KEPT},
            }
            line |= {
                "ratio": round(encoded.ratio, 4),
                "per_word": round(len(encoded.train.ids) / train.words, 4),
                "encode_processor_s": round(took, 2),
                **train_classifier(encoded, answers, len(classes), seed, args),
            }
            yield line
            print(f"{args.train.name}, {name}, {text}, seed {seed}: accuracy {line['accuracy']}", file=sys.stderr)


def check_flags(args: argparse.Namespace) -> list[EncodingSetting]:
    """Checks the flags and returns the settings of --settings. Raises `MlxZipError` if a flag is invalid."""
    if missing := [f"--{name}" for name in ("train", "test") if getattr(args, name) is None]:
        raise MlxZipError(f"{' and '.join(missing)} missing")
    check_flags_at_least(args, 1, *_COUNTS)
    check_flags_at_least(args, 0, "seeds")
    if not 0 < args.learning_rate < float("inf"):
        raise MlxZipError(f"--learning-rate must be above 0, got {args.learning_rate}")
    return [EncodingSetting.parse(text) for text in args.settings]


def read_texts(args: argparse.Namespace) -> tuple[LabelledTexts, LabelledTexts]:
    train = read_labelled(args.train).first_texts(args.samples, args.words)
    return train, read_labelled(args.test).first_texts(args.test_samples, args.words)
