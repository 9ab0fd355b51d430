"""The field `mlx_zip` of answers: figures that other servers have no field for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_zip.engine import Counts


def vendor_figures(counts: Counts) -> dict[str, Any]:
    """Returns the figures of one answer, as JSON. Steps and ids are what the model computed; times are seconds."""
    names = ("steps", "hypertokens", "prompt_ids", "entries", "codebook_size", "kv_bytes_saved")
    times = ("queued_s", "first_id_s", "total_s")
    per_step = {"base_tokens_per_step": round(counts.base_tokens / counts.steps, 3) if counts.steps else 0.0}
    figures = {name: getattr(counts, name) for name in names}
    return figures | per_step | {name: round(getattr(counts, name), 6) for name in times}


def summed(counts: Sequence[Counts]) -> Counts:
    """Returns the figures of several answers together: sums, but the largest of times and codebooks."""
    added = ("prompt_tokens", "cached_tokens", "prompt_ids", "base_tokens", "steps", "hypertokens", "kv_bytes_saved")
    largest = ("entries", "codebook_size", "queued_s", "first_id_s", "total_s")
    sums = {name: sum(getattr(one, name) for one in counts) for name in added}
    return replace(Counts(), **sums, **{name: max(getattr(one, name) for one in counts) for name in largest})
