"""What the machine gives while an engine runs: memory bandwidth, measured now, and energy where a counter says."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

BANDWIDTH_SIDE = 8192  # of the float32 matrix that is read, 256 MB; well above any cache
BANDWIDTH_TRIALS = 5
RAPL = Path("/sys/class/powercap")


def bandwidth() -> float:
    """Bytes per second that MLX's default device reads now: the best of some matrix-vector products, which is what
    decoding is.
    """
    matrix, vector = mx.ones((BANDWIDTH_SIDE, BANDWIDTH_SIDE)), mx.ones((BANDWIDTH_SIDE, 1))
    mx.eval(matrix, vector)
    return matrix.nbytes / fastest(lambda: mx.eval(matrix @ vector))


def fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of `BANDWIDTH_TRIALS` calls, after one warm-up call."""
    call()
    return min(_seconds(call) for _ in range(BANDWIDTH_TRIALS))


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def device() -> dict[str, Any]:
    """What MLX runs on, and the numbers of threads that the environment asks for."""
    return {
        "device": str(mx.default_device()),
        "chip": str(mx.device_info(mx.default_device()).get("device_name", "unknown")),
        "threads": {n: os.environ[n] for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if n in os.environ},
    }


class EnergyMeter:
    """Joules that the machine says it has used: a Linux package counter that may be read, or an NVIDIA GPU's own.

    `read()` is a running total, or None where the machine does not tell (a Mac does to the superuser alone).
    """

    def __init__(self) -> None:
        self._counters = [path for path in sorted(RAPL.glob("intel-rapl:?")) if os.access(path / "energy_uj", os.R_OK)]
        self._gpu = None if self._counters else _nvidia()
        self.source = "package" if self._counters else "gpu" if self._gpu else None

    def read(self) -> float | None:
        """Joules since some point in the past."""
        if self._counters:
            return sum(int((path / "energy_uj").read_text()) for path in self._counters) / 1e6
        return self._gpu() if self._gpu else None


def used(before: float | None, after: float | None) -> float | None:
    """Joules between two readings; None where there are none, or where the counter began anew."""
    return None if before is None or after is None or after < before else after - before


def _nvidia() -> Any:
    """A function that reads the first GPU's energy in joules, or None where there is no such library or counter."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None

    def joules() -> float | None:
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
        return None if failed else energy.value / 1e3

    return joules if joules() is not None else None
