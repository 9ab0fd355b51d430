"""A step whose body runs before the host knows its ids, so that the device need not wait for the host.

What a step needs of its ids is their embedding, which the device looks up, and the entry that they install, whose row
only the head reads. A hypertoken that is read for the first time has no input row yet: then the body ran on a wrong
row, and runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from mlx_zip.models.zip_model import Model


class Ahead:
    """One step of B sequences. Until `logits`, the KV caches are one id ahead of the codebooks.

    hidden: the body's output [B, 1, D], for the loop to enqueue; None where the model must know the ids first. As a
    context manager it takes the step back when an exception leaves the block.
    """

    def __init__(self, model: Model, ids: mx.array, cache: Sequence[Any]) -> None:
        self.model, self.cache = model, cache
        self.kv, self.state = model.check_cache(cache)
        self.before = self.state.offset
        self.hidden = model.run_ahead(self.kv, self.state, ids)

    def logits(self, ids: np.ndarray) -> mx.array:
        """The step's logits [B, 1, W], once its ids [B, 1] are known. Errors are those of a call of the model."""
        if self.hidden is None:
            return self.model(mx.array(ids), cache=self.cache)
        return self.model.follow(self.hidden, self.kv, self.state, ids)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if kind is not None:
            self.model.forget(self.kv, self.state, self.before)
