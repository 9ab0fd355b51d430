"""Gradient checkpointing: a block's activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_zip.models.recompute import recomputed


def recompute_activations(blocks: Sequence[nn.Module]) -> None:
    """Makes these blocks recompute, and no others of their class; names and weights stay as they are.

    They must not draw random numbers: the second pass would draw others. (mlx-lm's `grad_checkpoint` changes the
    class itself, and with it every model of the process.)
    """
    made: dict[type, type] = {}
    for block in blocks:
        kind = type(block)
        if kind not in made:
            made[kind] = type(kind.__name__, (kind,), {"__call__": _recomputed(kind.__call__)})
        block.__class__ = made[kind]


def _recomputed(call: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(block: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        return recomputed(block, lambda x: call(block, x, *args, **kwargs), x)

    return checkpointed
