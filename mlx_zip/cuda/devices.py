"""Finds devices, checks their free memory before an allocation, and measures their memory bandwidth."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mlx_zip.cuda.kernels.dispatch import has_triton
from mlx_zip.device import BANDWIDTH_SIDE, peak_rss_bytes
from mlx_zip.engine.interface import Ceiling
from mlx_zip.errors import ModelError, first_message_line


def find_device(name: str | torch.device | None = None) -> torch.device:
    """Returns a device; None for the current CUDA GPU, or the CPU if there is no GPU.

    A GPU named by number becomes the current GPU of the calling thread. Raises `ModelError` if the device is not
    supported or cannot be used.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r}: {first_message_line(error)}") from error
    if device.type not in ("cuda", "cpu"):
        raise ModelError(f"device {name!r} is not supported; supported: cuda, cuda:N, cpu")
    if device.type == "cuda":
        _raise_unless_card_works(device)
    return device


def _raise_unless_card_works(device: torch.device) -> None:
    """Raises `ModelError` if the GPU cannot be used: no GPU, no driver, an old driver, or no Triton."""
    if not has_triton():
        raise ModelError(f"device {device}: triton is not installed: pip install 'mlx-zip[cuda]'")
    try:
        torch.cuda.init()
        make_gpu_current(device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device}: no usable CUDA card here: {first_message_line(error)}") from error


def make_gpu_current(device: torch.device) -> None:
    """Makes a GPU the current one of this thread: Triton launches kernels there, wherever their tensors are."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def raise_if_dtype_unsupported(dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ModelError` if `dtype` is bfloat16 and `device` is a GPU that is too old for bfloat16."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ModelError(
            f"device {device} has compute capability {major}.{minor}; bfloat16 needs 8.0: "
            "use float16 (mlx_zip convert --dtype float16)"
        )


def free_gpu_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def peak_allocated_bytes(device: torch.device) -> int:
    """Returns the peak bytes that PyTorch allocated on a GPU; for a CPU, the peak memory of the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss_bytes()


def tensor_bytes(values: Any) -> int:
    """Returns the size in bytes of all tensors in nested lists and tuples (`Packed` too); each tensor counts once."""
    found = {id(one): one for one in tree_leaves(values) if isinstance(one, torch.Tensor)}
    return sum(one.numel() * one.element_size() for one in found.values())


def as_out_of_memory_error(error: torch.OutOfMemoryError) -> ModelError:
    """Returns a one-line error for users that says what to do if PyTorch is out of memory."""
    return ModelError(
        f"{first_message_line(error)}: use a smaller model or a quantized one, or fewer requests at a time"
    )


def raise_if_memory_too_small(what: str, needed: int, device: torch.device) -> None:
    """Raises `ModelError` naming needed and free bytes if `needed` bytes are more than the device has free."""
    free = free_gpu_bytes(device)
    if free is not None and needed > free:
        raise ModelError(f"{what}: {needed} bytes needed on {device}, {free} bytes are free")


# ---- how many steps per second the memory allows

PRODUCTS = 8  # per trial on a GPU: several, so that the time of a launch hardly counts
TRIALS = 6
LIMIT_S = 0.5  # after this time no further trial begins
_measured: dict[torch.device, float] = {}  # bytes per second, measured once in this process


def measure_step_ceiling(device: torch.device, step_bytes: int) -> Ceiling | None:
    """Returns the upper bound on steps per second of a model that reads `step_bytes` bytes of weights per step.

    Returns None if too little memory is free for the measurement. Call it in the engine's thread. The first call
    measures the device's bandwidth, for up to a second.
    """
    if device not in _measured:
        free = free_gpu_bytes(device)
        if free is not None and free < 4 * BANDWIDTH_SIDE**2:
            return None
        _measured[device] = measure_matvec_bandwidth(device, BANDWIDTH_SIDE, LIMIT_S)
    return Ceiling(_measured[device] / step_bytes, _measured[device], step_bytes)


def measure_matvec_bandwidth(device: torch.device, side: int, limit_s: float = math.inf) -> float:
    """Returns the bytes per second that a device reads in matrix-vector products.

    `mlx_zip.device.measure_memory_bandwidth` does the same with MLX.

    side: rows and columns of the float32 matrix. The result is the fastest of up to `TRIALS` trials after one warm-up.
    No trial but the first begins after `limit_s` seconds.
    """
    ends = time.perf_counter() + limit_s
    matrix = torch.rand((side, side), device=device)
    products, best = PRODUCTS if device.type == "cuda" else 1, math.inf
    _time_matrix_products(matrix, 1)
    for _ in range(TRIALS):
        if time.perf_counter() >= ends and best < math.inf:
            break
        best = min(best, _time_matrix_products(matrix, products) / products)
    return matrix.nbytes / best


def _time_matrix_products(matrix: torch.Tensor, count: int) -> float:
    """Returns the seconds that `count` products of a matrix with its first row take, on a GPU by CUDA events.

    Waits for these products only: a wait for the whole GPU would break graphs that other threads capture.
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
