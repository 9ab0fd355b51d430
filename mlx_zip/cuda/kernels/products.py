"""A decoder's products of one vector per sequence with a matrix, the RMS norm of rows, and silu(gate) * up.

The products are fused with norm, bias, gate and residual. Norm and gate alone serve calls of more than `MAX_VECTORS`.
"""

from __future__ import annotations

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton, to_reference_dtype
from mlx_zip.cuda.kernels.packed import Matrix, check_matrix, to_dense_matrix

MAX_VECTORS = 16  # per call of `matvec`
Norm = tuple[torch.Tensor, float]


def matvec(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gate: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns norm(x) W' + bias [B, R], gated if `gate` is True, plus the residual; in x's dtype, rounded once.

    x [B, D], B up to 16; weight W [R, D] or `Packed`; bias [R]. norm: weight [D] and eps of an RMS norm of x. gate: the
    first half of W's rows gives a gate, the second half values, and the product becomes silu(gate) * values [B, R / 2].
    residual: added to the result, of the same shape. Sums are float32. If B > 1, the matrix units multiply W with x
    times the norm's weights, both in x's dtype (in TF32 for float16, whose range x times the weights may exceed); the
    factor 1 / rms is applied to the sums.
    """
    rows, width = weight.shape
    check_shape("x", x, None, width)
    if x.shape[0] > MAX_VECTORS:
        raise ValueError(f"{x.shape[0]} vectors, at most {MAX_VECTORS} are supported")
    if gate and rows % 2:
        raise ValueError(f"the matrix has {rows} rows, an odd number")
    if bias is not None:
        check_shape("bias", bias, rows)
    if norm is not None:
        check_shape("norm", norm[0], width)
    if residual is not None:
        check_shape("residual", residual, x.shape[0], rows // 2 if gate else rows)
    if should_use_triton(impl, x, *check_matrix("weight", weight), bias, norm[0] if norm else None, residual):
        from mlx_zip.cuda.kernels.triton.products import launch_matvec

        return launch_matvec(x, weight, bias, norm, residual, gate)
    return reference_matvec(x, weight, bias, norm, residual, gate)


def reference_matvec(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gate: bool = False,
) -> torch.Tensor:
    """Returns what `matvec` returns, in plain PyTorch; float64 inputs give float64 results."""
    exact = to_reference_dtype(x)
    if norm is not None:
        exact = normalize_rms(exact, norm[1]) * norm[0].to(exact.dtype)
    y = exact @ to_dense_matrix(weight).to(exact.dtype).T
    if bias is not None:
        y = y + bias.to(y.dtype)
    if gate:
        first, second = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(first) * second
    if residual is not None:
        y = y + residual.to(y.dtype)
    return y.to(x.dtype)


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
        from mlx_zip.cuda.kernels.triton.products import launch_rms_norm

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
        from mlx_zip.cuda.kernels.triton.products import launch_silu_gate

        return launch_silu_gate(gate_up)
    return reference_silu_gate(gate_up)


def reference_silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns what `silu_gate` returns, in plain PyTorch."""
    gate, up = to_reference_dtype(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
