"""Products of one vector per sequence with a matrix, fused with a decoder's norm, bias, gate and residual."""

from __future__ import annotations

import torch

from mlx_zip.cuda.kernels.activations import normalize_rms
from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton, to_reference_dtype
from mlx_zip.cuda.kernels.packed import Matrix, check_matrix, to_dense_matrix

MAX_VECTORS = 16  # per call
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
        from mlx_zip.cuda.kernels.triton.matvec import launch_matvec

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
