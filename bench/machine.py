"""Measures the machine while an engine runs: memory bandwidth, and energy where the machine has a counter."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from mlx_zip.device import BANDWIDTH_SIDE, on_gpu
from mlx_zip.device import bandwidth as measured

__all__ = ["BANDWIDTH_SIDE", "EnergyMeter", "bandwidth", "device", "used", "yardstick"]

RAPL = Path("/sys/class/powercap")
PRODUCTS = 8  # on a GPU: several hide the time of a launch


def bandwidth() -> float:
    """Measures how many bytes per second MLX's default device reads in matrix-vector products (`mlx_zip.device`)."""
    return measured(PRODUCTS if on_gpu() else 1, BANDWIDTH_SIDE)


def yardstick(library: str, side: int) -> str:
    """Returns the name of what measures the memory's bandwidth: products that only read. side: of the matrix."""
    return f"float32 matrix {side} x {side} times a vector, read only, by {library}"


def device() -> dict[str, Any]:
    """Returns MLX's device and its chip, and the numbers of threads that environment variables set."""
    import mlx.core as mx

    return {
        "device": str(mx.default_device()),
        "chip": str(mx.device_info(mx.default_device()).get("device_name", "unknown")),
        "threads": {n: os.environ[n] for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if n in os.environ},
    }


class EnergyMeter:
    """Reads the joules used so far from a Linux counter of the CPU package, if it may be read, else from an NVIDIA GPU.

    source: "package", "gpu", or None where there is no counter; on a Mac only the superuser can read one.
    """

    def __init__(self) -> None:
        self._counters = [path for path in sorted(RAPL.glob("intel-rapl:?")) if os.access(path / "energy_uj", os.R_OK)]
        self._gpu = None if self._counters else _gpu_energy()
        self.source = "package" if self._counters else "gpu" if self._gpu else None

    def read(self) -> float | None:
        """Returns the joules used since a fixed time in the past, None without a counter."""
        if self._counters:
            return sum(int((path / "energy_uj").read_text()) for path in self._counters) / 1e6
        return self._gpu() if self._gpu else None


def used(before: float | None, after: float | None) -> float | None:
    """Returns the joules between two readings; None if one of them is None or the counter restarted between them."""
    return None if before is None or after is None or after < before else after - before


def _gpu_energy() -> Any:
    """Returns a function that reads the first GPU's energy in joules; None without NVIDIA's library or a counter."""
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
