"""MultiTok's own experiment at small scale: does a classifier learn as well from phrases as from words, and sooner?

A one-layer transformer with randomly initialised embeddings is trained on labelled texts, once per encoding of the
texts and per seed. A record has accuracy and area under the ROC curve on test texts, the training loss and processor
seconds by epoch, C(eps) in epochs and processor seconds, the rows of the embedding table, and tokens. C(eps) is
definition 2 of the paper: the epochs after which the loss stays below eps for ten epochs, or to the end.

All encodings get the same words of a text, so a more compact encoding gives a shorter sequence, not more of the text.
As in the published code, words that occur only in test texts are units too; their embeddings keep random values.

The classifier's sizes are the paper's (arXiv 2410.21548, section IV): width 100, two heads, feed-forward width 200,
Adam. It differs from the published code in two points: it reads the mean over all positions that are not padding,
instead of the last position, which is mostly padding; and it leaves out no text. A batch holds texts of similar length
and is padded to its longest, so shorter sequences take less time. Embedding rows that occur in no training text have no
gradient and keep their random values, so they are left out of training, which saves time and does not change the
result. A training step is not compiled, because on a CPU it takes three times longer when compiled.
"""

from __future__ import annotations

import argparse
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

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.records import Record
from mlx_zip.errors import DataError, MlxZipError, errors_as
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.vocab.first_stage import read_uncompressed
from mlx_zip.vocab.multitok import (
    Dictionary,
    Samples,
    Settings,
    Tokens,
    Words,
    count_leading_samples,
    prune,
    rewrite_ids,
)
from mlx_zip.vocab.multitok.units import NO_ID

from .phrase_rates import units_of_texts

PLAIN = "plain"
PRUNING = "single"  # as in the paper: a phrase that is used too rarely is replaced by its units
WIDTH, HEADS, HIDDEN, RATE = 100, 2, 200, 0.01
EPSILONS = (0.1, 0.01)
STAYS = 10  # number of epochs for which the loss must stay below eps
POOL = 10  # number of batches whose texts are sorted by length together
Integers = NDArray[np.integer]
_COUNTS = ("samples", "test_samples", "words", "epochs", "batch_size")
_KEPT = ("words", "epochs", "batch_size", "learning_rate")  # flags that the record includes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench classify` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add(
        "--train",
        type=Path,
        required=True,
        metavar="FILE",
        help="labelled texts to train on: .jsonl with the fields text and label, or .tsv of text and label, also .gz",
    )
    add(
        "--test",
        type=Path,
        required=True,
        metavar="FILE",
        help="labelled texts to measure accuracy on, in the formats of --train",
    )
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
    train = read_labelled(args.train).first_texts(args.samples, args.words)
    test = read_labelled(args.test).first_texts(args.test_samples, args.words)
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
        encoded = encode_texts(setting, units, *pieces)
        for seed in args.seeds:
            line: Record = {
                "bench": "classify",
                "setting": text,
                "seed": seed,
                "data": data,
                **{name: getattr(args, name) for name in _KEPT},
                "ratio": round(encoded.ratio, 4),
                "per_word": round(len(encoded.train.ids) / train.words, 4),
                **train_classifier(encoded, answers, len(classes), seed, args),
            }
            yield line
            print(f"{args.train.name}, {name}, {text}, seed {seed}: accuracy {line['accuracy']}", file=sys.stderr)


def check_flags(args: argparse.Namespace) -> list[EncodingSetting]:
    """Checks the flags and returns the settings of --settings. Raises `MlxZipError` if a flag is invalid."""
    check_flags_at_least(args, 1, *_COUNTS)
    check_flags_at_least(args, 0, "seeds")
    if not 0 < args.learning_rate < float("inf"):
        raise MlxZipError(f"--learning-rate must be above 0, got {args.learning_rate}")
    return [EncodingSetting.parse(text) for text in args.settings]


# ---- labelled texts, and their encodings by the settings of the paper's table I


@dataclass(frozen=True)
class EncodingSetting:
    """A way to encode texts, in the paper's notation PERCENT,WINDOW-WINDOW[,>=USES], for example 100,2-1,>=2.

    percent: percentage of the samples that phrases are learned from; 0: no phrases. windows: most units in a phrase,
    for training texts and for test texts; 0 (Max): no limit. least_uses: phrases used less often than this are removed.
    """

    percent: float
    windows: tuple[int, int] = (1, 1)
    least_uses: int = 0

    @classmethod
    def parse(cls, text: str) -> EncodingSetting:
        """Parses `text`, `plain` or PERCENT,WINDOW-WINDOW[,>=USES]. Raises `MlxZipError` if `text` is anything else."""
        try:
            if text == PLAIN:
                return cls(0)
            percent, windows, *rest = text.split(",")
            size = lambda name: 0 if name == "Max" else int(name)
            first, second = map(size, windows.split("-"))
            (least,) = rest or [">=0"]
            count_leading_samples(0, float(percent))
            return cls(float(percent), (first, second), int(least.removeprefix(">=")))
        except ValueError as error:
            raise MlxZipError(f"--settings: {text!r} is not plain or PERCENT,WINDOW-WINDOW[,>=USES]") from error


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with class labels: labels[i] is the class of texts[i]."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    @property
    def words(self) -> int:
        """Number of words of all texts together."""
        return sum(len(text.split()) for text in self.texts)

    def first_texts(self, n: int | None, words: int) -> LabelledTexts:
        """Returns `n` randomly chosen texts (None: all), each cut to its first `words` words.

        The random order is the same in every run; texts are shuffled because files may be sorted by label.
        """
        order = np.random.default_rng(0).permutation(len(self.texts))[:n].tolist()
        cut = tuple(" ".join(self.texts[i].split()[:words]) for i in order)
        return LabelledTexts(cut, tuple(self.labels[i] for i in order))


