"""RMS norm of the sum of a layer's output and the residual stream, in one pass."""

from __future__ import annotations

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, use_triton, wide


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm, total), both [N, D] in x's dtype: total is x + residual (x if None), norm is its RMS norm.

    x, residual [N, D]; weight [D]. The total is rounded to x's dtype before it is normed; means are float32.
    """
    check_shape("x", x, None, None)
    check_shape("weight", weight, x.shape[1])
    if residual is not None:
        check_shape("residual", residual, *x.shape)
    if use_triton(impl, x, residual, weight):
        from mlx_zip.cuda.kernels.norm_triton import launch

        return launch(x, residual, weight, eps)
    return reference(x, residual, weight, eps)


def reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `add_rms_norm` returns, in plain PyTorch."""
    total = x if residual is None else x + residual.to(x.dtype)
    exact = wide(total)
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype), total
