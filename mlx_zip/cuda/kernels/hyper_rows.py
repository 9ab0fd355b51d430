"""Hyper rows from their making to their use: pieces of the hyper-encoders, tables of rows, and embeddings of ids.

The pieces are input rows, attention and pooling of entries of at most 16 base ids; the caller does the large matrix
products between them. Shapes: N entries, S places, D width.

The look-up of ids does not make rows of new entries. The head gives an entry's slot -inf until the entry's rows are in
the tables. An id that is read before its row exists (LZW's KwKwK) is read a second time, alone, after the row was made.
Making rows during the look-up would save no launch: `embed_entries` gathers the base rows of an entry, and the encoder
needs all of them to make the one hyper row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton, to_reference_dtype
from mlx_zip.cuda.kernels.packed import Matrix, check_matrix, look_up_rows

MOST_PLACES = 16
MASKS = ("both", "keys", "causal")  # which queries see which keys
POOLS = ("all", "real", "last")  # which places are pooled


def embed_entries(
    entries: torch.Tensor, matrix: Matrix, places: torch.Tensor | None, impl: str | None = None
) -> torch.Tensor:
    """Returns matrix[entries] + places [N, S, D] in the matrix's dtype; for a packed matrix, in that of its scales.

    entries [N, S] int64, padded with the pad id; matrix [R, D] or `Packed`; places [S or more, D]: position embeddings,
    or None. An id outside 0..R-1 gives a row of NaN.
    """
    check_shape("entries", entries, None, None)
    parts = check_matrix("matrix", matrix)
    if places is not None:
        check_shape("places", places, None, matrix.shape[1])
        if places.shape[0] < entries.shape[1]:
            raise ValueError(f"entries have {entries.shape[1]} places, positions only {places.shape[0]}")
    if should_use_triton(impl, entries, *parts, places):
        from mlx_zip.cuda.kernels.triton.hyper_rows import launch_embed_entries

        return launch_embed_entries(entries, matrix, places)
    return reference_embed_entries(entries, matrix, places)


def reference_embed_entries(entries: torch.Tensor, matrix: Matrix, places: torch.Tensor | None) -> torch.Tensor:
    """Returns what `embed_entries` returns, in plain PyTorch."""
    known = (entries >= 0) & (entries < matrix.shape[0])
    chosen = torch.where(known, entries, 0)
    x = look_up_rows(matrix, chosen)
    if places is not None:
        x = x + places[: entries.shape[1]].to(x.dtype)
    return torch.where(known[..., None], x, torch.nan)


def attend_in_entries(
    qkv: torch.Tensor, lengths: torch.Tensor, heads: int, mask: str, impl: str | None = None
) -> torch.Tensor:
    """Returns softmax(q k' / sqrt(head width)) v [N, S, D]; qkv [N, S, 3D] holds queries, keys, values.

    lengths [N]: number of real places, 1 to S; S is at most 16. mask "both": real queries see real keys, padding
    queries give 0; "keys": all queries see real keys; "causal": all queries see real keys up to their own place.
    """
    check_shape("qkv", qkv, None, None, None)
    check_shape("lengths", lengths, qkv.shape[0])
    if mask not in MASKS:
        raise ValueError(f"mask {mask!r} is not one of {', '.join(MASKS)}")
    if qkv.shape[1] > MOST_PLACES:
        raise ValueError(f"{qkv.shape[1]} places, at most {MOST_PLACES} are supported")
    if qkv.shape[2] % (3 * heads):
        raise ValueError(f"{qkv.shape[2]} columns are not made of queries, keys and values of {heads} heads")
    if should_use_triton(impl, qkv, lengths):
        from mlx_zip.cuda.kernels.triton.hyper_rows import launch_attend_in_entries

        return launch_attend_in_entries(qkv, lengths, heads, mask)
    return reference_attend_in_entries(qkv, lengths, heads, mask)


def reference_attend_in_entries(qkv: torch.Tensor, lengths: torch.Tensor, heads: int, mask: str) -> torch.Tensor:
    """Returns what `attend_in_entries` returns, in plain PyTorch."""
    count, length, columns = qkv.shape
    q, k, v = to_reference_dtype(qkv).view(count, length, 3, heads, columns // 3 // heads).permute(2, 0, 3, 1, 4)
    place = torch.arange(length, device=qkv.device)
    real = place < lengths[:, None]
    seen = real[:, None, :].expand(count, length, length)
    if mask == "both":
        seen = seen & real[:, :, None]
    if mask == "causal":
        seen = seen & (place[:, None] >= place)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen[:, None], -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~seen[:, None], 0.0)
    return (weights @ v).transpose(1, 2).reshape(count, length, columns // 3).to(qkv.dtype)


def pool_places(x: torch.Tensor, lengths: torch.Tensor, kind: str, impl: str | None = None) -> torch.Tensor:
    """Returns x [N, S, D] pooled over places, [N, D]; means are computed in float32.

    kind: the mean over all S places ("all"), the mean over the real places ("real"), or the last real place ("last").
    lengths [N]: number of real places, 1 to S.
    """
    check_shape("x", x, None, None, None)
    check_shape("lengths", lengths, x.shape[0])
    if kind not in POOLS:
        raise ValueError(f"pool {kind!r} is not one of {', '.join(POOLS)}")
    if should_use_triton(impl, x, lengths):
        from mlx_zip.cuda.kernels.triton.hyper_rows import launch_pool_places

        return launch_pool_places(x, lengths, kind)
    return reference_pool_places(x, lengths, kind)


def reference_pool_places(x: torch.Tensor, lengths: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns what `pool_places` returns, in plain PyTorch."""
    if kind == "last":
        return x[torch.arange(x.shape[0], device=x.device), lengths - 1]
    if kind == "all":
        return to_reference_dtype(x).mean(1).to(x.dtype)
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return (to_reference_dtype(x).masked_fill(~real[..., None], 0.0).sum(1) / lengths[:, None]).to(x.dtype)


# ---- tables of rows, and embeddings of ids


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
