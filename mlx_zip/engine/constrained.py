"""Chooses ids that constraints accept, on MLX; `mlx_zip.engine.searching` has the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.canonical import without
from mlx_zip.engine import searching
from mlx_zip.engine.job import Job


class Search(searching.Search):
    """The search for one row's next id in logits [1, W]. end: all columns from there on are -inf."""

    def __init__(self, job: Job, logits: mx.array, excluded: list[int], end: int | None) -> None:
        super().__init__(job, logits, excluded)
        self._end = end

    def score(self, open_: np.ndarray, excluded: list[int]) -> tuple[mx.array, mx.array]:
        logits = self.close(self.logits, open_)
        logits = without(logits, excluded) if excluded else logits
        logprobs = logits - mx.logsumexp(logits[:, : self._end], axis=-1, keepdims=True)
        return logits, self.job.draws.scores(logprobs).astype(mx.float32)

    def close(self, logits: mx.array, open_: np.ndarray) -> mx.array:
        return mx.where(mx.array(open_)[None], logits, -mx.inf)

    def on_host(self, scores: Any) -> np.ndarray:
        return np.array(scores[0])


def search(searches: Sequence[Search]) -> None:
    """Finds the ids of several rows. A row whose own work raises gets the exception as its job's `error`."""
    searching.search(searches, mx.eval)
