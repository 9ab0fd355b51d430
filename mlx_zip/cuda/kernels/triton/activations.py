"""The Triton kernels of the RMS norm and of silu(gate) * up."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # columns per program of silu(gate) * up


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None) -> torch.Tensor:
    """Returns the norm; arguments as in `activations.rms_norm`, which has checked them."""
    count, width = x.shape
    out = torch.empty((count, width), dtype=x.dtype, device=x.device) if out is None else out
    if x.numel():
        _rms_norm_kernel[(count,)](x, weight, out, width, eps, BLOCK=triton.next_power_of_2(width))
    return out


@triton.jit
def _rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + columns, (normed * factor).to(out.dtype.element_ty), mask=inside)


def launch_silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up; the argument as in `activations.silu_gate`, which has checked it."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((count, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_gate_kernel[(count, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out


@triton.jit
def _silu_gate_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)