def read_labelled(path: Path) -> LabelledTexts:
    """Reads all labelled texts of a .jsonl or .tsv file (.gz is unpacked). Raises `DataError` if it cannot be read."""
    with errors_as(DataError, f"{path} cannot be read", UnicodeDecodeError):
        lines = read_uncompressed(path).decode("utf-8").split("\n")  # `splitlines` would also cut within a text
    read = [parse_labelled_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not read:
        raise DataError(f"{path} holds no text")
    texts, labels = zip(*read, strict=True)
    return LabelledTexts(texts, labels)


def parse_labelled_line(path: Path, number: int, line: str) -> tuple[str, int]:
    try:
        if ".tsv" in path.name:
            text, label = line.rsplit("\t", 1)
        else:
            record = json.loads(line)
            text, label = record["text"], record["label"]
        return str(text), int(label)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not a text and a label") from error


@dataclass(frozen=True)
class EncodedTexts:
    """Training and test texts as ids of an embedding table.

    Id 0 is padding, ids 1 to `trained` occur in training texts, higher ids only in test texts. trained: number of ids
    in training texts. used: number of all ids, padding included. rows: number of rows for the whole dictionary, phrases
    that occur in no text included. ratio: tokens divided by units of the training texts, the paper's r.
    """

    train: Samples
    test: Samples
    trained: int
    used: int
    rows: int
    ratio: float


def encode_texts(setting: EncodingSetting, units: Words | Tokens, train: list[Any], test: list[Any]) -> EncodedTexts:
    """Encodes training and test texts by a setting.

    units: the vocabulary of words or tokenizer ids. train, test: the units of each text.
    """
    dictionary = Dictionary(Settings(units, setting.windows[0]))
    samples = dictionary.number_units(train)
    first, rest = samples.split_at(count_leading_samples(len(samples), setting.percent))
    ids = Samples.join([dictionary.train(first), dictionary.encode_as_single_units(rest)])
    if setting.least_uses:
        pruned = prune(dictionary, setting.least_uses - 1, PRUNING)
        ids, dictionary = rewrite_ids(dictionary, pruned, ids), pruned
    judged = dictionary.encode_all(dictionary.number_units(test), setting.windows[1])
    trained = np.unique(ids.ids)
    known = np.concatenate([trained, np.setdiff1d(judged.ids, trained)])  # row - 1 -> dictionary id
    rising = np.argsort(known)
    numbers = lambda ids: (1 + rising[np.searchsorted(known, ids, sorter=rising)]).astype(np.uint32)
    place = lambda part: Samples(numbers(part.ids), part.ends)
    rows = 1 + units.size + int((dictionary.ids != NO_ID).sum())
    ratio = len(ids.ids) / max(1, len(samples.ids))
    return EncodedTexts(place(ids), place(judged), len(trained), 1 + len(known), rows, ratio)


# ---- the classifier


class Classifier(nn.Module):
    """Classifies texts: ids [B, L] int32, 0 for padding -> logits [B, C]. Source: arXiv 2410.21548, section IV.

    trained: number of ids in training texts; these ids are 1 to `trained`. used: number of all ids, padding included;
    rows from 1 + trained on keep random values and are used only in evaluation. length: most ids in a text.
    """

    def __init__(self, trained: int, used: int, classes: int, length: int) -> None:
        super().__init__()
        drawn = nn.Embedding(used, WIDTH).weight
        self.table, self._fixed = drawn[: 1 + trained], drawn[1 + trained :]
        self.place = nn.Embedding(length, WIDTH)
        self.attention, self.norm_1 = nn.MultiHeadAttention(WIDTH, HEADS), nn.LayerNorm(WIDTH)
        self.up, self.down, self.norm_2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def __call__(self, ids: mx.array) -> mx.array:
        """Returns logits [B, C] for ids [B, L] int32; id 0 is padding."""
        real = (ids > 0).astype(mx.float32)  # [B, L]
        table = self.table if self.training else mx.concatenate([self.table, self._fixed])
        x = table[ids] + self.place(mx.arange(ids.shape[1]))
        mask = mx.where(real > 0, 0.0, -1e9)[:, None, None, :]
        x = self.norm_1(x + self.attention(x, x, x, mask))
        x = self.norm_2(x + self.down(nn.relu(self.up(x))))
        mean = (x * real[..., None]).sum(axis=1) / mx.maximum(real.sum(axis=1, keepdims=True), 1)
        return self.head(mean)


def train_classifier(
    encoded: EncodedTexts, answers: Sequence[Integers], classes: int, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains one classifier and returns its fields of the record.

    answers: class numbers of the training texts and of the test texts.
    """
    mx.random.seed(seed)
    order = np.random.default_rng(seed)
    sizes = [token_counts(part) for part in (encoded.train, encoded.test)]
    model = Classifier(encoded.trained, encoded.used, classes, max(1, *(int(part.max()) for part in sizes)))
    optimizer = optim.Adam(learning_rate=args.learning_rate)
    gradient = nn.value_and_grad(model, classifier_loss)
    losses, seconds = [], []
    for _ in range(args.epochs):
        total, begun = 0.0, time.process_time()
        for which in batches_of_similar_length(sizes[0], args.batch_size, order):
            loss, gradients = gradient(model, mx.array(pad_samples(encoded.train, which)), mx.array(answers[0][which]))
            optimizer.update(model, gradients)
            mx.eval(model.state, optimizer.state, loss)
            total += float(loss) * len(which)
        seconds.append(time.process_time() - begun)
        losses.append(total / len(answers[0]))
    accuracy, auc = accuracy_and_auc(model, encoded.test, answers[1], args.batch_size)
    body = sum(array.size for name, array in named_arrays(model.parameters()) if name != "table")
    return {
        "accuracy": accuracy,
        "auc": auc,
        "rows": encoded.rows,
        "rows_trained": encoded.trained,
        "parameters": encoded.rows * WIDTH + body,
        "tokens": [int(part.sum()) for part in sizes],
        "loss": [round(loss, 5) for loss in losses],
        "processor_s": [round(s, 3) for s in seconds],
        **times_to_converge(losses, seconds),
    }


def times_to_converge(losses: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """Returns C(eps) for each of `EPSILONS`, in epochs and in processor seconds; None if not reached.

    losses, seconds: training loss and processor seconds of each epoch.
    """
    epochs = {str(eps): epochs_to_converge(losses, eps) for eps in EPSILONS}
    spent = {eps: None if n is None else round(sum(seconds[:n]), 2) for eps, n in epochs.items()}
    return {"epochs_to": epochs, "processor_s_to": spent}


def epochs_to_converge(losses: Sequence[float], epsilon: float) -> int | None:
    """Returns C(eps): the number of epochs after which the loss stays below `epsilon` for `STAYS` epochs or to the end.

    None if the loss never stays below `epsilon`.
    """
    return next((i for i in range(len(losses)) if max(losses[i : i + STAYS]) < epsilon), None)


def classifier_loss(model: Classifier, ids: mx.array, labels: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(ids), labels, reduction="mean")


# ---- batches


def token_counts(samples: Samples) -> NDArray[np.int64]:
    return np.diff(samples.ends.astype(np.int64), prepend=0)


def batches_of_similar_length(
    sizes: NDArray[np.int64], size: int, order: np.random.Generator | None = None
) -> Iterator[Integers]:
    """Yields batches of at most `size` sample numbers, of similar length; each sample is in one batch.

    sizes: length of each sample. order: shuffles the samples, sorts every `POOL` batches of them by length, and yields
    the batches in random order; None: all samples are sorted by length.
    """
    n = len(sizes)
    drawn = np.arange(n) if order is None else order.permutation(n)
    pool = n if order is None else POOL * size
    cut = []
    for start in range(0, n, pool):
        some = drawn[start : start + pool]
        some = some[np.argsort(sizes[some], kind="stable")]
        cut += [some[at : at + size] for at in range(0, len(some), size)]
    return (cut[i] for i in (range(len(cut)) if order is None else order.permutation(len(cut))))


def pad_samples(samples: Samples, which: Integers) -> NDArray[np.int32]:
    ends, sizes = samples.ends[which].tolist(), token_counts(samples)[which].tolist()
    rows = [samples.ids[end - n : end] for end, n in zip(ends, sizes, strict=True)]
    out = np.zeros((len(which), max(1, *map(len, rows))), np.int32)
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = ids
    return out


# ---- evaluation


def accuracy_and_auc(model: Classifier, samples: Samples, labels: Integers, batch_size: int) -> tuple[float, float]:
    """Returns the accuracy on the samples, and the area under the ROC curve.

    With two classes, the area is the second class's; with more, the mean area of each class against all others.
    """
    model.eval()
    order = list(batches_of_similar_length(token_counts(samples), batch_size))
    chances_of = lambda which: np.array(mx.softmax(model(mx.array(pad_samples(samples, which))), axis=-1))
    chances = np.concatenate([chances_of(which) for which in order])
    model.train()
    labels = labels[np.concatenate(order)]
    classes = chances.shape[1]
    area = np.mean([area_under_roc(chances[:, c], labels == c) for c in ([1] if classes == 2 else range(classes))])
    return round(float((chances.argmax(axis=1) == labels).mean()), 4), round(float(area), 4)


def area_under_roc(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """Returns the area under the ROC curve: the probability that a positive sample scores higher than a negative one.

    Ties count half. Returns 0.5 if there are no positive or no negative samples.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else 0.5
