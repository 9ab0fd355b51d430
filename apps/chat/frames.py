"""What the page gets of an answer's deltas."""

from __future__ import annotations

from typing import Any

from mlx_zip.engine import Counts
from mlx_zip.server.turn import Delta, Reasoning, Text, Waiting


def frame_of(delta: Delta) -> dict[str, Any] | None:
    """Returns the frame of a delta, None if the page needs none."""
    if isinstance(delta, Waiting):
        return {"type": "waiting", "read": delta.read, "total": delta.total, "cached_tokens": delta.cached_tokens}
    if isinstance(delta, Text):
        return {"type": "text", "text": delta.text, "tokens": []}
    if isinstance(delta, Reasoning):
        return {"type": "reasoning", "text": delta.text}
    return None


def part_of(delta: Delta) -> dict[str, Any]:
    """Returns what a delta adds to a message, as `Store.append` takes it."""
    if isinstance(delta, Text):
        return {"text": delta.text}
    return {"reasoning": delta.text} if isinstance(delta, Reasoning) else {}


def figures_of(counts: Counts) -> dict[str, Any]:
    """Returns the figures of an answer, for the live line."""
    names = ("base_tokens", "steps", "hypertokens", "entries", "codebook_size", "kv_bytes_saved")
    writing_s = counts.total_s - counts.first_id_s if counts.first_id_s else counts.total_s
    return {
        **{name: getattr(counts, name) for name in names},
        "base_tokens_per_step": round(counts.base_tokens / counts.steps, 3) if counts.steps else 0.0,
        "seconds": round(counts.total_s, 4),
        "base_tokens_per_s": round(counts.base_tokens / writing_s, 1) if writing_s > 0 else 0.0,
    }
