"""The Triton kernel of the RMS norm."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launch(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None) -> torch.Tensor:
    """Returns the norm; arguments as in `norm.rms_norm`, which has checked them."""
    count, width = x.shape
    out = torch.empty((count, width), dtype=x.dtype, device=x.device) if out is None else out
    if x.numel():
        _kernel[(count,)](x, weight, out, width, eps, BLOCK=triton.next_power_of_2(width))
    return out


@triton.jit
def _kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + columns, (normed * factor).to(out.dtype.element_ty), mask=inside)
