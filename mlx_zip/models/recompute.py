"""Gradients whose activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def recomputed(module: nn.Module, call: Callable[[mx.array], Any], x: mx.array) -> Any:
    """`call(x)`, of which the backward pass keeps only x and the module's weights.

    `call` must depend on no other weights that are trained, and draw no random numbers: the second pass would draw
    others. The second pass reads the weights of the first, frozen ones too, whatever the module holds by then, and puts
    that back.
    """
    first = module.parameters()

    def again(parameters: Any, x: mx.array) -> Any:
        own = module.parameters()
        module.update(first)
        module.update(parameters)
        out = call(x)
        module.update(own)
        return out

    return mx.checkpoint(again)(module.trainable_parameters(), x)
