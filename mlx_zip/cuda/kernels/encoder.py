"""Pieces of the hyper-encoders for entries of at most 16 base ids: input rows, attention, pooling.

The caller does the large matrix products between these pieces. Shapes: N entries, S places, D width.
"""

from __future__ import annotations

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
        from mlx_zip.cuda.kernels.triton.encoder import launch_embed_entries

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
        from mlx_zip.cuda.kernels.triton.encoder import launch_attend_in_entries

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
        from mlx_zip.cuda.kernels.triton.encoder import launch_pool_places

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
