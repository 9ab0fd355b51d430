"""Hyper rows as kernels read and write them: embeddings of ids among base rows, and rows of new entries in tables.

The look-up of ids does not make rows of new entries. The head gives an entry's slot -inf until the entry's rows are in
the tables. An id that is read before its row exists (LZW's KwKwK) is read a second time, alone, after the row was made.
Making rows during the look-up would save no launch: `encoder.embed_entries` gathers the base rows of an entry, and the
encoder needs all of them to make the one hyper row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton
from mlx_zip.cuda.kernels.packed import Matrix, check_matrix, look_up_rows


def hyper_embedding(
    ids: torch.Tensor, base: Matrix, rows: torch.Tensor, boundary: int, impl: str | None = None
) -> torch.Tensor:
    """Returns embeddings [B, L, D] in the base table's dtype; for a packed table, in the dtype of its scales.

    ids [B, L] int64; base [R, D] or `Packed`; rows [B, C, D], the hyper rows of each sequence. Ids from `boundary` on
    are hypertokens: id - boundary is the slot in `rows`. An id below 0 or from boundary + C on gives a row of NaN.
    """
    check_shape("ids", ids, None, None)
    parts = check_matrix("base", base)
    check_shape("rows", rows, ids.shape[0], None, base.shape[1])
    if not 0 <= boundary <= base.shape[0]:
        raise ValueError(f"boundary {boundary} lies outside the base table of {base.shape[0]} rows")
    if should_use_triton(impl, ids, *parts, rows):
        from mlx_zip.cuda.kernels.triton.hyper_rows import launch_hyper_embedding

        return launch_hyper_embedding(ids, base, rows, boundary)
    return reference_hyper_embedding(ids, base, rows, boundary)


def reference_hyper_embedding(ids: torch.Tensor, base: Matrix, rows: torch.Tensor, boundary: int) -> torch.Tensor:
    """Returns what `hyper_embedding` returns, in plain PyTorch."""
    capacity = rows.shape[1]
    is_base = (ids >= 0) & (ids < boundary)
    is_hyper = (ids >= boundary) & (ids < boundary + capacity)
    chosen = torch.where(is_base, ids, 0)
    out = look_up_rows(base, chosen)
    if capacity:
        slot = torch.where(is_hyper, ids - boundary, 0)
        found = rows.gather(1, slot[..., None].expand(-1, -1, rows.shape[2])).to(out.dtype)
        out = torch.where(is_hyper[..., None], found, out)
    return torch.where((is_base | is_hyper)[..., None], out, torch.nan)


def install_rows(
    new: torch.Tensor,
    pool: torch.Tensor,
    tables: Sequence[torch.Tensor],
    installed: torch.Tensor,
    spans: torch.Tensor,
    impl: str | None = None,
) -> None:
    """Writes the rows of N entries into one or two tables [B, C, D], and marks their slots as installed, in place.

    new [4, N] int64: each entry's sequence, slot, place in pool [P, sides, D], and span, the number of base ids.
    installed [B, C] bool; spans [B, S] int64: the spans are written to the last C columns, one per slot. All indices
    must be valid; a slot that is given twice must get the same values both times.
    """
    check_shape("new", new, 4, None)
    check_shape("pool", pool, None, len(tables), None)
    for table in tables:
        check_shape("table", table, *installed.shape, pool.shape[2])
    check_shape("spans", spans, installed.shape[0], None)
    if should_use_triton(impl, new, pool, *tables, installed, spans):
        from mlx_zip.cuda.kernels.triton.hyper_rows import launch_install_rows

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
