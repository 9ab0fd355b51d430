"""Counts the launches of a piece of work on PyTorch, and the bytes that they read and write; no GPU is needed.

PyTorch's operations count unless they are views or allocations. A kernel of `mlx_zip.cuda.kernels` counts as the
launches of its Triton form, also where its plain reference runs, whose operations do not count then.
"""

from __future__ import annotations

import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from mlx_zip.cuda import kernels
from mlx_zip.cuda.graphs import Graphs
from mlx_zip.cuda.kernel_bytes import KERNEL_BYTES, KERNEL_LAUNCHES, bytes_of

FREE = {  # operations that launch nothing although their schema does not say so
    *("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("is_pinned", "is_same_size", "lift_fresh", "_pin_memory", "sym_size", "sym_stride", "sym_numel"),
}
READS_ROWS = {"index", "index_select", "embedding", "gather"}  # they read as many elements as they return
WRITES_ROWS = {"index_put_", "index_put", "scatter", "scatter_", "_index_put_impl_", "index_copy_"}
FILLS = {"zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
FILLS |= {"fill_", "zero_", "scalar_tensor", "rand", "randn", "randint"}


@dataclass
class Launches:
    """What was launched. names: how often each operation or kernel was. bytes: read and written by all of them."""

    names: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """All launches."""
        return self.names.total()

    @property
    def bytes(self) -> int:
        """Bytes read and written by all launches."""
        return self.sizes.total()

    def add(self, name: str, count: int, size: int) -> None:
        """Adds `count` launches that read and write `size` bytes together."""
        self.names[name] += count
        self.sizes[name] += size

    def minus(self, other: Launches) -> Launches:
        """Returns what was launched here and not in `other`, by name; counts may be negative."""
        found = Launches(Counter(self.names), Counter(self.sizes))
        found.names.subtract(other.names)
        found.sizes.subtract(other.sizes)
        return found

    def record(self) -> dict[str, Any]:
        """Returns launches and bytes for a record, the names with the most bytes first."""
        order = sorted(self.names, key=lambda name: (-self.sizes[name], name))
        each = {name: {"launches": self.names[name], "bytes": self.sizes[name]} for name in order}
        return {"launches": self.count, "bytes": self.bytes, "each": each}


class _Mode(TorchDispatchMode):
    """Counts operations, unless it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Launches()
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.paused and (parts := self._parts(func, args, kwargs)) is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        if not self.paused and launches(func):
            name = func.overloadpacket.__name__
            self.found.add(name, 1, operation_bytes(name, args, kwargs, out))
        return out

    def _parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation by its parts if PyTorch knows it as one of several; else returns NotImplemented."""
        with self:
            return func.decompose(*args, **kwargs)


def launches(func: Any) -> bool:
    """Returns whether one of PyTorch's operations launches something: it is no view and no allocation."""
    if func.overloadpacket.__name__ in FREE:
        return False
    returned = func._schema.returns
    return not (returned and all(one.alias_info is not None and not one.alias_info.is_write for one in returned))


def operation_bytes(name: str, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Returns the bytes that one of PyTorch's operations reads and writes.

    Each tensor counts once; operations on chosen rows count these rows only.
    """
    if name in FILLS:
        return bytes_of(out)
    if name in READS_ROWS:
        return 2 * bytes_of(out) + bytes_of(list(args[1:]))
    if name in WRITES_ROWS:
        chosen = bytes_of(list(args[1:]))
        return chosen + bytes_of(args[2:]) + (0 if name.endswith("_") else 2 * bytes_of(out))
    if name == "copy_":
        return 2 * bytes_of(out)
    return bytes_of([args, list(kwargs.values())]) + bytes_of(out)


@contextmanager
def counted() -> Iterator[Launches]:
    """Counts what is launched inside, into the object that it yields. CUDA graphs are neither made nor replayed."""
    mode = _Mode()
    with ExitStack() as stack:
        stack.enter_context(patch.object(Graphs, "run", lambda graphs, key, work, keep=(): work()))
        for place, name, function in _kernel_functions():
            stack.enter_context(patch.object(place, name, _counting(mode, place.__name__, name, function)))
        if (run := _triton_run()) is not None:
            stack.enter_context(patch.object(*run[:2], _counting_triton(mode, run[2])))
        stack.enter_context(mode)
        yield mode.found


def _kernel_functions() -> Iterable[tuple[Any, str, Callable[..., Any]]]:
    """Yields (module, name, function) of every kernel's plain reference."""
    for info in pkgutil.iter_modules(kernels.__path__):
        if info.name.endswith("_triton"):
            continue
        module = import_module(f"{kernels.__name__}.{info.name}")
        for name, value in vars(module).items():
            if name.startswith("reference") and callable(value) and value.__module__ == module.__name__:
                yield module, name, value


def _counting(mode: _Mode, module: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the reference of a kernel, which counts as the kernel's launches when it is called."""
    kernel = f"{module.rpartition('.')[2]}.{name}"
    size = KERNEL_BYTES.get(kernel, lambda args, out: bytes_of(list(args.values())) + bytes_of(out))
    count = KERNEL_LAUNCHES.get(kernel, lambda args: 1)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if mode.paused:
            return function(*args, **kwargs)
        mode.paused += 1
        try:
            out = function(*args, **kwargs)
            named = {**dict(zip(function.__code__.co_varnames, args, strict=False)), **kwargs}
            mode.found.add(kernel, count(named), size(named, out))
        finally:
            mode.paused -= 1
        return out

    return run


def _triton_run() -> tuple[Any, str, Callable[..., Any]] | None:
    """Returns (class, name, function) of what every launch of a Triton kernel goes through; None without Triton."""
    if "triton" not in sys.modules:
        return None
    from triton.runtime import interpreter  # type: ignore[import-not-found]
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found]

    from mlx_zip.cuda.kernels.tuning import is_interpreted

    if is_interpreted():
        return interpreter.GridExecutor, "__call__", interpreter.GridExecutor.__call__
    return JITFunction, "run", JITFunction.run


def _counting_triton(mode: _Mode, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that launches a Triton kernel and counts one launch; its bytes are those of its tensors."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode.paused += 1
        try:
            out = function(self, *args, **kwargs)
            mode.found.add(f"triton.{self.fn.__name__}", 1, bytes_of([args, list(kwargs.values())]))
        finally:
            mode.paused -= 1
        return out

    return run
