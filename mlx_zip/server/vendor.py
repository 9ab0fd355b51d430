"""The field `mlx_zip` of answers: figures that other servers have no field for."""

from __future__ import annotations

from typing import Any

from mlx_zip.engine import Counts


def vendor_figures(counts: Counts) -> dict[str, Any]:
    """Returns the figures of one answer, as JSON. Steps and ids are what the model computed; times are seconds."""
    names = ("steps", "hypertokens", "prompt_ids", "entries", "codebook_size", "kv_bytes_saved")
    times = ("queued_s", "first_id_s", "total_s")
    return {name: getattr(counts, name) for name in names} | {name: round(getattr(counts, name), 6) for name in times}
