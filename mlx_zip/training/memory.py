"""Memory of a training run: wired on a Mac, and given back after every step, as in mlx-lm's trainer.

Source: mlx-lm 0.32, `mlx_lm.tuner.trainer` (`train`, `_clear_cache` with its default threshold of 0 bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


@contextmanager
def wired_memory() -> Iterator[None]:
    """Keeps up to the recommended number of bytes in the GPU's memory while the block runs.

    macOS may otherwise page weights out between two steps. Does nothing on a device that recommends no number.
    """
    limit = mx.device_info().get("max_recommended_working_set_size")
    if not isinstance(limit, int):
        yield
        return
    before = mx.set_wired_limit(limit)
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_wired_limit(before)


def give_back() -> None:
    """Gives memory that MLX keeps for reuse back to the system: batches differ in shape, so little of it is reused."""
    if mx.get_cache_memory() > 0:
        mx.clear_cache()
