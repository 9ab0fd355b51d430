"""The Triton kernel of silu(gate) * up."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # columns per program


def launch(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up; the argument as in `gate.silu_gate`, which has checked it."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((count, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _kernel[(count, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out


@triton.jit
def _kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)
