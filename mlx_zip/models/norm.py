"""RMSNorm for mlx-lm's blocks, in a form that is quick for steps of generation on the CPU.

MLX's CPU backend has no kernels for RoPE and RMSNorm and runs 15 and 8 operations, each of which costs more than its
arithmetic. So a step of one id in float32 has forms of its own here and in `mlx_zip.models.rope`. A rotation as one
product with a matrix was even faster for narrow heads, but it grows with the square of their width and spreads values
that are not finite. A GPU has the kernels and uses them.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

_CPU = mx.Device(mx.cpu)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, float32 inside."""

    def __call__(self, x: mx.array) -> mx.array:
        """Returns x [..., L, D] normalized, in the same shape and dtype."""
        return _rms_norm(x, self.weight, self.eps) if steps_on_cpu(x) else super().__call__(x)


@mx.compile
def _rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Returns RMSNorm of x, compiled to few operations."""
    return x * mx.rsqrt(mx.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def steps_on_cpu(x: mx.array) -> bool:
    """Returns whether x [..., L, D] belongs to a step of generation (L is 1) on the CPU in float32.

    MLX has no CPU kernels for norm and rotation: it runs 8 and 15 separate operations, and starting each costs more
    than its arithmetic. Compiled, norm and rotation are 3 and 4 operations, and the layers share cosines and sines.
    """
    return x.shape[-2:-1] == (1,) and x.dtype == mx.float32 and mx.default_device() == _CPU


def with_quick_norms(block: nn.Module) -> None:
    """Replaces every `nn.RMSNorm` inside a block by this file's `RMSNorm`; weights and names stay."""
    quick = []
    for name, module in block.named_modules():
        if type(module) is nn.RMSNorm:
            made = RMSNorm(module.weight.size, module.eps)
            made.weight = module.weight
            quick.append((name, made))
    block.update_modules(tree_unflatten(quick))
