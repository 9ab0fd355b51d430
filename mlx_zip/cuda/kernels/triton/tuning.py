"""Chooses block sizes of kernels: by timing, once per shape, on a GPU; elsewhere the first of a list.

Triton's own autotuner takes 0.2 seconds per choice and compiles one choice after the other. Here all choices are
compiled in parallel and timed in turns, so that a GPU whose clock is still rising favours none.
"""

# Triton may be missing.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from threading import RLock
from typing import Any

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

log = logging.getLogger(__name__)
Sizes = tuple[Mapping[str, int], int]  # constants of the kernel, and warps of a program
# full messages of RuntimeErrors raised when compiling a choice fails; errors of a launch have other messages
COMPILER_GAVE_UP = ("PassManager::run failed", "failed to translate module to LLVM IR")
ROUNDS = 15  # timed launches of each choice
FLUSHED = 128 << 20  # bytes that are written before each launch, so that none of its inputs are in the GPU's cache
COMPILERS = 8  # choices that are compiled at the same time
_measuring_lock = RLock()


def is_interpreted() -> bool:
    """Returns whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class TunedKernel:
    """A jitted kernel that is launched with the fastest of several sizes. The kernel must not read what it writes.

    The first launch for a key times all sizes, which waits for the GPU. While a graph is captured, nothing is timed: a
    key that has no chosen sizes yet uses the first of `choices`.
    """

    def __init__(self, kernel: Any, choices: Sequence[Sizes]) -> None:
        self.kernel, self.choices = kernel, choices
        self._chosen: dict[Hashable, Sizes] = {}

    def launch(self, key: Hashable, grid: Any, *args: Any, **constants: Any) -> None:
        """Launches the kernel. key: what the best sizes depend on; grid, args, constants: as Triton takes them."""
        sizes = self._chosen.get(key)
        if sizes is None:
            sizes = self._choose_sizes(key, grid, *args, **constants)
        self.kernel[grid](*args, **constants, **sizes[0], num_warps=sizes[1])

    def _choose_sizes(self, key: Hashable, grid: Any, *args: Any, **constants: Any) -> Sizes:
        """Returns the sizes for a key, timed with these arguments if `can_time_launches`."""
        if not can_time_launches():
            return default_sizes(self.choices)

        def launched(sizes: Sizes, run: Callable[..., Any]) -> None:
            run(*args, **constants, **sizes[0], num_warps=sizes[1])

        with _measuring_lock:
            if key not in self._chosen:
                with _compile_in_parallel():
                    for sizes in self.choices:
                        launched(sizes, lambda *a, **k: self.kernel.warmup(*a, grid=grid, **k))
                self._chosen[key] = find_fastest_sizes(self.choices, lambda sizes: launched(sizes, self.kernel[grid]))
            return self._chosen[key]


def can_time_launches() -> bool:
    """Returns whether launches can be timed: kernels run on a GPU, and the current stream captures no graph."""
    return not is_interpreted() and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


def default_sizes(choices: Sequence[Sizes]) -> Sizes:
    """Returns the sizes for launches that cannot be timed: the first choice."""
    return choices[0]


@contextmanager
def _compile_in_parallel() -> Any:
    """Context manager: kernels warmed up in the block are compiled in parallel.

    A compile error is raised when the kernel is launched.
    """
    with ThreadPoolExecutor(COMPILERS) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        yield


def find_fastest_sizes(choices: Sequence[Sizes], launch: Callable[[Sizes], None]) -> Sizes:
    """Returns the choice with the shortest median time of a launch, among the choices that run on this GPU.

    A choice that does not compile or needs more resources than the GPU has is left out, with a warning in the log. If
    all are left out, the first choice is returned: launching it raises the reason.
    """
    fitting = [sizes for sizes in choices if _can_launch(sizes, launch)]
    if len(fitting) < 2:
        return fitting[0] if fitting else choices[0]
    times = _median_launch_times_ms(fitting, launch)
    return fitting[times.index(min(times))]


def _can_launch(sizes: Sizes, launch: Callable[[Sizes], None]) -> bool:
    try:
        launch(sizes)
    except (CompilationError, PTXASError, OutOfResources) as error:
        return _log_left_out_sizes(sizes, error)
    except RuntimeError as error:
        if str(error) not in COMPILER_GAVE_UP:
            raise
        return _log_left_out_sizes(sizes, error)
    return True


def _log_left_out_sizes(sizes: Sizes, error: Exception) -> bool:
    constants = ", ".join(f"{name}={value}" for name, value in sizes[0].items())
    log.warning("sizes %s with %d warps are left out: %s: %s", constants, sizes[1], type(error).__name__, error)
    return False


def _median_launch_times_ms(choices: Sequence[Sizes], launch: Callable[[Sizes], None]) -> list[float]:
    waste = torch.zeros(FLUSHED, dtype=torch.int8, device="cuda")
    marks = [[[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in choices] for _ in range(ROUNDS)]
    for row in marks:
        for sizes, (begin, end) in zip(choices, row, strict=True):
            waste.zero_()
            begin.record()
            launch(sizes)
            end.record()
    end.synchronize()  # a wait for the whole GPU would break graphs that other threads capture
    return [median(row[at][0].elapsed_time(row[at][1]) for row in marks) for at in range(len(choices))]
