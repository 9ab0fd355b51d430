"""MLX's device: chooses it, switches off TF32, measures memory bandwidth, and keeps memory wired for a Mac's GPU."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from mlx_zip.errors import ConfigError

DEVICE_VARIABLE = "MLX_ZIP_DEVICE"
TF32_VARIABLE = "MLX_ENABLE_TF32"
DEVICES = ("cpu", "gpu")
BANDWIDTH_SIDE = 8192  # side of the float32 matrix that is read: 256 MB, more than any cache
SPEED_TRIALS = 5
SUM_FLOATS, SUMS_PER_CALL = 16 << 20, 4  # floats of the array that numbers are added to, and additions per evaluation
_wiring_lock = threading.Lock()
_owners: dict[WiredMemory, int] = {}  # owner that keeps memory wired -> MLX's limit before any owner did


def device_in_environment() -> str | None:
    """Returns the device that MLX_ZIP_DEVICE names, "cpu" or "gpu"; None if the variable is unset or empty.

    Raises `ConfigError` for another name.
    """
    name = os.environ.get(DEVICE_VARIABLE) or None
    if name not in (None, *DEVICES):
        raise ConfigError(f"{DEVICE_VARIABLE}={name}: it is one of {', '.join(DEVICES)}")
    return name


def set_device_from_environment() -> None:
    """Makes the device named in MLX_ZIP_DEVICE, "cpu" or "gpu", MLX's default device.

    Does nothing if the variable is not set or MLX is not installed. Call this before `mlx_lm` is imported, because
    `mlx_lm.generate` reads the default device at import. Raises `ConfigError` for another name, and if this machine or
    this MLX does not have the device.
    """
    name = device_in_environment()
    if name is None or find_spec("mlx") is None:
        return  # a command that needs MLX will say so
    import mlx.core as mx

    try:
        mx.set_default_device(mx.Device(getattr(mx, name)))
    except ValueError as error:
        raise ConfigError(f"{DEVICE_VARIABLE}={name}: MLX has no such device here") from error


def disable_tf32() -> None:
    """Switches off TF32, which some GPUs use for float32 products, in this process and its children.

    Sets MLX_ENABLE_TF32, which MLX reads once per process, so call this before MLX is imported.
    """
    os.environ[TF32_VARIABLE] = "0"


def default_device_is_gpu() -> bool:
    """Returns whether MLX's default device is a GPU."""
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.gpu)


class WiredMemory:
    """Keeps memory wired for a Mac's GPU, so that work after a pause does not wait until the memory is wired again.

    MLX has one wired limit per process. The first owner that wires memory sets the limit to what the device recommends;
    the last owner that unwires memory restores the previous limit. Each owner has its own `WiredMemory` and uses it in
    one thread. On a device without a recommended limit, nothing is done. keep_s: seconds that an idle owner keeps the
    memory wired. streams: the streams that the owner computes on; `unwire` waits for them, because
    MLX's limit must not change during a computation.

    As a context manager, keeps the memory wired while the block runs.

    Source: MLX 0.32 `mlx/backend/metal/resident.h`, mlx-lm 0.32 `mlx_lm.generate.wired_limit`.
    """

    def __init__(self, keep_s: float, streams: Sequence[Any]) -> None:
        self.keep_s, self._streams = keep_s, streams
        self._idle_since: float | None = None

    def __enter__(self) -> None:
        self.wire()

    def __exit__(self, *error: object) -> None:
        self.unwire()

    @property
    def is_wired(self) -> bool:
        """Whether this owner keeps the memory wired."""
        return self in _owners

    def wire(self) -> None:
        """Wires the process's memory and later allocations, unless this owner already has. Ends the idle time."""
        import mlx.core as mx

        self._idle_since = None
        with _wiring_lock:
            limit = mx.device_info().get("max_recommended_working_set_size")
            if self.is_wired or not isinstance(limit, int):
                return
            _owners[self] = next(iter(_owners.values())) if _owners else mx.set_wired_limit(limit)

    def unwire(self) -> None:
        """Waits for this owner's streams, then unwires the memory, unless another owner keeps it wired."""
        import mlx.core as mx

        if not self.is_wired:
            return
        try:
            for stream in self._streams:
                mx.synchronize(stream)
        finally:
            with _wiring_lock:
                before = _owners.pop(self)
                if not _owners:
                    mx.set_wired_limit(before)

    def unwire_if_idle(self) -> float | None:
        """Unwires the memory after `keep_s` idle seconds, counted from the first call of this method since `wire`.

        Returns the seconds after which to call this again, or None if this owner no longer keeps memory wired.
        """
        if not self.is_wired:
            return None
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        left = self._idle_since + self.keep_s - now
        if left <= 0:
            self.unwire()
            return None
        return left


def measure_product_bandwidth(products: int = 1, side: int = BANDWIDTH_SIDE, limit_s: float = math.inf) -> float:
    """Measures how many bytes per second MLX's default device reads in matrix-vector products, as in decoding.

    products: number of products per evaluation; several hide the launch time. side: side length of the float32 matrix
    that is read. The fastest of `SPEED_TRIALS` evaluations counts; no further one begins after `limit_s` seconds.
    """
    import mlx.core as mx

    matrix, vectors = mx.ones((side, side)), [mx.full((side, 1), 1.0 + i) for i in range(products)]
    mx.eval(matrix, vectors)
    return (
        products * matrix.nbytes / time_fastest_call(lambda: mx.eval([matrix @ vector for vector in vectors]), limit_s)
    )


def make_memory_workload() -> tuple[Callable[[], None], int]:
    """Returns (function, bytes): the function adds numbers to an array of 64 MB and reads and writes that many bytes.

    On a CPU, the function's speed is nearer to the memory's bandwidth than that of MLX's matrix products.
    """
    import mlx.core as mx

    x = mx.zeros((SUM_FLOATS,), mx.float32)
    mx.eval(x)
    return lambda: mx.eval([x + (i + 1) for i in range(SUMS_PER_CALL)]), SUMS_PER_CALL * 2 * x.nbytes


def measure_memory_bandwidth(limit_s: float = math.inf) -> float:
    """Measures the memory bandwidth of MLX's default device, in bytes per second.

    On a GPU, matrix-vector products read memory, as in decoding; on a CPU, sums read and write it
    (`make_memory_workload`). limit_s: as in `time_fastest_call`.
    """
    if default_device_is_gpu():
        return measure_product_bandwidth(limit_s=limit_s)
    work, count = make_memory_workload()
    return count / time_fastest_call(work, limit_s)


def host_memory_bytes() -> int:
    """Returns the bytes of this machine's physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def time_fastest_call(call: Callable[[], Any], limit_s: float = math.inf) -> float:
    """Returns the seconds of the fastest of `SPEED_TRIALS` calls, after one warm-up call.

    No further call begins after `limit_s` seconds.
    """
    ends, times = time.perf_counter() + limit_s, [_time_call(call)]
    for _ in range(SPEED_TRIALS):
        if time.perf_counter() >= ends:
            break
        times.append(_time_call(call))
    return min(times[1:] or times)


def _time_call(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
