"""A layer's attention: rotates queries and keys, writes keys and values to a KV cache, and attends to the keys there.

KV caches have a fixed size, with the number of keys per sequence on the device. The Triton kernel of attention, of one
query per sequence, divides the keys of a sequence among programs, in `attention_part_count` parts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton, to_reference_dtype
from mlx_zip.cuda.kernels.products import normalize_rms

KEYS = 64  # keys per iteration of a program; also the minimum size of a part
PROGRAMS = 1024  # maximum pairs times parts, unless the pairs alone are more: several per multiprocessor of a large GPU
MOST_PARTS = 64  # per sequence and key head


class Rotation(NamedTuple):
    """How queries and keys are normed and rotated.

    frequencies [N, R/2] float32: N sets of frequencies, in radians per position. The first R columns of a head are
    rotated (column i with column i + R/2) and multiplied by `scale`. frequency_set [B] int64: index of each sequence's
    set, None for the first set. q_norm, k_norm: weights [E] of an RMS norm, with `eps`, of each head before the
    rotation; give both or neither.
    """

    frequencies: torch.Tensor
    scale: float = 1.0
    frequency_set: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns rotated queries [B, L, H, E] and writes rotated keys and unrotated values into the caches, in place.

    qkv [B, L, (H + 2K) E]: queries, keys, values. positions [B, L] int64: position of each id, for the rotation. slots
    [B, L] int64: place of each id in keys, values [B, K, S, E]. A slot outside 0..S-1 is not written. A `frequency_set`
    outside 0..N-1 gives NaN.
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
    parts = _check_rotation(rotation, batch, width)
    if should_use_triton(impl, qkv, positions, slots, keys, values, *parts):
        from mlx_zip.cuda.kernels.triton.attention import launch_rope_and_cache

        return launch_rope_and_cache(qkv, positions, slots, keys, values, heads, *rotation)
    return reference_rope_and_cache(qkv, positions, slots, rotation, keys, values, heads)


def _check_rotation(rotation: Rotation, batch: int, width: int) -> list[torch.Tensor]:
    frequencies, _, frequency_set, q_norm, k_norm, _ = rotation
    check_shape("frequencies", frequencies, None, None)
    if not frequencies.shape[0] or 2 * frequencies.shape[1] > width:
        raise ValueError(f"frequencies {list(frequencies.shape)} rotate no head of {width} columns")
    if frequency_set is not None:
        check_shape("frequency_set", frequency_set, batch)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm belong together")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_shape(name, norm, width)
    return [part for part in (frequencies, frequency_set, q_norm, k_norm) if part is not None]


def reference_rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Returns and writes what `rope_and_cache` does, in plain PyTorch; float64 inputs give float64 results."""
    batch, length, _ = qkv.shape
    kv_heads, width = keys.shape[1], keys.shape[3]
    q, k, v = qkv.view(batch, length, heads + 2 * kv_heads, width).split([heads, kv_heads, kv_heads], dim=2)
    b, at = ((slots >= 0) & (slots < keys.shape[2])).nonzero(as_tuple=True)
    rotated = _rotate(_normalize_heads(k, rotation.k_norm, rotation.eps), positions, rotation).to(keys.dtype)
    keys[b, :, slots[b, at]] = rotated[b, at]
    values[b, :, slots[b, at]] = v[b, at].to(values.dtype)
    return _rotate(_normalize_heads(q, rotation.q_norm, rotation.eps), positions, rotation).to(qkv.dtype)


def _normalize_heads(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Returns the RMS norm of each head, x itself if `weight` is None; in the dtype of `to_reference_dtype`."""
    exact = to_reference_dtype(x)
    return exact if weight is None else normalize_rms(exact, eps) * weight.to(exact.dtype)


def _rotate(x: torch.Tensor, positions: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    rates = _frequencies_of_sequences(rotation, x)
    half = rates.shape[-1]
    angles = positions[..., None, None].to(x.dtype) * rates
    cos, sin = angles.cos() * rotation.scale, angles.sin() * rotation.scale
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1)


def _frequencies_of_sequences(rotation: Rotation, x: torch.Tensor) -> torch.Tensor:
    """Returns the frequencies of each sequence [B or 1, 1, 1, R/2] in x's dtype."""
    frequencies, frequency_set = rotation.frequencies.to(x.dtype), rotation.frequency_set
    if frequency_set is None:
        return frequencies[None, None, :1]
    known = (frequency_set >= 0) & (frequency_set < len(frequencies))
    chosen = torch.where(known[:, None], frequencies[torch.where(known, frequency_set, 0)], torch.nan)
    return chosen[:, None, None]


# ---- one query per sequence


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns softmax(scale q k') v [B, H, E] in q's dtype; sums are float32.

    q [B, H, E], H a multiple of K; keys, values [B, K, S, E]; lengths [B] int64: number of keys of each sequence, the
    newest included, clamped to 0..S. The result is 0 for a sequence without keys. window: only the last `window` keys
    are seen, None for all. scale: None for 1 / sqrt(E). Nothing is read on the host, and launches depend on shapes
    alone.
    """
    check_shape("q", q, None, None, None)
    check_shape("keys", keys, q.shape[0], None, None, q.shape[2])
    check_shape("values", values, *keys.shape)
    check_shape("lengths", lengths, q.shape[0])
    if keys.shape[1] < 1 or q.shape[1] % keys.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {keys.shape[1]} key heads")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is not 1 or more")
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2])
    window = window or keys.shape[2]
    if should_use_triton(impl, q, keys, values, lengths):
        from mlx_zip.cuda.kernels.triton.attention import launch_decode_attention

        parts = attention_part_count(keys.shape[0] * keys.shape[1], min(keys.shape[2], window))
        return launch_decode_attention(q, keys, values, lengths, window, scale, parts, KEYS)
    return reference_decode_attention(q, keys, values, lengths, window, scale)


def attention_part_count(pairs: int, keys: int) -> int:
    """Returns how many parts each pair's keys are divided into. pairs: sequences times key heads. keys: per pair."""
    return max(1, min(-(-keys // KEYS), PROGRAMS // max(1, pairs), MOST_PARTS))


def reference_decode_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """Returns what `decode_attention` returns, in plain PyTorch; float64 inputs give float64 results."""
    batch, heads, width = q.shape
    places = keys.shape[2]
    grouped = to_reference_dtype(q).view(batch, keys.shape[1], heads // keys.shape[1], width)
    place, end = torch.arange(places, device=q.device), lengths.clamp(0, places)[:, None]
    seen = (place < end) & (place >= end - window)
    k, v = (to_reference_dtype(part).masked_fill(~seen[:, None, :, None], 0.0) for part in (keys, values))
    scores = (grouped @ k.mT * scale).masked_fill(~seen[:, None, None], -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~seen[:, None, None], 0.0)
    return (weights @ v).view(batch, heads, width).to(q.dtype)
