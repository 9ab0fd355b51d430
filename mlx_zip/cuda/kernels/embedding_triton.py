"""The Triton kernel of the hyper embedding."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # columns per program


def launch(ids: torch.Tensor, base: torch.Tensor, rows: torch.Tensor, boundary: int) -> torch.Tensor:
    """Returns embeddings [B, L, D]; arguments as in `embedding.hyper_embedding`, which has checked them."""
    batch, length = ids.shape
    width = base.shape[1]
    out = torch.empty((batch, length, width), dtype=base.dtype, device=base.device)
    if out.numel():
        grid = (batch * length, triton.cdiv(width, BLOCK))
        _kernel[grid](ids, base, rows, out, length, width, rows.shape[1], boundary, BLOCK=BLOCK)
    return out


@triton.jit
def _kernel(ids, base, rows, out, length, width, capacity, boundary, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    one = tl.load(ids + at).to(tl.int64)
    is_base = (one >= 0) & (one < boundary)
    is_hyper = (one >= boundary) & (one < boundary + capacity)
    slot = (at // length) * capacity + one - boundary
    # limits, because the interpreter refuses a mask made of a vector and a scalar condition
    low = tl.load(base + one * width + columns, mask=columns < tl.where(is_base, width, 0), other=float("nan"))
    high = tl.load(rows + slot * width + columns, mask=columns < tl.where(is_hyper, width, 0), other=float("nan"))
    value = tl.where(is_hyper, high.to(out.dtype.element_ty), low.to(out.dtype.element_ty))
    tl.store(out + at * width + columns, value, mask=inside)
