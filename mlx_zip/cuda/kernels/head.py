"""Joint head: base matrix and installed hyper rows in one pass, with the best ids."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton, to_reference_dtype
from mlx_zip.cuda.kernels.packed import Matrix, check_matrix, to_dense_matrix


class HeadOutput(NamedTuple):
    """A head's output: best ids [B] int64, and logits [B, W] float32, None if not asked for."""

    best: torch.Tensor
    logits: torch.Tensor | None


def joint_head(
    x: torch.Tensor,
    base: Matrix,
    rows: torch.Tensor,
    installed: torch.Tensor,
    boundary: int,
    logits: bool = False,
    impl: str | None = None,
) -> HeadOutput:
    """Returns the best id and, if `logits` is True, the logits of each row of x.

    x [B, D]; base [R, D] or `Packed`; rows [B, C, D]; installed [B, C] bool; boundary: V, 1 to R. Logits have W = R + C
    columns, [base 0..V-1 | hyper | tail]. The columns of slots that are not installed and the R - V tail columns are
    -inf; the kernel does not read the rows of these columns. Among equal logits the lowest id is best. Sums are
    float32; if x has several rows, the kernel rounds weights to x's dtype first.
    """
    height, width = base.shape
    check_shape("x", x, None, width)
    check_shape("rows", rows, x.shape[0], None, width)
    check_shape("installed", installed, *rows.shape[:2])
    if not 1 <= boundary <= height:
        raise ValueError(f"boundary {boundary} lies outside 1..{height}, the rows of the base matrix")
    if should_use_triton(impl, x, *check_matrix("base", base), rows, installed):
        from mlx_zip.cuda.kernels.triton.head import launch_joint_head

        return HeadOutput(*launch_joint_head(x, base, rows, installed, boundary, logits))
    return reference_joint_head(x, base, rows, installed, boundary, logits)


def reference_joint_head(
    x: torch.Tensor,
    base: Matrix,
    rows: torch.Tensor,
    installed: torch.Tensor,
    boundary: int,
    logits: bool = False,
) -> HeadOutput:
    """Returns what `joint_head` returns, in plain PyTorch; float64 inputs give float64 results."""
    matrix = to_dense_matrix(base)
    exact = to_reference_dtype(x)
    low = exact @ matrix[:boundary].to(exact.dtype).T
    high = torch.einsum("bd,bcd->bc", exact, rows.to(exact.dtype))
    tail = exact.new_full((x.shape[0], matrix.shape[0] - boundary), -torch.inf)
    # `where` also hides NaN in rows that are not installed
    every = torch.cat([low, torch.where(installed, high, -torch.inf), tail], dim=1)
    return HeadOutput(every.argmax(1), every if logits else None)
