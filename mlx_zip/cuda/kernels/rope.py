"""Rotary positions for queries and keys, and the write of keys and values to a static cache, in one pass."""

from __future__ import annotations

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, use_triton, wide


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    frequencies: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float = 1.0,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns rotated queries [B, L, H, E] and writes rotated keys and plain values into the caches, in place.

    qkv [B, L, (H + 2K) E]: queries, keys, values. positions, slots [B, L] int64: angle and cache place of each id.
    frequencies [R/2] float32: radians per position; the first R columns of a head turn (halves paired) and are
    multiplied by `scale`. keys, values [B, K, S, E]. A slot outside 0..S-1 is not written.
    """
    batch, length, columns = qkv.shape
    check_shape("qkv", qkv, None, None, None)
    check_shape("positions", positions, batch, length)
    check_shape("slots", slots, batch, length)
    check_shape("keys", keys, batch, None, None, None)
    check_shape("values", values, *keys.shape)
    width, heads = keys.shape[3], columns // keys.shape[3] - 2 * keys.shape[1]
    if columns % width or heads < 1:
        raise ValueError(f"qkv has {columns} columns, which hold no {keys.shape[1]} key heads of {width}")
    check_shape("frequencies", frequencies, None)
    if 2 * frequencies.shape[0] > width:
        raise ValueError(f"{frequencies.shape[0]} frequencies turn more than a head's {width} columns")
    if use_triton(impl, qkv, positions, slots, frequencies, keys, values):
        from mlx_zip.cuda.kernels.rope_triton import launch

        return launch(qkv, positions, slots, frequencies, keys, values, scale, heads)
    return reference(qkv, positions, slots, frequencies, keys, values, scale, heads)


def reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    frequencies: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    heads: int,
) -> torch.Tensor:
    """Returns and writes what `rope_and_cache` does, in plain PyTorch."""
    batch, length, _ = qkv.shape
    kv_heads, width = keys.shape[1], keys.shape[3]
    q, k, v = qkv.view(batch, length, -1, width).split([heads, kv_heads, kv_heads], dim=2)
    b, at = ((slots >= 0) & (slots < keys.shape[2])).nonzero(as_tuple=True)
    keys[b, :, slots[b, at]] = _turn(k, positions, frequencies, scale)[b, at].to(keys.dtype)
    values[b, :, slots[b, at]] = v[b, at].to(values.dtype)
    return _turn(q, positions, frequencies, scale)


def _turn(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
    half, exact = frequencies.shape[0], wide(x)
    angles = positions[..., None, None].to(exact.dtype) * frequencies.to(exact.dtype)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    first, second, rest = exact.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1).to(x.dtype)
