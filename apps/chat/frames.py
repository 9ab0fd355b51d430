"""What the page gets of an answer's deltas, and what the store keeps of them."""

from __future__ import annotations

from typing import Any

from mlx_zip.server.turn import Delta, Done, Learned, Live, Reasoning, Text, Waiting
from mlx_zip.server.vendor import live_json, token_json, vendor_notes


def frame_of(delta: Delta) -> dict[str, Any] | None:
    """Returns the frame of a delta, None if the page needs none."""
    match delta:
        case Waiting():
            names = ("read", "total", "cached_tokens", "waits_for")
            return {"type": "waiting", **{name: getattr(delta, name) for name in names}}
        case Live():
            return {"type": "figures", **live_json(delta.counts)}
        case Done():
            return {"type": "figures", **live_json(delta.counts), **vendor_notes(delta)}
        case Text():
            return {"type": "text", **piece_of(delta)}
        case Reasoning():
            return {"type": "reasoning", "text": delta.text}
        case Learned():
            return {"type": "learned", "entries": piece_of(delta)["learned"]}
    return None


def piece_of(delta: Delta) -> dict[str, Any]:
    """Returns what a delta adds to a message, as `Store.append` takes it."""
    match delta:
        case Text():
            return {"text": delta.text, "tokens": [token_json(token) for token in delta.tokens]}
        case Reasoning():
            return {"reasoning": delta.text}
        case Learned():
            return {"learned": [list(parts) for parts in delta.entries]}
    return {}
