"""How many steps per second a device's memory allows: its measured bandwidth over the bytes that a step reads."""

from __future__ import annotations

import math
import time
from dataclasses import fields
from typing import Any

import torch

from mlx_zip.cuda.cpu_products import Half
from mlx_zip.cuda.kernel_bytes import bytes_of
from mlx_zip.cuda.linear import Linear
from mlx_zip.cuda.memory import free_bytes
from mlx_zip.cuda.model import CudaModel
from mlx_zip.engine.interface import Ceiling

COPIED, ON_CPU = 256 << 20, 64 << 20  # bytes of the array that is copied on a card, and on a CPU
COPIES = 12
LIMIT_S = 0.5  # no further copy begins after it
_measured: dict[torch.device, float] = {}  # bytes per second, measured once in this process


def ceiling(model: CudaModel) -> Ceiling | None:
    """Returns the ceiling of a model on its device, None if there is no memory to measure the bandwidth with.

    Call it in the engine's thread. The first call measures for up to a second.
    """
    device, read = model.device, step_weight_bytes(model)
    if device not in _measured:
        free = free_bytes(device)
        if free is not None and free < 2 * COPIED:
            return None
        _measured[device] = copy_speed(device, COPIED if device.type == "cuda" else ON_CPU, LIMIT_S)
    return Ceiling(_measured[device] / read, _measured[device], read)


def step_weight_bytes(model: CudaModel) -> int:
    """Returns the bytes of weights that a step reads: layers, norms and the head."""
    values: list[Any] = [model.matrix if model.scores is None else model.scores, model.decoder.norm]
    for layer in model.decoder.layers:
        values += [getattr(layer, each.name) for each in fields(layer)]
    linear = [one for one in values if isinstance(one, Linear)]
    half = sum(one.weight.nbytes for one in linear if isinstance(one.weight, Half))
    return half + bytes_of([*values, *((one.weight, one.bias) for one in linear)])


def copy_speed(device: torch.device, size: int, limit_s: float = math.inf) -> float:
    """Measures the bytes per second that a copy of `size` bytes within a device's memory reads and writes.

    The fastest of `COPIES` copies counts; no further one begins after limit_s seconds.
    """
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target, best, ends = torch.empty_like(source), math.inf, time.perf_counter() + limit_s
    for _ in range(COPIES):
        if time.perf_counter() >= ends and best < math.inf:
            break
        best = min(best, _copy_s(target, source))
    return 2 * size / best


def _copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Copies a tensor, and returns the seconds by the clock of a card, which the host's launch and wait do not add to.

    Waits for this copy only: a wait for the whole card would break graphs that other threads capture.
    """
    if target.device.type != "cuda":
        begun = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begun
    stream = torch.cuda.current_stream(target.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    target.copy_(source)
    end.record(stream)
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)
