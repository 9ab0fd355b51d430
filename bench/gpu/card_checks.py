"""Checks that run before timings on a GPU: ids of the bundled models, CUDA graphs, and prompts read in two chunks."""

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

from mlx_zip.bench.engines.cuda_engines import generate_greedily, prefill_in_chunks
from mlx_zip.bench.engines.random_folder import random_folder
from mlx_zip.bench.engines.shape_table import SHAPES, narrow_shape_config
from mlx_zip.bench.records import Record
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.devices import find_device
from mlx_zip.cuda.graphs import CudaGraphs
from mlx_zip.cuda.model import CudaModel, open_model
from mlx_zip.errors import MlxZipError

RECORDED = Path(__file__).parent / "greedy-ids.json"  # greedy ids of MLX, in float32
MODELS = ("stories", "stories-base")
LOGITS, MOST_ERROR = "stories-base", 1e-2  # model whose logits are compared; largest relative error of bfloat16
PROMPTS = ("Once upon a time there was a little dog who", "Tom and his sister found a big red box in the")
CHUNKED = {"one key head per query head": "phi-3.5-mini", "grouped key heads": "llama-3.2-1b"}  # narrow, random weights
CHUNKS = 200, 128  # ids of a prompt, ids of its first chunk
MOST_APART = {"float32": 1e-4, "bfloat16": 2e-2}  # largest relative difference of logits, for rounding
NO_NUMBER = 1e9  # recorded as the error if logits are NaN or infinite
TOKENS = 96  # number of recorded base tokens per prompt


def greedy_ids(model: CudaModel, tokens: int) -> list[list[int]]:
    encode = model.tokenizer.encode
    prompts = [encode(text, add_special_tokens=False) for text in PROMPTS]
    batch = Batch(model, 1, max(map(len, prompts)) + tokens)  # for all prompts: captures graphs once
    return [
        [one for one, _ in generate_greedily(model, prompt, tokens, model.tokenizer.eos_token_ids, batch=batch)]
        for prompt in prompts
    ]


def read_recorded_ids() -> dict[str, list[list[int]]]:
    try:
        return json.loads(RECORDED.read_text(encoding="utf-8"))["ids"]
    except (OSError, ValueError, KeyError) as error:
        raise MlxZipError(f"{RECORDED}: the recorded ids cannot be read: {error}") from error


def all_card_checks(device: str | None, tokens: int = TOKENS) -> Iterator[tuple[str, Callable[[], Iterator[Record]]]]:
    """Yields each check's name and a function that runs the check and yields records of what it found.

    tokens: base tokens to compare; if fewer than recorded, only the beginning is compared. CUDA graphs need a GPU.
    """
    for name in MODELS:
        yield f"ids of {name}", partial(check_ids, name, device, tokens)
    yield f"logits of {LOGITS}", partial(check_logits, device)
    for heads in CHUNKED:
        for dtype in MOST_APART:
            yield f"two chunks, {heads}, {dtype}", partial(check_chunks, heads, dtype, device)


def check_ids(name: str, device: str | None, tokens: int) -> Iterator[Record]:
    """Compares a bundled model's greedy ids with the recorded ids, and on a GPU with its ids without CUDA graphs."""
    wanted, model = read_recorded_ids()[name], open_model(name, device, "float32")
    found = greedy_ids(model, tokens)
    if tokens < TOKENS:
        wanted = [ids[: len(ours)] for ids, ours in zip(wanted, found, strict=True)]
    yield check_line(f"greedy ids of {name}, float32, equal MLX's", found == wanted, first_difference(found, wanted))
    if model.device.type == "cuda":
        with without_cuda_graphs():
            eager = greedy_ids(model, tokens)
        yield check_line(
            f"CUDA graphs of {name} give what eager work gives", eager == found, first_difference(found, eager)
        )


def check_logits(device: str | None) -> Iterator[Record]:
    error = relative_logits_error(open_model(LOGITS, device, "bfloat16"), open_model(LOGITS, device, "float32"))
    error = min(error, NO_NUMBER) if isfinite(error) else NO_NUMBER  # JSON has no NaN or infinity
    line = check_line(f"logits of {LOGITS}, bfloat16", error <= MOST_ERROR, f"relative error {error:.2g}")
    yield {**line, "value": error}


def check_chunks(heads: str, dtype: str, device: str | None) -> Iterator[Record]:
    """Compares the logits after a prompt read in two chunks with the logits after the prompt read in one chunk.

    heads: a key of `CHUNKED`. The second chunk's queries attend to the first chunk's keys; PyTorch uses a different
    operation for each dtype and kind of heads.
    """
    config, where = narrow_shape_config(SHAPES[CHUNKED[heads]]), find_device(device)
    folder = random_folder(config, where, getattr(torch, dtype), kernels=where.type == "cuda")
    model, (count, first) = CudaModel(folder, None), CHUNKS
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], count).astype(np.uint32)
    whole, parts = (logits_after_prompt(model, ids, chunk) for chunk in (count, first))
    error, bound = relative_difference(parts, whole), MOST_APART[dtype]
    yield check_line(f"two chunks equal one, {heads}, {dtype}", error <= bound, f"relative difference {error:.2g}")


def relative_logits_error(model: CudaModel, exact: CudaModel) -> float:
    """Returns the norm of the difference of two models' logits after `PROMPTS`, divided by the norm of `exact`'s."""
    texts = [np.asarray(model.tokenizer.encode(text, add_special_tokens=False), np.uint32) for text in PROMPTS]
    ours, theirs = (torch.cat([logits_after_prompt(one, ids, len(ids)) for ids in texts]) for one in (model, exact))
    return relative_difference(ours, theirs)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def logits_after_prompt(model: CudaModel, ids: np.ndarray, chunk: int) -> torch.Tensor:
    """Returns the base ids' logits [V] in float64 after ids [n], read `chunk` ids at a time."""
    batch, kept = Batch(model, 1, len(ids) + 1), []

    def keep(head: Any) -> torch.Tensor:
        kept.append(head.logits[0, : model.layout.vocab_size].double().cpu())
        return head.logits.argmax(-1)

    batch.add()
    prefill_in_chunks(batch, 0, ids, chunk)
    batch.choose_ids(keep)
    return kept[0]


def check_line(name: str, holds: bool, said: str) -> Record:
    return {"check": name, "holds": holds, "found": said}


def first_difference(found: list[list[int]], expected: list[list[int]]) -> str:
    for text, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return f"text {text + 1}, id {at + 1}: {a} instead of {b}"
        if len(ours) != len(theirs):
            return f"text {text + 1}: {len(ours)} ids instead of {len(theirs)}"
    return ""


@contextmanager
def without_cuda_graphs() -> Iterator[None]:
    run = CudaGraphs.run
    CudaGraphs.run = lambda self, key, work, keep=(): work()  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaGraphs.run = run  # type: ignore[method-assign]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
