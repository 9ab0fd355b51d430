"""`MlxEngine`: serves requests with MLX. One thread of its own loads the model and does everything with it.

MLX's streams belong to threads, so no array ever leaves the engine's thread: other threads give and get Python data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from mlx_zip.engine.ceiling import ceiling
from mlx_zip.engine.interface import Ceiling, Engine
from mlx_zip.engine.job import Job
from mlx_zip.engine.options import ServeOptions
from mlx_zip.engine.prompts import Reading
from mlx_zip.engine.served import Served
from mlx_zip.engine.threaded import Load, MakeStore, ThreadedEngine
from mlx_zip.evaluation.scored import Compressed, Scored
from mlx_zip.evaluation.scoring import score_in_parts
from mlx_zip.models.base_only import BaseOnly

__all__ = ["Load", "MakeStore", "MlxEngine", "ServeOptions"]


class MlxEngine(ThreadedEngine):
    """An engine on MLX. load: returns model and tokenizer. make_store: see `open_engine`."""

    def _served(self, load: Load, name: str) -> Served:
        model, self.tokenizer = load()
        return Served(model, self.tokenizer, name, self._options.run)

    def _reading(self, served: Served, job: Job) -> Reading:
        return Reading(served, job)

    def _scores(self, served: Served, row: Compressed, top: int) -> Iterator[Scored]:
        return score_in_parts(served.model, row, top, self._options.run.prefill_step_size)

    def _kv_bound(self, served: Any) -> int | None:
        return _memory_bound() if self._options.max_kv_bytes is None else self._options.max_kv_bytes

    def _memory(self) -> dict[str, int]:
        return {"memory_bytes": mx.get_active_memory(), "peak_memory_bytes": mx.get_peak_memory()}

    def _wired(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the model is kept in wired memory on a Mac, as mlx-lm does."""
        streams: Any = [generation_stream, mx.default_stream(mx.default_device())]
        return wired_limit(self._scheduler.served.model, streams)

    def _left(self) -> None:
        mx.clear_streams()

    def without_hypertokens(self, name: str) -> Engine:
        served, options = self._inbox.ask(lambda: self._scheduler.served), self._options
        if not served.hyper or served.machines is not None:
            return super().without_hypertokens(name)
        plain = BaseOnly(served.model)
        return MlxEngine(lambda: (plain, self.tokenizer), name, options)

    def ceiling(self) -> Ceiling | None:
        served = self._inbox.ask(lambda: self._scheduler.served)
        return ceiling(served.model) if served.machines is None else None


def _memory_bound() -> int | None:
    """Returns half of the memory that MLX computes in, None where MLX does not know its size."""
    size = mx.device_info().get("memory_size")
    return None if size is None else int(size) // 2
