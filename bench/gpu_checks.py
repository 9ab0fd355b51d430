"""Checks that come before timings on a GPU: ids of the bundled model, and CUDA graphs against eager work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.generate import generate, read_prompt
from mlx_zip.cuda.graphs import Graphs
from mlx_zip.cuda.model import CudaModel, open_model
from mlx_zip.errors import MlxZipError

RECORDED = Path(__file__).parent / "greedy-ids.json"  # what MLX wrote, in float32
MODELS = ("stories", "stories-base")
LOGITS, MOST_ERROR = "stories-base", 1e-2  # model whose logits are compared; relative error of bfloat16
PROMPTS = ("Once upon a time there was a little dog who", "Tom and his sister found a big red box in the")
NO_NUMBER = 1e9  # error of logits that are no numbers
TOKENS = 96  # base tokens that are recorded
Line = dict[str, Any]


def greedy_ids(model: CudaModel, tokens: int) -> list[list[int]]:
    """Returns the ids that a model emits after each of `PROMPTS`, of at most so many base tokens."""
    encode = model.tokenizer.encode
    prompts = [encode(text, add_special_tokens=False) for text in PROMPTS]
    batch = Batch(model, 1, max(map(len, prompts)) + tokens)  # one for all, so that its graphs are captured once
    return [[one for one, _ in generate(model, prompt, tokens, model.eos_ids, batch=batch)] for prompt in prompts]


def recorded() -> dict[str, list[list[int]]]:
    """Returns the recorded ids by the bundled model's name. Raises `MlxZipError` if they cannot be read."""
    try:
        return json.loads(RECORDED.read_text(encoding="utf-8"))["ids"]
    except (OSError, ValueError, KeyError) as error:
        raise MlxZipError(f"{RECORDED}: the recorded ids cannot be read: {error}") from error


def checks(device: str | None, tokens: int = TOKENS) -> Iterator[tuple[str, Callable[[], Iterator[Line]]]]:
    """Yields the name of each check, and a function that yields lines: a name, whether it holds, what was found.

    tokens: base tokens that are compared; fewer than were recorded compare the beginning. Graphs need a GPU.
    """
    for name in MODELS:
        yield f"ids of {name}", partial(check_ids, name, device, tokens)
    yield f"logits of {LOGITS}", partial(check_logits, device)


def check_ids(name: str, device: str | None, tokens: int) -> Iterator[Line]:
    """Compares a bundled model's greedy ids with the recorded ones, and CUDA graphs with the same work without them."""
    wanted, model = recorded()[name], open_model(name, device, "float32")
    found = greedy_ids(model, tokens)
    if tokens < TOKENS:
        wanted = [ids[: len(ours)] for ids, ours in zip(wanted, found, strict=True)]
    yield _line(f"greedy ids of {name}, float32, equal MLX's", found == wanted, _first(found, wanted))
    if model.device.type == "cuda":
        with eagerly():
            eager = greedy_ids(model, tokens)
        yield _line(f"CUDA graphs of {name} give what eager work gives", eager == found, _first(found, eager))


def check_logits(device: str | None) -> Iterator[Line]:
    """Compares logits in bfloat16 with those in float32. value: the relative error, at most `NO_NUMBER`."""
    error = logits_error(open_model(LOGITS, device, "bfloat16"), open_model(LOGITS, device, "float32"))
    error = min(error, NO_NUMBER) if isfinite(error) else NO_NUMBER  # JSON has no other way to say so
    line = _line(f"logits of {LOGITS}, bfloat16", error <= MOST_ERROR, f"relative error {error:.2g}")
    yield {**line, "value": error}


def logits_error(model: CudaModel, exact: CudaModel) -> float:
    """Returns the norm of the difference of two models' logits after `PROMPTS`, over the norm of the second's."""
    ours, theirs = (torch.cat([last_logits(one, text) for text in PROMPTS]) for one in (model, exact))
    return float((ours - theirs).norm() / theirs.norm())


def last_logits(model: CudaModel, text: str) -> torch.Tensor:
    """Returns the logits [V] float64 of the base ids after a text."""
    ids = np.asarray(model.tokenizer.encode(text, add_special_tokens=False), np.uint32)
    batch, kept = Batch(model, 1, len(ids) + 1), []

    def keep(head: Any) -> torch.Tensor:
        kept.append(head.logits[0, : model.layout.vocab_size].double().cpu())
        return head.logits.argmax(-1)

    batch.add()
    read_prompt(batch, 0, ids, len(ids))
    batch.choose(keep)
    return kept[0]


def _line(name: str, holds: bool, said: str) -> Line:
    return {"check": name, "holds": holds, "found": said}


def _first(found: list[list[int]], expected: list[list[int]]) -> str:
    """Returns where two lists of ids differ first."""
    for text, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return f"text {text + 1}, id {at + 1}: {a} instead of {b}"
        if len(ours) != len(theirs):
            return f"text {text + 1}: {len(ours)} ids instead of {len(theirs)}"
    return ""


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, new batches run every piece of a step as it is, without CUDA graphs."""
    run = Graphs.run
    Graphs.run = lambda self, key, work, keep=(): work()  # type: ignore[method-assign]
    try:
        yield
    finally:
        Graphs.run = run  # type: ignore[method-assign]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
