"""RMS norm of rows."""

from __future__ import annotations

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, use_triton, wide


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, impl: str | None = None
) -> torch.Tensor:
    """Returns the RMS norm of each row of x [N, D], times weight [D], in x's dtype; means are float32.

    out [N, D]: where the result is written, None for new memory.
    """
    check_shape("x", x, None, None)
    check_shape("weight", weight, x.shape[1])
    if out is not None:
        check_shape("out", out, *x.shape)
    if use_triton(impl, x, weight, out):
        from mlx_zip.cuda.kernels.triton.activations import launch

        return launch(x, weight, eps, out)
    return reference(x, weight, eps, out)


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns what `rms_norm` returns, in plain PyTorch."""
    exact = wide(x)
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return torch.mul(normed.to(x.dtype), weight.to(x.dtype), out=out)
