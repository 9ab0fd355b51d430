"""Packed matrices as dense ones, for products with many rows."""

from __future__ import annotations

import torch

from mlx_zip.cuda.kernels.dispatch import use_triton
from mlx_zip.cuda.kernels.packed import Packed


def unpack(packed: Packed, dtype: torch.dtype, impl: str | None = None) -> torch.Tensor:
    """Returns the matrix [R, D] in `dtype`; scale * level + bias is computed in float32 and rounded once."""
    packed.check()
    if use_triton(impl, packed.words, packed.scales, packed.biases):
        from mlx_zip.cuda.kernels.triton.packed import launch

        return launch(packed, dtype)
    return reference(packed, dtype)


def reference(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Returns what `unpack` returns, in plain PyTorch; float64 scales are computed with in float64."""
    levels = packed.words.view(torch.uint8)
    if packed.bits == 4:  # the low half of a byte is the earlier column
        levels = torch.stack([levels & 15, levels >> 4], dim=-1)
    exact = torch.promote_types(packed.scales.dtype, torch.float32)
    grouped = levels.view(*packed.scales.shape, packed.group_size).to(exact)
    scales, biases = packed.scales[..., None].to(exact), packed.biases[..., None].to(exact)
    return torch.addcmul(biases, grouped, scales).to(dtype).view(packed.shape)
