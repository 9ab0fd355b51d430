"""Attention of one query per sequence over KV caches of fixed size, with the number of keys per sequence on the device.

The Triton kernel divides the keys of a sequence among programs, in `attention_part_count` parts.
"""

from __future__ import annotations

import math

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton, to_reference_dtype

KEYS = 64  # keys per iteration of a program; also the minimum size of a part
PROGRAMS = 1024  # maximum pairs times parts, unless the pairs alone are more: several per multiprocessor of a large GPU
MOST_PARTS = 64  # per sequence and key head


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
