"""Attention of many queries over static caches, by PyTorch's own operation."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, end: int, window: int | None
) -> torch.Tensor:
    """Returns softmax(q k' / sqrt(E)) v [B, L, H, E]; a query sees the keys of its own slot and of earlier ones.

    q [B, L, H, E]; keys, values [B, K, S, E]; slots [B, L] int64, -1 for padding, whose result means nothing. end: one
    more than the highest slot. window: a query sees that many keys, its own among them; None for all.
    """
    mask = None if window is None and _in_order(slots, end) else _mask(slots, end, window)
    if mask is None:
        mask = causal_lower_right(q.shape[1], end)
    seen = keys[:, :, :end], values[:, :, :end]
    return scaled_dot_product_attention(q.transpose(1, 2), *seen, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Returns softmax(q k' / sqrt(E)) v [B, H, E] of one query per sequence, the last of its keys.

    q [B, H, E]; keys, values [B, K, S, E]; lengths [B] int64: keys of each sequence, with its own. window:
    as in `attend`. Nothing is read on the host.
    """
    mask = _mask(lengths[:, None] - 1, keys.shape[2], window)
    return scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]


def _in_order(slots: torch.Tensor, end: int) -> bool:
    """Returns whether each row's last queries are those of the slots up to `end`."""
    last = torch.arange(end - slots.shape[1], end, device=slots.device)
    return bool((slots == last).all())


def _mask(slots: torch.Tensor, end: int, window: int | None) -> torch.Tensor:
    """Returns which keys each query sees, [B, 1, L, end] bool. A query of padding sees the first key."""
    key, own = torch.arange(end, device=slots.device), slots.clamp(min=0)[:, None, :, None]
    seen = key <= own
    return seen if window is None else seen & (key > own - window)
