"""Gradients that compute activations again in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def recomputed(module: nn.Module, call: Callable[[mx.array], Any], x: mx.array) -> Any:
    """`call(x)`, keeping only x and the module's weights for the backward pass.

    `call` must depend on no other trained weights, and must draw no random numbers, because the second pass would draw
    others. The second pass uses the weights of the first, frozen ones included, and then restores those that the module
    holds.
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
