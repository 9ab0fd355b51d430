"""How many steps per second the machine's memory allows: its measured bandwidth over the bytes that a step reads."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_zip.device import memory_speed
from mlx_zip.engine.interface import Ceiling
from mlx_zip.models.base_only import BaseOnly
from mlx_zip.models.step_bytes import step_bytes

LIMIT_S = 0.5  # no further trial of the bandwidth begins after it
_lock = threading.Lock()
_measured: dict[str, float] = {}  # device -> bytes per second, measured once in this process


def ceiling(model: Any) -> Ceiling:
    """Returns the ceiling of a model on this machine. The first call measures for up to a second."""
    if isinstance(model, BaseOnly):
        model = model.model
    read, found = step_bytes(dict(tree_flatten(model.parameters()))), measured_bandwidth()
    return Ceiling(found / read, found, read)


def measured_bandwidth() -> float:
    """Returns how many bytes per second MLX reaches; measured by the first call, in a thread of its own."""
    device = str(mx.default_device())
    with _lock:
        if device not in _measured:
            thread = threading.Thread(target=_measure, args=(device,), name="mlx_zip-bandwidth")
            thread.start()
            thread.join()
        return _measured[device]


def _measure(device: str) -> None:
    """Measures the bandwidth, and frees the thread's streams and the memory."""
    try:
        _measured[device] = memory_speed(LIMIT_S)
    finally:
        mx.clear_cache()
        mx.clear_streams()
