"""Measures the machine that an engine runs on: memory bandwidth, energy (if it has a counter), power and thermal state.

Bandwidth is measured by matrix-vector products, which only read, as a decoding step nearly does; a copy also writes and
gives another figure. MLX's products do not reach a CPU's bandwidth, so if PyTorch measures the same chip in a run, the
higher figure counts for all engines.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from mlx_zip.device import BANDWIDTH_SIDE, default_device_is_gpu
from mlx_zip.device import measure_product_bandwidth as measured

from .recording import command_output

__all__ = [
    "BANDWIDTH_SIDE",
    "EnergyMeter",
    "describe_mlx_device",
    "joules_between",
    "mlx_read_bandwidth",
    "yardstick_name",
]

RAPL = Path("/sys/class/powercap")
PRODUCTS = 8  # products per call on a GPU: several hide the launch time


def mlx_read_bandwidth() -> float:
    """Measures how many bytes per second matrix-vector products read on MLX's default device."""
    return measured(PRODUCTS if default_device_is_gpu() else 1, BANDWIDTH_SIDE)


def yardstick_name(library: str, side: int) -> str:
    """Returns the name of the bandwidth measurement, for the records. side: side of the square matrix."""
    return f"float32 matrix {side} x {side} times a vector, read only, by {library}"


def describe_mlx_device() -> dict[str, Any]:
    """Returns MLX's device, its chip, and the thread counts set by environment variables."""
    import mlx.core as mx

    return {
        "device": str(mx.default_device()),
        "chip": str(mx.device_info(mx.default_device()).get("device_name", "unknown")),
        "threads": {n: os.environ[n] for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if n in os.environ},
    }


class EnergyMeter:
    """Reads the joules used so far: from Linux's counter of the CPU package if it is readable, else from an NVIDIA GPU.

    source: "package", "gpu", or None without a readable counter; on a Mac only the superuser can read one.
    """

    def __init__(self) -> None:
        self._counters = [path for path in sorted(RAPL.glob("intel-rapl:?")) if os.access(path / "energy_uj", os.R_OK)]
        self._gpu = None if self._counters else gpu_energy_reader()
        self.source = "package" if self._counters else "gpu" if self._gpu else None

    def read(self) -> float | None:
        """Returns the joules used since a fixed time in the past; None if no counter can be read."""
        if self._counters:
            return sum(int((path / "energy_uj").read_text()) for path in self._counters) / 1e6
        return self._gpu() if self._gpu else None


def joules_between(before: float | None, after: float | None) -> float | None:
    """Returns the joules between two readings; None if a reading is None or the counter restarted between them."""
    return None if before is None or after is None or after < before else after - before


def gpu_energy_reader() -> Any:
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


# ---- power and heat, as the system reports them: a hot or power-saving machine is slower

MAC = {  # name of a figure: (command, pattern of the lines to keep)
    "thermal": (("pmset", "-g", "therm"), r"."),
    "power": (("pmset", "-g", "batt"), r"."),
    "low power mode": (("pmset", "-g"), r"powermode"),
    "chip": (("sysctl", "-n", "machdep.cpu.brand_string"), r"."),
    "memory bytes": (("sysctl", "-n", "hw.memsize"), r"."),
    "gpu": (("system_profiler", "-detailLevel", "mini", "SPDisplaysDataType"), r"Chipset|Cores|Metal"),
}
LINUX = {  # name of a figure: files with one value each
    "thermal": "sys/class/thermal/thermal_zone*/temp",
    "power": "sys/class/power_supply/*/status",
    "governor": "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "load": "proc/loadavg",
}
METAL = "mlx-metal"  # the package with MLX's kernels for Macs; each macOS may have a wheel of its own

CARD = (  # fields that nvidia-smi is queried for
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.draw", "power.limit", "temperature.gpu", "pstate"),
)
REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")  # field prefixes of newer and older drivers
HELD_BACK = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
_BATTERY = re.compile(r"\s*\(id=\d+\)")  # identifies the battery; removed from reports


def power_and_thermal_state(root: Path = Path("/")) -> dict[str, str]:
    """Returns texts about power, heat, chip and memory, by name; omits what the system does not report.

    root: the root folder of Linux's /proc and /sys.
    """
    if sys.platform == "darwin":
        found = {name: matching_output_lines(command, kept) for name, (command, kept) in MAC.items()}
    else:
        found = {name: read_matching_files(root, pattern) for name, pattern in LINUX.items()}
    found["metal wheel"] = metal_wheel_version()
    found["processors"] = str(os.cpu_count())
    return {name: text for name, text in found.items() if text}


def metal_wheel_version() -> str:
    """Returns version and platform tags of the wheel with MLX's kernels for Macs, "" if it is not installed.

    Only kernels built for macOS 26 use the neural accelerators of an M5.
    """
    try:
        found = distribution(METAL)
    except PackageNotFoundError:
        return ""
    tags = re.findall(r"^Tag: (\S+)", found.read_text("WHEEL") or "", re.MULTILINE)
    return " ".join([found.version, *(tag.rpartition("-")[2] for tag in tags)])


def card_state() -> dict[str, str]:
    """Returns the NVIDIA GPU's clocks, power and temperature (keys `CARD`, with units), and what limits its clocks.

    Each limit in `HELD_BACK` is "Active" or "Not Active". Returns {} if nvidia-smi is missing or CUDA_VISIBLE_DEVICES
    hides all GPUs.
    """
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    for reasons in REASONS if card else ():
        fields = ",".join([*CARD, *(f"{reasons}.{name}" for name in HELD_BACK)])
        said = matching_output_lines(("nvidia-smi", "-i", card, f"--query-gpu={fields}", "--format=csv,noheader"), r".")
        values = [value.strip() for value in said.split(",")]
        if len(values) == len(CARD) + len(HELD_BACK):
            return dict(zip((*CARD, *HELD_BACK), values, strict=True))
    return {}


def active_clock_limits(state: dict[str, str]) -> list[str]:
    """Returns the causes in `HELD_BACK` that are active. state: from `card_state`."""
    return [name for name in HELD_BACK if state.get(name) == "Active"]


def matching_output_lines(command: tuple[str, ...], kept: str) -> str:
    found = command_output(*command) or ""
    lines = (" ".join(_BATTERY.sub("", line).split()) for line in found.splitlines())
    return "; ".join(line for line in lines if line and re.search(kept, line))


def read_matching_files(root: Path, pattern: str) -> str:
    found = []
    for file in sorted(root.glob(pattern)):
        try:
            found.append(file.read_text(encoding="utf-8", errors="replace").strip())
        except OSError:  # some sensors cannot be read while suspended
            continue
    return "; ".join(value for value in found if value)
