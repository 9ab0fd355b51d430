"""silu(gate) * up, of a fused projection."""

from __future__ import annotations

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, use_triton, wide


def silu_gate(gate_up: torch.Tensor, impl: str | None = None) -> torch.Tensor:
    """Returns silu(gate) * up [N, F] in the input's dtype, rounded once; gate_up [N, 2F] holds gate, then up."""
    check_shape("gate_up", gate_up, None, None)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, an odd number")
    if use_triton(impl, gate_up):
        from mlx_zip.cuda.kernels.gate_triton import launch

        return launch(gate_up)
    return reference(gate_up)


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns what `silu_gate` returns, in plain PyTorch."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
