"""Counts the kernels that a step launches on a GPU, in mlx_zip and in mlx-lm, from the graphs that both build.

Nothing is evaluated in the counted steps, so counting needs no GPU (`mlx_zip.bench.steps.launches`). Launches are not
weighted: a small addition counts as much as a large product.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import islice, pairwise
from statistics import mean
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.bench.engines.mlx_engines import ForcedIdSampler
from mlx_zip.bench.engines.shape_table import Models
from mlx_zip.bench.steps.launches import build_graphs_as_on_gpu, count_added_launches, count_launches
from mlx_zip.engine.mlx.generate import emit
from mlx_zip.engine.options import RunOptions
from mlx_zip.errors import MlxZipError
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.two_part_step import TwoPartStep

PROMPT, STEPS = 32, 20  # base ids read before the counted steps; most steps
SKIPPED = 4  # first steps, not counted: they include work done once per request or per model


class StepLaunches(NamedTuple):
    """Launches of each counted step in mlx_zip (ours) and mlx-lm (plain), and whether the step installs an entry."""

    ours: list[int]
    plain: list[int]
    installs: list[bool]

    def record(self) -> dict[str, Any]:
        """Returns the mean launches per step, and the number of steps, for a record."""
        return {"mlx-zip": round(mean(self.ours), 1), "mlx-lm": round(mean(self.plain), 1), "steps": len(self.ours)}


def count_step_launches(models: Models, base_ids: Sequence[int], rows: str) -> StepLaunches | None:
    """Returns the launches of the steps that write `base_ids` after the first `PROMPT`; None if too few are left.

    models: new model objects are made from it, so that timed models keep their own graphs. rows: "warm" if a request
    for the same text has filled the row store, else "cold".
    """
    found = prepare_steps(models, base_ids, rows)
    if found is None:
        return None
    model, cache, emitted, installs = found
    with build_graphs_as_on_gpu():
        ours = count_added_launches(_zip_steps(model, cache, emitted))
        plain = count_added_launches(_plain_steps(models.plain(), base_ids))
    return StepLaunches(ours[SKIPPED:], plain[SKIPPED:], installs[SKIPPED:])


def step_seconds(models: Models, base_ids: Sequence[int], rows: str) -> tuple[list[float], list[float], list[bool]]:
    """Times how long the host builds the graph of each step that `count_step_launches` counts.

    Returns three lists with a value per step: processor seconds in mlx_zip, processor seconds in mlx-lm, and whether
    the step installs an entry. Detokenizing and the work of MLX's own threads are not included. Raises `MlxZipError` if
    there are too few steps.
    """
    found = prepare_steps(models, base_ids, rows)
    if found is None:
        raise MlxZipError(f"{len(base_ids)} base ids are too few to time steps with")
    model, cache, emitted, installs = found
    with build_graphs_as_on_gpu():
        ours = _clocked(_zip_steps(model, cache, emitted))
        plain = _clocked(_plain_steps(models.plain(), base_ids))
    return ours[SKIPPED:], plain[SKIPPED:], installs[SKIPPED:]


def _clocked(steps: Iterator[mx.array]) -> list[float]:
    arrays, clocks = [], [time.thread_time()]
    for array in steps:
        clocks.append(time.thread_time())
        arrays.append(array)  # keeps the graph from being freed within the next step
    return [after - before for before, after in pairwise(clocks)]


def prepare_steps(
    models: Models, base_ids: Sequence[int], rows: str
) -> tuple[Any, list[Any], list[int], list[bool]] | None:
    """Returns a model, caches that hold the prompt, the ids of the steps, and whether each id installs an entry.

    Returns None if there are too few steps. models, base_ids, rows: as in `count_step_launches`.
    """
    assert models.zipped is not None
    model = copy(models.zipped())
    model.eval()
    model.row_source.store = None
    prompt, ids = compress_prompt_and_text(model.make_cache()[-1].books[0], base_ids[:PROMPT], base_ids[PROMPT:])
    emitted = ids[:STEPS].tolist()
    if len(emitted) <= SKIPPED:
        return None
    if rows == "warm":
        model.row_source.store = RowStore()
        _fill_store(model, prompt, emitted)
    cache = model.make_cache()
    prefill(model, prompt, cache)
    if rows == "cold":
        model = copy(model)  # without the encoders compiled for this device
    book = cache[-1].books[0].copy()
    return model, cache, emitted, [len(book.push(one)) > 0 for one in emitted]


def encoder_launches(models: Models, side: str, entries: int) -> int:
    """Returns the launches of a pass that encodes the rows of `entries` entries. side: "input" or "output"."""
    assert models.zipped is not None
    model = copy(models.zipped())
    model.eval()
    size = model.config.merge_size
    base_ids = np.arange(3, 3 + entries * size, dtype=np.uint32).reshape(entries, size)
    with build_graphs_as_on_gpu():
        return sum(
            count_launches(
                model.row_source.encode(model.side(side), base_ids, np.full(entries, size, np.uint32))
            ).values()
        )


def _fill_store(model: Any, prompt: np.ndarray, ids: Sequence[int]) -> None:
    sampler: Any = ForcedIdSampler(ids)
    run = RunOptions(prefill_step_size=PROMPT, ahead=True)
    made = emit(model, prompt, model.make_cache(), sampler=sampler, run=run)
    deque(islice(made, len(ids)), maxlen=0)
    model.row_source.store.flush()


def prefill(model: Any, ids: Iterable[int], cache: list[Any]) -> None:
    model(mx.array([list(map(int, ids))]), cache=cache)
    mx.eval([entry.state for entry in cache if hasattr(entry, "keys")])


def _zip_steps(model: Any, cache: list[Any], ids: Sequence[int]) -> Iterator[mx.array]:
    """Yields the choice after each step that reads one of `ids` in mlx_zip, with bodies that run ahead."""
    ahead = TwoPartStep(model, cache)
    for one in ids:
        y = mx.array([one])
        h = ahead.run(y)
        logits = model(y[None], cache=cache) if h is None else ahead.follow(h, y)
        yield greedy_choice(logits[:, -1, : model.layout.hyper_id(len(cache[-1].books[0]))])


def _plain_steps(model: Any, base_ids: Sequence[int]) -> Iterator[mx.array]:
    cache = make_prompt_cache(model)
    prefill(model, base_ids[:2], cache)
    for one in base_ids[PROMPT : PROMPT + STEPS]:
        yield greedy_choice(model(mx.array([[int(one)]]), cache=cache)[:, -1])


def greedy_choice(logits: mx.array) -> mx.array:
    """Returns the greedy choice as the decoding loop computes it, from log-probabilities."""
    return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
