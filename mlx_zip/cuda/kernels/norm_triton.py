"""The Triton kernel of residual sum and RMS norm."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm, total); arguments as in `norm.add_rms_norm`, which has checked them."""
    count, width = x.shape
    norm = torch.empty((count, width), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty((count, width), dtype=x.dtype, device=x.device)
    if x.numel():
        block = triton.next_power_of_2(width)
        _kernel[(count,)](x, residual, weight, norm, total, width, eps, ADD=residual is not None, BLOCK=block)
    return norm, total


@triton.jit
def _kernel(x, residual, weight, norm, total, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + start + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    normed = (value * scale).to(norm.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(norm + start + columns, (normed * factor).to(norm.dtype.element_ty), mask=inside)
