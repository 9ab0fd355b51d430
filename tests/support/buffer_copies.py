"""Finds buffers that a request copies: their addresses change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.bench.engines.mlx_engines import ForcedIdSampler
from mlx_zip.engine.options import RunOptions
from support.steps import stream_ids

WINDOWS = (1, 2, 3)  # steps between two checks; different numbers also detect copies that alternate between buffers


def count_buffer_copies(model: Any, prompt: Sequence[int], text: Sequence[int], steps: int) -> dict[str, Any]:
    """Returns how often a request's buffers (KV caches and row tables) moved, which means that they were copied.

    prompt, text: base ids to read and to write. The buffers' addresses are compared every few steps (`WINDOWS`). A
    check waits for the device, so nothing is timed. A buffer that has grown since the last check does not count.
    windows: number of checks. moved: group of buffers -> number of checks that found a moved buffer, and moved bytes.
    """
    cache = model.make_cache()
    prompt_ids, ids = compress_prompt_and_text(cache[-1].books[0], prompt, text)
    sampler: Any = ForcedIdSampler(ids.tolist())
    count = min(steps, len(ids))
    run = RunOptions(ahead=True)
    made = islice(stream_ids(model, prompt_ids, cache, sampler=sampler, run=run), count)
    next(made)
    before, lengths, windows = buffer_places(cache), cycle(WINDOWS), 0
    found = {name: {"windows": 0, "bytes": 0} for name in before}
    left = next(lengths)
    for _ in made:
        left -= 1
        if left == 0:
            after = buffer_places(cache)
            for name, group in found.items():
                pairs = zip(before[name], after[name], strict=False)  # a table may have been added since
                moved = [now.bytes for then, now in pairs if now.shape == then.shape and now.address != then.address]
                group["windows"] += bool(moved)
                group["bytes"] += sum(moved)
            windows, before, left = windows + 1, after, next(lengths)
    return {"windows": windows, "moved": found}


class BufferPlace(NamedTuple):
    """Shape, size and address of a buffer."""

    shape: tuple[int, ...]
    bytes: int
    address: int


def buffer_places(cache: Sequence[Any]) -> dict[str, list[BufferPlace]]:
    """Returns the places of the arrays that steps write to, by group; waits until the arrays are computed."""
    state = cache[-1]
    groups = {
        "KV cache": [array for entry in cache[:-1] for array in (entry.keys, entry.values)],
        "input rows": [state.inputs.array],
        "output rows": [state.outputs.array],
    }
    return {name: [place_of_array(array) for array in arrays if array is not None] for name, arrays in groups.items()}


def place_of_array(array: mx.array) -> BufferPlace:
    """Returns an array's place. Keeps no reference: MLX would copy an array that is referenced elsewhere."""
    view: Any = memoryview(array.view(mx.uint8))  # type: ignore[arg-type]
    return BufferPlace(tuple(array.shape), array.nbytes, np.asarray(view).__array_interface__["data"][0])
