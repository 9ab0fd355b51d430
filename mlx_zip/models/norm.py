"""RMSNorm as mlx-lm's blocks use it, with a form for a step of generation on the CPU."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, float32 inside."""

    def __call__(self, x: mx.array) -> mx.array:
        """X [..., L, D] -> the same shape and dtype."""
        return _rms_norm(x, self.weight, self.eps) if steps_on_cpu(x) else super().__call__(x)


@mx.compile
def _rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def steps_on_cpu(x: mx.array) -> bool:
    """Whether x [..., L, D] is a step of generation on the CPU, in float32.

    MLX has no kernels of norm and rotation for the CPU: it runs 8 and 15 operations, each of which costs more there
    than its arithmetic. Compiled they are three and four, and layers share their cosines and sines.
    """
    return x.ndim > 1 and x.shape[-2] == 1 and x.dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


def with_quick_norms(block: nn.Module) -> None:
    """Gives every plain RMSNorm below a module that form; weights and names stay."""
    quick = []
    for name, module in block.named_modules():
        if type(module) is nn.RMSNorm:
            made = RMSNorm(module.weight.size, module.eps)
            made.weight = module.weight
            quick.append((name, made))
    block.update_modules(tree_unflatten(quick))
