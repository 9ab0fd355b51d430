"""Gradient checkpointing: computes a block's activations again in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_zip.models.recompute import recomputed


def recompute_activations(blocks: Sequence[nn.Module]) -> None:
    """Makes these blocks recompute their activations in the backward pass; names and weights stay as they are.

    The blocks must not draw random numbers, because the second pass would draw others. Other blocks of their class are
    not affected, unlike with mlx-lm's `grad_checkpoint`, which changes the class itself.
    """
    made: dict[type, type] = {}
    for block in blocks:
        kind = type(block)
        if kind not in made:
            made[kind] = type(kind.__name__, (kind,), {"__call__": _recomputed(kind.__call__)})
        block.__class__ = made[kind]


def _recomputed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a block's `__call__` that recomputes its activations. call: the original one."""

    def checkpointed(block: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        return recomputed(block, lambda x: call(block, x, *args, **kwargs), x)

    return checkpointed
