"""Joint head: base matrix and installed hyper rows in one pass, with the best ids and the log-sum-exp of all logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, use_triton, wide
from mlx_zip.cuda.kernels.packed import Packed, check_matrix, dequantize

MOST_TOP = 64


class Head(NamedTuple):
    """What a head gives: best [B] int64, lse [B] float32, logits [B, W] float32.

    logits is None if not asked for, and lse may be None then. values [B, k] float32, ids [B, k] int64: the highest
    logits and their ids, highest first; None if not asked for.
    """

    best: torch.Tensor
    lse: torch.Tensor | None
    logits: torch.Tensor | None
    values: torch.Tensor | None = None
    ids: torch.Tensor | None = None


def joint_head(
    x: torch.Tensor,
    base: torch.Tensor | Packed,
    rows: torch.Tensor,
    installed: torch.Tensor,
    boundary: int,
    logits: bool = False,
    top: int = 0,
    impl: str | None = None,
) -> Head:
    """Returns the best id, the log-sum-exp and, if asked for, the logits [base 0..V-1 | hyper | tail] of each row.

    x [B, D]; base [R, D] or `Packed`; rows [B, C, D]; installed [B, C] bool; boundary: V, 1 to R. top: k, how many of
    the highest logits are returned too, 0 to 64 and at most V. Logits have W = R + C columns; those of slots that are
    not installed and of the R - V tail columns are -inf, and their rows are not read by the kernel. Among equal logits
    the lowest id is best. Sums are float32; for several rows, unpacked weights are rounded to x's dtype first.
    """
    height, width = base.shape
    check_shape("x", x, None, width)
    check_shape("rows", rows, x.shape[0], None, width)
    check_shape("installed", installed, *rows.shape[:2])
    if not 1 <= boundary <= height:
        raise ValueError(f"boundary {boundary} lies outside 1..{height}, the rows of the base matrix")
    if not 0 <= top <= min(MOST_TOP, boundary):
        raise ValueError(f"top {top} lies outside 0..{min(MOST_TOP, boundary)}")
    if use_triton(impl, x, *check_matrix("base", base), rows, installed):
        from mlx_zip.cuda.kernels.head_triton import launch

        return Head(*launch(x, base, rows, installed, boundary, logits, top))
    return reference(x, base, rows, installed, boundary, logits, top)


def reference(
    x: torch.Tensor,
    base: torch.Tensor | Packed,
    rows: torch.Tensor,
    installed: torch.Tensor,
    boundary: int,
    logits: bool = False,
    top: int = 0,
) -> Head:
    """Returns what `joint_head` returns, in plain PyTorch; float64 inputs give float64 results."""
    matrix = dequantize(base) if isinstance(base, Packed) else base
    exact = wide(x)
    low = exact @ matrix[:boundary].to(exact.dtype).T
    high = torch.einsum("bd,bcd->bc", exact, rows.to(exact.dtype))
    tail = exact.new_full((x.shape[0], matrix.shape[0] - boundary), -torch.inf)
    # `where` also hides NaN in rows that are not installed
    every = torch.cat([low, torch.where(installed, high, -torch.inf), tail], dim=1)
    head = Head(every.argmax(1), torch.logsumexp(every, 1), every if logits else None)
    if not top:
        return head
    values, ids = torch.sort(every, dim=1, descending=True, stable=True)
    return head._replace(values=values[:, :top], ids=ids[:, :top])
