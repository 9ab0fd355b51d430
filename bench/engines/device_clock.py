"""Times work on a torch device: by CUDA events on a GPU, and by the host's clock on every device.

Also measures a device's read bandwidth and describes the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from mlx_zip.bench import machine
from mlx_zip.bench.recording import processor_name, summarize_samples
from mlx_zip.cuda.devices import measure_matvec_bandwidth

from .interface import Engine

CARD_SIDE = 16384  # side of the float32 matrix (1 GB, larger than any cache) with which a GPU's bandwidth is measured


@dataclass
class DeviceClock:
    """Measures the times between calls of `lap`. device_ms: times on the device. host_ms: times on the host.

    Both lists are complete after `stop`, after which further laps may follow. On a CPU, both hold the host's times.
    """

    device: torch.device
    device_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    _marks: list[Any] = field(default_factory=list)
    _host: list[float] = field(default_factory=list)

    def lap(self) -> None:
        """Ends one measured time and begins the next."""
        self._host.append(time.perf_counter())
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._marks.append(event)

    def stop(self) -> DeviceClock:
        """Waits for the device, and adds the times between the laps since the last stop."""
        self.host_ms += [1e3 * (b - a) for a, b in pairwise(self._host)]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.device_ms += [a.elapsed_time(b) for a, b in pairwise(self._marks)]
        else:
            self.device_ms = self.host_ms
        self._host, self._marks = [], []
        return self

    def record(self) -> dict[str, Any]:
        """Returns device and host times in ms, with medians and spread, and the name of the device's clock."""
        clock = "cuda events" if self.device.type == "cuda" else "host"
        return {
            "clock": clock,
            "device_ms": summarize_samples(self.device_ms),
            "host_ms": summarize_samples(self.host_ms),
        }


def time_calls_on_device(work: Callable[[int], object], device: torch.device, trials: int, warmup: int) -> DeviceClock:
    """Times `trials` calls of `work(trial)` in a row, after `warmup` calls that are not timed.

    The device is idle before the first timed call. On a GPU the calls are queued without waiting: a device time is the
    time between two CUDA events, a host time is the time to queue a call.
    """
    for trial in range(warmup):
        work(trial)
    wait_for_device(device)
    clock = DeviceClock(device)
    clock.lap()
    for trial in range(trials):
        work(trial)
        clock.lap()
    return clock.stop()


def wait_for_device(device: torch.device) -> None:
    """Waits until a device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth_matrix_side(device: torch.device) -> int:
    """Returns the side of the matrix with which a device's bandwidth is measured; a CPU's is as for MLX."""
    return CARD_SIDE if device.type == "cuda" else machine.BANDWIDTH_SIDE


def measure_read_bandwidth(device: torch.device) -> float:
    """Measures how many bytes per second matrix-vector products read on a device."""
    return measure_matvec_bandwidth(device, bandwidth_matrix_side(device))


def torch_yardstick(device: torch.device) -> str:
    """Returns the name of the measurement that `measure_read_bandwidth` makes."""
    return machine.yardstick_name("PyTorch", bandwidth_matrix_side(device))


def describe_torch_device(device: torch.device) -> dict[str, Any]:
    """Returns a description of a torch device for the records' section `device`."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    threads = {n: os.environ[n] for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if n in os.environ}
    return {"device": device.type, "chip": chip, "threads": threads}


class EngineOnTorch(Engine):
    """Base class of engines on PyTorch. torch_device: the device that the engine runs on."""

    torch_device: torch.device

    @property
    def device(self) -> dict[str, Any]:
        """See `Engine.device`."""
        return describe_torch_device(self.torch_device)

    @property
    def yardstick(self) -> str:
        """See `Engine.yardstick`."""
        return torch_yardstick(self.torch_device)

    def bandwidth(self) -> float:
        """See `Engine.bandwidth`."""
        return measure_read_bandwidth(self.torch_device)
