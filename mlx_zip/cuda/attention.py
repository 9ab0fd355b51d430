"""Attention of many queries over static caches, by PyTorch's own operation."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


class Seen:
    """Which keys the queries of one call see: the key of the own slot and earlier ones, within a layer's window.

    slots [B, L] int64: the slot of each query, -1 for padding, whose results mean nothing.
    """

    def __init__(self, slots: torch.Tensor, end: int | None = None) -> None:
        """end: the slot after the last one, given if all rows end there; else the host waits for the slots."""
        self.slots, self.is_in_order = slots, end is not None
        self.end = int(slots.max()) + 1 if end is None else end
        if end is None:
            last = torch.arange(self.end - slots.shape[1], self.end, device=slots.device)
            self.is_in_order = bool((slots == last).all())
        self.masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Returns which keys each query sees, [B, 1, L, end] bool; None if all keys up to its own in order.

        window: a query sees that many keys, its own among them; None for all.
        """
        window = None if window is None or window >= self.end else window
        if window is None and self.is_in_order:
            return None
        if window not in self.masks:
            self.masks[window] = seen_keys(self.slots, self.end, window)
        return self.masks[window]


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Seen, window: int | None) -> torch.Tensor:
    """Returns softmax(q k' / sqrt(E)) v [B, L, H, E] of q [B, L, H, E]; keys, values [B, K, S, E]."""
    mask, q = seen.mask(window), q.transpose(1, 2)
    keys, values = keys[:, :, : seen.end], values[:, :, : seen.end]
    if mask is None:
        order = causal_lower_right(q.shape[2], seen.end)
        return scaled_dot_product_attention(q, keys, values, attn_mask=order, enable_gqa=True).transpose(1, 2)
    # with a mask, PyTorch's fused operations want a key head for each query head
    keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask).transpose(1, 2)


def seen_keys(slots: torch.Tensor, end: int, window: int | None) -> torch.Tensor:
    """Returns which of `end` keys each query sees, [B, 1, L, end] bool. A query of padding sees the first key."""
    key, own = torch.arange(end, device=slots.device), slots.clamp(min=0)[:, None, :, None]
    seen = key <= own
    return seen if window is None else seen & (key > own - window)
