"""Counts the kernels that a GPU launches for a graph, and for each step in mlx_zip and in mlx-lm.

Every operation that is not a view counts as a launch, a small addition as much as a large product. On the CPU, MLX
builds some operations (`mx.fast`) from many parts that a GPU runs as one kernel, and mlx_zip has separate code for the
CPU. `build_graphs_as_on_gpu` makes a model build the graph of a GPU, so that launches can be counted on any machine.
Such a graph must not be evaluated: its stand-ins compute nothing useful.
"""

from __future__ import annotations

import io
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import islice, pairwise
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.bench.engines.mlx_engines import ForcedIdSampler
from mlx_zip.bench.engines.shape_table import Models
from mlx_zip.engine.mlx.generate import stream_ids
from mlx_zip.engine.options import RunOptions
from mlx_zip.errors import MlxZipError
from mlx_zip.models import layers
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.two_part_step import TwoPartStep

VIEW_OPERATIONS = {
    "AsStrided",
    "Broadcast",
    "Depends",
    "DynamicSlice",
    "ExpandDims",
    "Flatten",
    "Reshape",
    "Slice",
    "Split",
}
VIEW_OPERATIONS |= {"Squeeze", "StopGradient", "Transpose", "Unflatten", "View"}
_NODE = re.compile(r'\[label ="([^"]*)", shape=rectangle\]')


def count_launches(*arrays: mx.array) -> Counter[str]:
    """Returns how many operations of each name must still run to compute lazy arrays; views are not counted.

    Counts lines of MLX's DOT export, not distinct node numbers: all calls of a `mx.compile`d function share a number.
    """
    dot: Any = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    return Counter(name for name in _NODE.findall(dot.getvalue()) if name.split()[0] not in VIEW_OPERATIONS)


def count_added_launches(steps: Iterable[mx.array]) -> list[int]:
    """Returns the launches of each step. steps: yields the array that each step computes.

    The arrays stay lazy. An operation that two steps share counts for the first of them only.
    """
    arrays: list[mx.array] = []
    totals = [0]
    for made in steps:
        arrays.append(made)
        totals.append(sum(count_launches(*arrays).values()))
    return [after - before for before, after in pairwise(totals)]


@contextmanager
def build_graphs_as_on_gpu() -> Iterator[None]:
    """Context manager: models build the graphs that they build on a GPU, with one operation per call of `mx.fast`."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(layers, "is_step_on_cpu", lambda x: False))
        for name, stand_in in _STAND_INS.items():
            patches.enter_context(patch.object(mx.fast, name, stand_in))
        patches.enter_context(patch.object(mx, "dequantize", _dequantize_stand_in))
        yield


def _norm_stand_in(x: mx.array, *args: Any, **options: Any) -> mx.array:
    """Stands in for `mx.fast.rms_norm` and `layer_norm`: one operation, which is not a view and never fused."""
    return mx.softmax(x, axis=-1)


def _rope_stand_in(x: mx.array, *args: Any, offset: Any = 0, **options: Any) -> mx.array:
    out = mx.softmax(x, axis=-1)
    return mx.depends(out, [offset]) if isinstance(offset, mx.array) else out  # type: ignore[attr-defined]


def _attention_stand_in(
    q: mx.array, k: mx.array, v: mx.array, *args: Any, mask: Any = None, **options: Any
) -> mx.array:
    others = [k, v, *([mask] if isinstance(mask, mx.array) else [])]
    return mx.depends(mx.softmax(q, axis=-1), others)  # type: ignore[attr-defined]


def _dequantize_stand_in(w: mx.array, scales: mx.array, *args: Any, bits: int = 4, **options: Any) -> mx.array:
    values = mx.softmax(mx.broadcast_to(scales[..., :1], (*w.shape[:-1], w.shape[-1] * 32 // bits)), axis=-1)
    others = [w, *(one for one in args if isinstance(one, mx.array)), *options.values()]
    return mx.depends(values, [one for one in others if isinstance(one, mx.array)])  # type: ignore[attr-defined]


_STAND_INS = {
    "rms_norm": _norm_stand_in,
    "layer_norm": _norm_stand_in,
    "rope": _rope_stand_in,
    "scaled_dot_product_attention": _attention_stand_in,
}


# ---- steps

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
        ours = _time_steps(_zip_steps(model, cache, emitted))
        plain = _time_steps(_plain_steps(models.plain(), base_ids))
    return ours[SKIPPED:], plain[SKIPPED:], installs[SKIPPED:]


def _time_steps(steps: Iterator[mx.array]) -> list[float]:
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
        _fill_row_store(model, prompt, emitted)
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
                model.row_source.encode_rows_of_side(
                    model.side_named(side), base_ids, np.full(entries, size, np.uint32)
                )
            ).values()
        )


def _fill_row_store(model: Any, prompt: np.ndarray, ids: Sequence[int]) -> None:
    sampler: Any = ForcedIdSampler(ids)
    run = RunOptions(prefill_step_size=PROMPT, ahead=True)
    made = stream_ids(model, prompt, model.make_cache(), sampler=sampler, run=run)
    deque(islice(made, len(ids)), maxlen=0)
    model.row_source.store.flush()


def prefill(model: Any, ids: Iterable[int], cache: list[Any]) -> None:
    model(mx.array([list(map(int, ids))]), cache=cache)
    mx.eval([entry.state for entry in cache if hasattr(entry, "keys")])


def _zip_steps(model: Any, cache: list[Any], ids: Sequence[int]) -> Iterator[mx.array]:
    """Yields the id chosen after each step that reads one of `ids` in mlx_zip, in two parts as `TwoPartStep` does."""
    ahead = TwoPartStep(model, cache)
    for one in ids:
        y = mx.array([one])
        h = ahead.run_body(y)
        logits = model(y[None], cache=cache) if h is None else ahead.compute_logits(h, y)
        yield greedy_choice(logits[:, -1, : model.layout.hyper_id(len(cache[-1].books[0]))])


def _plain_steps(model: Any, base_ids: Sequence[int]) -> Iterator[mx.array]:
    cache = make_prompt_cache(model)
    prefill(model, base_ids[:2], cache)
    for one in base_ids[PROMPT : PROMPT + STEPS]:
        yield greedy_choice(model(mx.array([[int(one)]]), cache=cache)[:, -1])


def greedy_choice(logits: mx.array) -> mx.array:
    """Returns the greedy choice as the decoding loop computes it, from log-probabilities."""
    return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
