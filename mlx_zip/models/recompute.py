"""Gradients whose activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def recomputed(module: nn.Module, call: Callable[[mx.array], Any], x: mx.array) -> Any:
    """`call(x)`, of which the backward pass keeps only x and the module's weights.

    `call` must depend on no other weights that are trained, and draw no random numbers: the second pass would draw
    others. The module holds the same arrays afterwards as before, in either pass; in the second one they may be others
    than in the first, which computes in lower precision, say.
    """

    def again(parameters: Any, x: mx.array) -> Any:
        own = module.trainable_parameters()
        module.update(parameters)
        out = call(x)
        module.update(own)
        return out

    return mx.checkpoint(again)(module.trainable_parameters(), x)
