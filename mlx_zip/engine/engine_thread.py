"""`MlxEngine`: serves requests with MLX. One thread of its own loads the model and does everything with it.

MLX's streams belong to threads, so no array ever leaves the engine's thread: other threads give and get Python data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_zip.device import WiredMemory
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
LARGEST = 0.9  # share of the wired memory from which on a model is called too large for it, as in mlx-lm
log = logging.getLogger(__name__)


class MlxEngine(ThreadedEngine):
    """An engine on MLX. load: returns model and tokenizer. make_store: see `open_engine`."""

    _wired: WiredMemory | None = None  # made in the engine's thread, which computes

    def _served(self, load: Load, name: str) -> Served:
        model, self.tokenizer = load()
        streams = [generation_stream, mx.default_stream(mx.default_device())]
        self._wired = WiredMemory(self._options.keep_wired_s, streams)
        self._wired.hold()
        served = Served(model, self.tokenizer, name, self._options.run)
        _warn_if_large(name, served.weight_bytes)
        return served

    def _reading(self, served: Served, job: Job) -> Reading:
        return Reading(served, job)

    def _scores(self, served: Served, row: Compressed, top: int) -> Iterator[Scored]:
        self._wake()
        return score_in_parts(served.model, row, top, self._options.run.prefill_step_size)

    def _kv_bound(self, served: Any) -> int | None:
        return _memory_bound() if self._options.max_kv_bytes is None else self._options.max_kv_bytes

    def _memory(self) -> dict[str, int]:
        return {"memory_bytes": mx.get_active_memory(), "peak_memory_bytes": mx.get_peak_memory()}

    def _wake(self) -> None:
        if self._wired is not None:
            self._wired.hold()

    def _rest(self) -> float | None:
        return None if self._wired is None else self._wired.rest()

    def unwire(self) -> bool:
        return self._inbox.ask(self._unwire)

    def _unwire(self) -> bool:
        """Does what `unwire` does, in the engine's thread."""
        if self._scheduler.busy or self._wired is None:
            return False
        self._wired.free()
        return True

    def _left(self) -> None:
        if self._wired is not None:
            self._wired.free()
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


def _warn_if_large(name: str, weight_bytes: int) -> None:
    """Logs a warning for a model that hardly fits into the memory that a Mac can keep wired."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if isinstance(limit, int) and weight_bytes > LARGEST * limit:
        log.warning(
            "%s takes %d MB of the %d MB that this Mac can keep ready for its GPU: it may be slow",
            name,
            weight_bytes >> 20,
            limit >> 20,
        )


def _memory_bound() -> int | None:
    """Returns half of the memory that MLX computes in, None where MLX does not know its size."""
    size = mx.device_info().get("memory_size")
    return None if size is None else int(size) // 2
