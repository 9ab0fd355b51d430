"""MultiTok's own experiment at small scale: does a classifier learn as well, and sooner, from phrases as from words?

A one-layer transformer with random embeddings of its own is trained on labelled texts, once per way of encoding them
and seed. Told are accuracy and area under the ROC curve on other texts, training loss by epoch, C(eps) (definition 2 of
the paper: the epochs after which the loss stays below eps for ten, or to the end), seconds, parameters, tokens.

As in the paper (section IV): width 100, one layer, two heads, 200 in the feed-forward part, Adam at 0.01, 20 epochs,
batches of 1,000. Not as in the published code: all positions that are no padding are averaged for the classifier, where
that reads the last one, padding mostly; texts are cut at --length tokens; no text is left out. As there, words of the
texts to be judged are units, with embeddings that stay random.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Tokens, Words, leading, prune, rewrite
from mlx_zip.vocab.multitok.settings import NO_ID

from .record import surroundings
from .vocabularies import named_vocabulary

WIDTH, HEADS, HIDDEN, RATE = 100, 2, 200, 0.01
EPSILONS = (0.1, 0.01)
STAYS = 10  # epochs that a loss must stay low
PLAIN = "plain"


@dataclass(frozen=True)
class Setting:
    """A way to encode, as the paper names them: 100,2-1,>=2 is all samples, window 2, 1 at the test, pruned below 2.

    percent 0: units as they are. windows: at training and test; 0: Max. least_uses: of a phrase that is kept; 0: all.
    """

    percent: float
    windows: tuple[int, int] = (1, 1)
    least_uses: int = 0

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From `plain` or PERCENT,WINDOW-WINDOW[,>=N]. Raises `MlxZipError`."""
        try:
            if text == PLAIN:
                return cls(0)
            percent, windows, *rest = text.split(",")
            size = lambda name: 0 if name == "Max" else int(name)
            first, second = map(size, windows.split("-"))
            (least,) = rest or [">=0"]
            leading(0, float(percent))
            return cls(float(percent), (first, second), int(least.removeprefix(">=")))
        except ValueError as error:
            raise MlxZipError(f"--settings: {text!r} is not plain or PERCENT,WINDOW-WINDOW[,>=USES]") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench classify`."""
    add = parser.add_argument
    add("--train", type=Path, required=True, metavar="FILE",
        help="labelled texts: .jsonl with text and label, or .tsv of both, also with .gz")  # fmt: skip
    add("--test", type=Path, required=True, metavar="FILE", help="others, to judge")
    add("--tokenizer", help="units are its ids: a vocabulary's file, as `bench tokens` (default: words)")
    add("--settings", nargs="+", default=[PLAIN, "100,Max-Max", "100,2-2", "50,2-1"], metavar="S",
        help="plain, or PERCENT,WINDOW-WINDOW[,>=USES] as in the paper's table I (default: plain 100,Max-Max 100,2-2 "
             "50,2-1)")  # fmt: skip
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run each (default: 0 1 2)")
    add("--samples", type=int, metavar="N", help="texts of each file at most, the first ones")
    add("--length", type=int, default=256, help="tokens of a text at most (default: 256)")
    add("--epochs", type=int, default=20, help="default: 20")
    add("--batch-size", type=int, default=1000, help="default: 1000")


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per setting and seed. Raises `MlxZipError` before anything long."""
    settings = [Setting.parse(text) for text in args.settings]
    for name in ("length", "epochs", "batch_size"):
        if getattr(args, name) < 1:
            raise MlxZipError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    train, test = (read_labelled(path)[: args.samples] for path in (args.train, args.test))
    name, units, split = _units(args.tokenizer, [text for text, _ in (*train, *test)])
    labels = sorted({label for _, label in (*train, *test)})
    data = {"train": args.train.name, "test": args.test.name, "samples": [len(train), len(test)], "units_are": name}
    for text, setting in zip(args.settings, settings, strict=True):
        encoded = encode(setting, units, *([split(text) for text, _ in part] for part in (train, test)))
        answers = [np.array([labels.index(label) for _, label in part]) for part in (train, test)]
        for seed in args.seeds:
            line = {"bench": "classify", "setting": text, "seed": seed, "length": args.length,
                    "batch_size": args.batch_size, **learn(encoded, answers, len(labels), seed, args), "data": data}
            print(json.dumps({**line, **surroundings("mlx")}), flush=True)
            print(f"{text}, seed {seed}: accuracy {line['accuracy']}", file=sys.stderr)
    return 0


def read_labelled(path: Path) -> list[tuple[str, int]]:
    """Texts and labels. Raises `DataError` naming file and line."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        lines = data.decode("utf-8").splitlines()
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return [_labelled(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _labelled(path: Path, number: int, line: str) -> tuple[str, int]:
    try:
        if ".tsv" in path.name:
            text, label = line.rsplit("\t", 1)
        else:
            record = json.loads(line)
            text, label = record["text"], record["label"]
        return str(text), int(label)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}, line {number}: not a text and a label") from error


def _units(tokenizer: str | None, texts: Sequence[str]) -> tuple[str, Words | Tokens, Any]:
    if tokenizer is None:
        return "words", Words.in_order(map(str.split, texts)), str.split
    vocabulary = named_vocabulary(tokenizer)
    return vocabulary.name, Tokens(vocabulary.size), vocabulary.encode


# ---- encoding


@dataclass(frozen=True)
class Encoded:
    """Ids of the texts to learn from and to judge; rows: of the table of embeddings; ratio: the paper's r."""

    train: Samples
    test: Samples
    rows: int
    ratio: float


def encode(setting: Setting, units: Words | Tokens, train: list[Any], test: list[Any]) -> Encoded:
    """Texts (as words or ids) to ids from 1 on; 0 is padding."""
    dictionary = Dictionary(Settings(units, setting.windows[0]))
    samples = dictionary.number(train)
    first, rest = samples.cut(leading(len(samples), setting.percent))
    ids = Samples.join([dictionary.train(first), dictionary.pass_by(rest)])
    if setting.least_uses:
        pruned = prune(dictionary, setting.least_uses - 1)
        ids, dictionary = rewrite(dictionary, pruned, ids), pruned
    judged = dictionary.encode_all(dictionary.number(test), setting.windows[1])
    known = np.concatenate([np.arange(1, 1 + units.size), dictionary.ids[dictionary.ids != NO_ID]])
    dense = lambda part: Samples((1 + np.searchsorted(known, part.ids)).astype(np.uint32), part.ends)  # closes gaps
    return Encoded(dense(ids), dense(judged), 1 + len(known), len(ids.ids) / max(1, len(samples.ids)))


def padded(samples: Samples, which: NDArray[np.integer], length: int) -> NDArray[np.int32]:
    """Some samples, cut at `length`, filled with 0: [N, L]."""
    starts = np.concatenate([[0], samples.ends[:-1].astype(np.int64)])[which]
    n = np.minimum(samples.ends.astype(np.int64)[which] - starts, length)
    out = np.zeros((len(which), max(1, int(n.max(initial=1)))), np.int32)
    for row, start, count in zip(out, starts, n, strict=True):
        row[:count] = samples.ids[start : start + count]
    return out


# ---- model


class Classifier(nn.Module):
    """ids [B, L] int32, 0 for padding -> logits [B, C]. Source: arXiv 2410.21548, section IV; see the module."""

    def __init__(self, rows: int, classes: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(rows, WIDTH), nn.Embedding(length, WIDTH)
        self.attention, self.norm_1 = nn.MultiHeadAttention(WIDTH, HEADS), nn.LayerNorm(WIDTH)
        self.up, self.down, self.norm_2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def __call__(self, ids: mx.array) -> mx.array:
        """See the class."""
        real = (ids > 0).astype(mx.float32)  # [B, L]
        x = self.embed(ids) + self.place(mx.arange(ids.shape[1]))
        mask = mx.where(real > 0, 0.0, -1e9)[:, None, None, :]
        x = self.norm_1(x + self.attention(x, x, x, mask))
        x = self.norm_2(x + self.down(nn.relu(self.up(x))))
        mean = (x * real[..., None]).sum(axis=1) / mx.maximum(real.sum(axis=1, keepdims=True), 1)
        return self.head(mean)


def learn(
    encoded: Encoded, answers: list[NDArray[np.integer]], classes: int, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains one classifier; what the record says of it. Seconds are of training alone."""
    mx.random.seed(seed)
    order = np.random.default_rng(seed)
    model, optimizer = Classifier(encoded.rows, classes, args.length), optim.Adam(learning_rate=RATE)
    gradient = nn.value_and_grad(model, _loss)
    losses, seconds, scores = [], [], []
    for _ in range(args.epochs):
        begun, total = time.perf_counter(), 0.0
        for which in _batches(order.permutation(len(answers[0])), args.batch_size):
            ids, labels = mx.array(padded(encoded.train, which, args.length)), mx.array(answers[0][which])
            loss, gradients = gradient(model, ids, labels)
            optimizer.update(model, gradients)
            mx.eval(model.state, optimizer.state, loss)
            total += float(loss) * len(which)
        seconds.append(time.perf_counter() - begun)
        losses.append(total / len(answers[0]))
        scores.append(judge(model, encoded.test, answers[1], classes, args))
    epochs = {str(eps): reached(losses, eps) for eps in EPSILONS}
    return {
        "accuracy": scores[-1][0], "auc": scores[-1][1], "best_accuracy": max(s[0] for s in scores),
        "ratio": round(encoded.ratio, 4), "rows": encoded.rows, "parameters": (encoded.rows + args.length) * WIDTH,
        "seconds_per_epoch": round(float(np.median(seconds)), 3), "epochs_to": epochs,
        "seconds_to": {eps: None if n is None else round(sum(seconds[:n]), 2) for eps, n in epochs.items()},
        "loss": [round(loss, 4) for loss in losses], "accuracies": [s[0] for s in scores],
    }  # fmt: skip


def _loss(model: Classifier, ids: mx.array, labels: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(ids), labels, reduction="mean")


def _batches(order: NDArray[np.integer], size: int) -> Iterator[NDArray[np.integer]]:
    return (order[start : start + size] for start in range(0, len(order), size))


def judge(
    model: Classifier, samples: Samples, labels: NDArray[np.integer], classes: int, args: argparse.Namespace
) -> tuple[float, float]:
    """Accuracy, and area under the ROC curve: of the second class of two, else the mean of each against the rest."""
    parts = []
    for which in _batches(np.arange(len(labels)), args.batch_size):
        logits = model(mx.array(padded(samples, which, args.length)))
        parts.append(np.array(mx.softmax(logits, axis=-1)))
    chances = np.concatenate(parts)
    judged = [1] if classes == 2 else range(classes)
    area = np.mean([auc(chances[:, c], labels == c) for c in judged])
    return round(float((chances.argmax(axis=1) == labels).mean()), 4), round(float(area), 4)


def auc(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """The chance that a positive one scores higher than a negative one, ties counting half; 0.5 where there is none."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else 0.5


def reached(losses: Sequence[float], epsilon: float) -> int | None:
    """C(eps): the fewest epochs after which the next ten losses, or all that are left, are below eps; or None."""
    return next((i for i in range(len(losses)) if max(losses[i : i + STAYS]) < epsilon), None)
