"""Reads labelled texts and encodes them by the settings of the paper's table I, each with its own embedding table.

All encodings get the same words of a text, so a more compact encoding gives a shorter sequence, not more of the text.
As in the published code, words that occur only in test texts are units too; their embeddings keep random values.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.errors import DataError, MlxZipError
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

PLAIN = "plain"
PRUNING = "single"  # as in the paper: a phrase that is used too rarely is replaced by its units


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
    try:
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        lines = data.decode("utf-8").split("\n")  # not `splitlines`: a text may contain other line separators
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
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
