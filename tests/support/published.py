"""The published package as an oracle: its tolerances and its greedy loop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.converters import convert
from support import upstream
from support.upstream import Checkpoint

ROWS_TOLERANCE, LOGITS_TOLERANCE = 2e-5, 2e-4

STEPS = 24

LEAST_MARGIN = 1e-3

NARROW = {"hidden_size": 32, "model_hidden_size": 64}

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.01, 1.02, 1.02, 1.03, 1.03, 1.05, 1.05],
        "long_factor": [1.0, 1.2, 1.9, 4.0, 9.5, 24.0, 48.0, 64.0],
    },
    "original_max_position_embeddings": 256,
}


def load(folder: Path, made: Checkpoint) -> Any:
    """Converts and loads a checkpoint; the warning that meta.pt overrides the config is expected."""
    from mlx_lm import load as mlx_lm_load

    with pytest.warns(UserWarning, match=r"meta\.pt") if made.meta is not None else nullcontext():
        convert(str(folder), str(folder / "converted"), progress=False)
    return mlx_lm_load(str(folder / "converted"))[0]


def greedy(model: Any, made: Checkpoint, ids: np.ndarray, padding: list[int]) -> np.ndarray:
    """Greedy ids [B, STEPS] of our model, with the columns masked that upstream masks."""
    cache, taken = model.make_cache(left_padding=padding), []
    for _ in range(STEPS):
        logits = np.array(model(mx.array(ids), cache=cache)[:, -1])
        ids = upstream.bar(logits, made).argmax(-1)[:, None]
        taken.append(ids)
    return np.concatenate(taken, axis=1)


def worst(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference where both are finite; infinite if -inf is not at the same places in both."""
    if got.shape != want.shape or not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return float("inf")
    finite = np.isfinite(got)
    return float(np.abs(got[finite] - want[finite]).max(initial=0.0))
