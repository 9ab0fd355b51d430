"""Checks that come before timings on a GPU: ids of the bundled model, and CUDA graphs against eager work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mlx_zip.cuda.generate import generate
from mlx_zip.cuda.graphs import Graphs
from mlx_zip.cuda.model import CudaModel, open_model
from mlx_zip.errors import MlxZipError

RECORDED = Path(__file__).parent / "greedy-ids.json"  # what MLX wrote, in float32
MODELS = ("stories", "stories-base")
PROMPTS = ("Once upon a time there was a little dog who", "Tom and his sister found a big red box in the")
TOKENS = 96  # base tokens that are recorded


def greedy_ids(model: CudaModel, tokens: int) -> list[list[int]]:
    """Returns the ids that a model emits after each of `PROMPTS`, of at most so many base tokens."""
    encode = model.tokenizer.encode
    prompts = [encode(text, add_special_tokens=False) for text in PROMPTS]
    return [[one for one, _ in generate(model, prompt, tokens, model.eos_ids)] for prompt in prompts]


def recorded() -> dict[str, list[list[int]]]:
    """Returns the recorded ids by the bundled model's name. Raises `MlxZipError` if they cannot be read."""
    try:
        return json.loads(RECORDED.read_text(encoding="utf-8"))["ids"]
    except (OSError, ValueError, KeyError) as error:
        raise MlxZipError(f"{RECORDED}: the recorded ids cannot be read: {error}") from error


def check(device: str | None, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Returns a line per check: its name, whether it holds, and what was found.

    tokens: base tokens that are compared; fewer than were recorded compare the beginning. Graphs need a GPU.
    """
    lines, expected = [], recorded()
    for name in MODELS:
        model = open_model(name, device, "float32")
        found = greedy_ids(model, tokens)
        wanted = expected[name]
        if tokens < TOKENS:
            wanted = [ids[: len(ours)] for ids, ours in zip(wanted, found, strict=True)]
        lines.append(_line(f"greedy ids of {name}, float32, equal MLX's", found == wanted, _first(found, wanted)))
        if model.device.type == "cuda":
            with eagerly():
                eager = greedy_ids(model, tokens)
            lines.append(
                _line(f"CUDA graphs of {name} give what eager work gives", eager == found, _first(found, eager))
            )
    return lines


def _line(name: str, holds: bool, said: str) -> dict[str, Any]:
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
