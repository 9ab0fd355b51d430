"""Measures how often a model gives the right label (one of a few words) the highest likelihood. Needs PyTorch.

Each example is one request, rendered by the chat template. The model's answer is the label whose first base id is the
likeliest after the request. The request is compressed alone, so that no id covers parts of both request and answer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlx_zip.cuda.evaluation_model import load_evaluated_model
from mlx_zip.engine.mlx.scoring import compress_row
from mlx_zip.errors import DataError
from mlx_zip.text.prompts import render_chat


@dataclass(frozen=True)
class LabelTask:
    """A data set for classification. request: prompt in which {} becomes the text. words: label of each class."""

    name: str
    file: str
    request: str
    words: tuple[str, ...]


LABEL_TASKS = (
    LabelTask(
        "agnews",
        "agnews.test.jsonl.gz",
        "What is this news item about: World, Sports, Business or Technology? Answer with one word.\n\n{}",
        ("World", "Sports", "Business", "Technology"),
    ),
    LabelTask(
        "sst2",
        "sst2.test.tsv.gz",
        "Is this sentence of a film review Positive or Negative? Answer with one word.\n\n{}",
        ("Negative", "Positive"),
    ),
    LabelTask(
        "imdb",
        "imdb.test.jsonl.gz",
        "Is this film review Positive or Negative? Answer with one word.\n\n{}",
        ("Negative", "Positive"),
    ),
)


def read_examples(task: LabelTask, folder: Path, most: int) -> list[tuple[str, int]]:
    """Returns (text, class) of at most `most` evenly spaced examples. Raises `DataError` if a class is unknown."""
    with gzip.open(folder / task.file, "rt", encoding="utf-8") as file:
        lines = file.read().rstrip("\n").split("\n")  # a text may contain other line separators
    taken = [lines[at] for at in np.linspace(0, len(lines) - 1, min(most, len(lines))).astype(int)]
    if task.file.endswith(".tsv.gz"):
        found = [(text, int(label)) for text, _, label in (line.rpartition("\t") for line in taken)]
    else:
        found = [(one["text"], int(one["label"])) for one in map(json.loads, taken)]
    if wrong := [label for _, label in found if not 0 <= label < len(task.words)]:
        raise DataError(f"{folder / task.file}: there is no class {wrong[0]}")
    return found


def first_label_ids(tokenizer: Any, words: tuple[str, ...]) -> list[int]:
    """Returns the first base id of each label. Raises `DataError` if two labels begin with the same id."""
    ids = [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
    if len(set(ids)) < len(ids):
        raise DataError(f"the labels {', '.join(words)} do not begin with different ids of the tokenizer")
    return ids


def check_answers(
    model: Any, tokenizer: Any, task: LabelTask, examples: list[tuple[str, int]], most_ids: int
) -> np.ndarray:
    """Returns whether the model's answer is right for each example, bool [n]. most_ids: maximum base ids per text."""
    wanted, right = first_label_ids(tokenizer, task.words), np.zeros(len(examples), bool)
    for at, (text, label) in enumerate(examples):
        kept = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:most_ids])
        asked = render_chat(
            tokenizer, [{"role": "user", "content": task.request.format(kept)}], add_generation_prompt=True
        )
        ids = np.asarray(tokenizer.encode(asked, add_special_tokens=False), np.uint32)
        right[at] = model.score_next(compress_row(model, ids), wanted).argmax() == label
    return right


def measure_labels(models: Mapping[str, Path], control: str, folder: Path, most: int, most_ids: int) -> dict[str, Any]:
    """Returns each model's accuracy per task, and the difference from a control's accuracy, paired by example.

    models: folders by name. control: name of the model to compare with. folder: folder of the data sets. most: maximum
    examples per task. most_ids: maximum base ids per text. The result: "examples" {task: n}; "models" {name: {task or
    "all": {"accuracy", "difference", "difference_standard_error"}}}, as fractions; the control has only "accuracy".
    """
    examples = {task.name: read_examples(task, folder, most) for task in LABEL_TASKS}
    right: dict[str, dict[str, np.ndarray]] = {}
    for name, path in models.items():
        model, tokenizer = load_evaluated_model(path, device=torch.device("cpu"))
        right[name] = {
            task.name: check_answers(model, tokenizer, task, examples[task.name], most_ids) for task in LABEL_TASKS
        }
        right[name]["all"] = np.concatenate(list(right[name].values()))
        model.close()
    made = {
        name: {task: _compute_figures(found[task], None if name == control else right[control][task]) for task in found}
        for name, found in right.items()
    }
    return {"examples": {name: len(found) for name, found in examples.items()}, "models": made}


def _compute_figures(right: np.ndarray, control: np.ndarray | None) -> dict[str, float]:
    made = {"accuracy": float(right.mean())}
    if control is not None:
        pairs = right.astype(float) - control
        error = pairs.std(ddof=1) / len(pairs) ** 0.5
        made |= {"difference": float(pairs.mean()), "difference_standard_error": float(error)}
    return made
