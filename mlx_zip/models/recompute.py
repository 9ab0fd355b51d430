"""Gradients that compute activations again in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def recomputed(module: nn.Module, call: Callable[[mx.array], Any], x: mx.array) -> Any:
    """Returns `call(x)`, keeping only x and the module's weights for the backward pass, which runs `call` again.

    `call` must use no trained weights but the module's, and must draw no random numbers, because the second run would
    draw others. The second run uses the weights of the first, frozen ones included, and then restores the weights that
    the module has by then.
    """
    first = module.parameters()

    def again(parameters: Any, x: mx.array) -> Any:
        """Returns `call(x)`, run with the first run's weights and these trained ones."""
        own = module.parameters()
        module.update(first)
        module.update(parameters)
        out = call(x)
        module.update(own)
        return out

    return mx.checkpoint(again)(module.trainable_parameters(), x)
