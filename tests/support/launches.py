"""Counts the kernels that a GPU launches for a graph of MLX.

Every operation that is not a view counts as a launch, a small addition as much as a large product. On the CPU, MLX
builds some operations (`mx.fast`) from many parts that a GPU runs as one kernel, and mlx_zip has separate code for the
CPU. `build_graphs_as_on_gpu` makes a model build the graph of a GPU, so that launches can be counted on any machine.
Such a graph must not be evaluated: its stand-ins compute nothing useful.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_zip.models import decoder

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
        patches.enter_context(patch.object(decoder, "is_step_on_cpu", lambda x: False))
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
