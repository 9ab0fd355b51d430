"""Installs the rows of new entries: copied from the store of rows into the tables of a batch, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, use_triton


def install_rows(
    new: torch.Tensor,
    pool: torch.Tensor,
    tables: Sequence[torch.Tensor],
    installed: torch.Tensor,
    spans: torch.Tensor,
    impl: str | None = None,
) -> None:
    """Writes the rows of N entries into one or two tables [B, C, D], marks their slots, and notes their spans.

    new [4, N] int64: of each entry the sequence, the slot, the place in pool [P, sides, D], and the span, how many base
    ids it stands for. installed [B, C] bool; spans [B, S] int64, whose last C columns are those of the slots. All
    numbers lie within these sizes; a slot that is named twice is given the same values.
    """
    check_shape("new", new, 4, None)
    check_shape("pool", pool, None, len(tables), None)
    for table in tables:
        check_shape("table", table, *installed.shape, pool.shape[2])
    check_shape("spans", spans, installed.shape[0], None)
    if use_triton(impl, new, pool, *tables, installed, spans):
        from mlx_zip.cuda.kernels.triton.install import launch_install_rows

        launch_install_rows(new, pool, tables, installed, spans)
    else:
        reference_install_rows(new, pool, tables, installed, spans)


def reference_install_rows(
    new: torch.Tensor, pool: torch.Tensor, tables: Sequence[torch.Tensor], installed: torch.Tensor, spans: torch.Tensor
) -> None:
    """Does what `install_rows` does, in plain PyTorch."""
    sequences, slots, places, lengths = new
    rows = pool[places]
    for side, table in enumerate(tables):
        table[sequences, slots] = rows[:, side]
    installed[sequences, slots] = torch.ones_like(slots, dtype=torch.bool)
    spans[sequences, spans.shape[1] - installed.shape[1] + slots] = lengths
