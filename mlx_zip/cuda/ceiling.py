"""How many steps per second a device's memory allows: its measured bandwidth over the bytes that a step reads."""

from __future__ import annotations

import math
import time
from dataclasses import fields
from typing import Any

import torch

from mlx_zip.cuda.memory import bytes_of, free_bytes
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.network.linear import Half, Linear
from mlx_zip.device import BANDWIDTH_SIDE
from mlx_zip.engine.interface import Ceiling

PRODUCTS = 8  # of a trial on a card: several hide the time of a launch
TRIALS = 6
LIMIT_S = 0.5  # no further trial begins after it
_measured: dict[torch.device, float] = {}  # bytes per second, measured once in this process


def ceiling(model: CudaModel) -> Ceiling | None:
    """Returns the ceiling of a model on its device, None if there is no memory to measure the bandwidth with.

    Call it in the engine's thread. The first call measures for up to a second.
    """
    device, read = model.device, step_weight_bytes(model)
    if device not in _measured:
        free = free_bytes(device)
        if free is not None and free < 4 * BANDWIDTH_SIDE**2:
            return None
        _measured[device] = read_speed(device, BANDWIDTH_SIDE, LIMIT_S)
    return Ceiling(_measured[device] / read, _measured[device], read)


def step_weight_bytes(model: CudaModel) -> int:
    """Returns the bytes of weights that a step reads: layers, norms and the head."""
    values: list[Any] = [model.matrix if model.scores is None else model.scores, model.decoder.norm]
    for layer in model.decoder.layers:
        values += [getattr(layer, each.name) for each in fields(layer)]
    linear = [one for one in values if isinstance(one, Linear)]
    half = sum(one.weight.nbytes for one in linear if isinstance(one.weight, Half))
    return half + bytes_of([*values, *((one.weight, one.bias) for one in linear)])


def read_speed(device: torch.device, side: int, limit_s: float = math.inf) -> float:
    """Measures the bytes per second that a device reads in matrix-vector products, as `mlx_zip.device.bandwidth` does.

    side: of the float32 matrix that is read; little else is read, and next to nothing is written. The fastest of
    `TRIALS` trials counts, after one that warms up; no further one begins after limit_s seconds.
    """
    ends = time.perf_counter() + limit_s
    matrix = torch.rand((side, side), device=device)
    products, best = PRODUCTS if device.type == "cuda" else 1, math.inf
    _products_s(matrix, 1)
    for _ in range(TRIALS):
        if time.perf_counter() >= ends and best < math.inf:
            break
        best = min(best, _products_s(matrix, products) / products)
    return matrix.nbytes / best


def _products_s(matrix: torch.Tensor, count: int) -> float:
    """Multiplies a matrix with its first row `count` times, and returns the seconds by the clock of a card.

    The host's first launch and its wait do not count. Waits for these products only: a wait for the whole card would
    break graphs that other threads capture.
    """
    vector = matrix[0]
    if matrix.device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(count):
            torch.mv(matrix, vector)
        return time.perf_counter() - begun
    stream = torch.cuda.current_stream(matrix.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    for _ in range(count):
        torch.mv(matrix, vector)
    end.record(stream)
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)
