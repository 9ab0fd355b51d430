"""A decoder's operations on activations between its matrix products: the RMS norm of rows, and silu(gate) * up."""

from __future__ import annotations

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton, to_reference_dtype


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, impl: str | None = None
) -> torch.Tensor:
    """Returns the RMS norm of each row of x [N, D], times weight [D], in x's dtype; means are computed in float32.

    out [N, D]: where the result is written, None for new memory.
    """
    check_shape("x", x, None, None)
    check_shape("weight", weight, x.shape[1])
    if out is not None:
        check_shape("out", out, *x.shape)
    if should_use_triton(impl, x, weight, out):
        from mlx_zip.cuda.kernels.triton.activations import launch_rms_norm

        return launch_rms_norm(x, weight, eps, out)
    return reference_rms_norm(x, weight, eps, out)


def reference_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns what `rms_norm` returns, in plain PyTorch."""
    normed = normalize_rms(to_reference_dtype(x), eps)
    return torch.mul(normed.to(x.dtype), weight.to(x.dtype), out=out)


def normalize_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x [..., D] divided by the root mean square of its last axis, in x's dtype."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def silu_gate(gate_up: torch.Tensor, impl: str | None = None) -> torch.Tensor:
    """Returns silu(gate) * up [N, F] in the input's dtype, rounded once; gate_up [N, 2F] holds gate, then up."""
    check_shape("gate_up", gate_up, None, None)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, an odd number")
    if should_use_triton(impl, gate_up):
        from mlx_zip.cuda.kernels.triton.activations import launch_silu_gate

        return launch_silu_gate(gate_up)
    return reference_silu_gate(gate_up)


def reference_silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns what `silu_gate` returns, in plain PyTorch."""
    gate, up = to_reference_dtype(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
