"""Counts the kernel launches of a piece of work on PyTorch, and the bytes that they read and write; needs no GPU.

PyTorch's operations count unless they are views or allocations. A kernel of `mlx_zip.cuda.kernels` counts as the
launches of its Triton form, even if its PyTorch reference runs instead, whose operations do not count.
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

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mlx_zip.cuda import kernels
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.devices import tensor_bytes
from mlx_zip.cuda.graphs import CudaGraphs
from mlx_zip.cuda.kernels.attention import attention_part_count
from mlx_zip.cuda.kernels.packed import Matrix
from mlx_zip.cuda.model import CudaModel

FREE = {  # operations that launch no kernel, although their schema does not show it
    *("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("is_pinned", "is_same_size", "lift_fresh", "_pin_memory", "sym_size", "sym_stride", "sym_numel"),
}
READS_ROWS = {"index", "index_select", "embedding", "gather"}  # operations that read as many elements as they return
WRITES_ROWS = {"index_put_", "index_put", "scatter", "scatter_", "_index_put_impl_", "index_copy_"}
FILLS = {"zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
FILLS |= {"fill_", "zero_", "scalar_tensor", "rand", "randn", "randint"}


@dataclass
class LaunchCounts:
    """Counts of launches. names: operation or kernel -> launches. sizes: operation or kernel -> bytes moved."""

    names: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """The number of all launches."""
        return self.names.total()

    @property
    def bytes(self) -> int:
        """Bytes read and written by all launches."""
        return self.sizes.total()

    def add(self, name: str, count: int, size: int) -> None:
        """Adds `count` launches that together read and write `size` bytes."""
        self.names[name] += count
        self.sizes[name] += size


class _LaunchCountingMode(TorchDispatchMode):
    """Counts PyTorch's operations while `paused` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.found = LaunchCounts()
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.paused and (parts := self._run_decomposed(func, args, kwargs)) is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        if not self.paused and operation_launches_kernel(func):
            name = func.overloadpacket.__name__
            self.found.add(name, 1, operation_bytes_moved(name, args, kwargs, out))
        return out

    def _run_decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a composite operation by its parts; returns NotImplemented for an operation without parts."""
        with self:
            return func.decompose(*args, **kwargs)


def operation_launches_kernel(func: Any) -> bool:
    """Returns whether a PyTorch operation launches a kernel: it is neither a view nor an allocation."""
    if func.overloadpacket.__name__ in FREE:
        return False
    returned = func._schema.returns
    return not (returned and all(one.alias_info is not None and not one.alias_info.is_write for one in returned))


def operation_bytes_moved(name: str, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Returns the bytes that a PyTorch operation reads and writes.

    Each tensor counts once; for operations on chosen rows, only these rows count.
    """
    if name in FILLS:
        return tensor_bytes(out)
    if name in READS_ROWS:
        return 2 * tensor_bytes(out) + tensor_bytes(list(args[1:]))
    if name in WRITES_ROWS:
        chosen = tensor_bytes(list(args[1:]))
        return chosen + tensor_bytes(args[2:]) + (0 if name.endswith("_") else 2 * tensor_bytes(out))
    if name == "copy_":
        return 2 * tensor_bytes(out)
    return tensor_bytes([args, list(kwargs.values())]) + tensor_bytes(out)


@contextmanager
def counting_launches() -> Iterator[LaunchCounts]:
    """Context manager: yields `LaunchCounts` of the work done inside. No CUDA graph is captured or replayed inside."""
    mode = _LaunchCountingMode()
    with ExitStack() as stack:
        stack.enter_context(patch.object(CudaGraphs, "run", lambda graphs, key, work, keep=(): work()))
        for place, name, function in kernel_references():
            stack.enter_context(patch.object(place, name, count_reference_calls(mode, place.__name__, name, function)))
        if (run := find_triton_run()) is not None:
            stack.enter_context(patch.object(*run[:2], count_triton_launches(mode, run[2])))
        stack.enter_context(mode)
        yield mode.found


def kernel_references() -> Iterable[tuple[Any, str, Callable[..., Any]]]:
    for info in pkgutil.iter_modules(kernels.__path__):
        if info.ispkg:  # the Triton kernels themselves
            continue
        module = import_module(f"{kernels.__name__}.{info.name}")
        for name, value in vars(module).items():
            if name.startswith("reference") and callable(value) and value.__module__ == module.__name__:
                yield module, name, value


def count_reference_calls(
    mode: _LaunchCountingMode, module: str, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    kernel = f"{module.rpartition('.')[2]}.{name}"
    size = KERNEL_BYTES.get(kernel, lambda args, out: tensor_bytes(list(args.values())) + tensor_bytes(out))
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


def find_triton_run() -> tuple[Any, str, Callable[..., Any]] | None:
    if "triton" not in sys.modules:
        return None
    from triton.runtime import interpreter  # type: ignore[import-not-found]
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found]

    from mlx_zip.cuda.kernels.triton.tuning import is_interpreted

    if is_interpreted():
        return interpreter.GridExecutor, "__call__", interpreter.GridExecutor.__call__
    return JITFunction, "run", JITFunction.run


def count_triton_launches(mode: _LaunchCountingMode, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode.paused += 1
        try:
            out = function(self, *args, **kwargs)
            mode.found.add(f"triton.{self.fn.__name__}", 1, tensor_bytes([args, list(kwargs.values())]))
        finally:
            mode.paused -= 1
        return out

    return run


# ---- bytes of kernels; a kernel without an entry reads each of its tensors and writes its result, once

Arguments = Mapping[str, Any]


def matrix_row_bytes(matrix: Matrix, count: int) -> int:
    return count * tensor_bytes(matrix) // matrix.shape[0]


def embedding_bytes_moved(args: Arguments, out: Any) -> int:
    """Returns bytes moved: for each base id a row of the base table, for each hypertoken an installed row."""
    ids, base = args["ids"], args["base"]
    low = int((ids < args["boundary"]).sum())
    rows = (ids.numel() - low) * args["rows"].shape[2] * args["rows"].element_size()
    return tensor_bytes(ids) + matrix_row_bytes(base, low) + rows + tensor_bytes(out)


def entry_row_bytes_moved(args: Arguments, out: Any) -> int:
    """Returns bytes moved: a row of the matrix for each id of each entry, and one entry's position rows, if any."""
    entries, places = args["entries"], args["places"]
    read = matrix_row_bytes(args["matrix"], entries.numel()) + (
        0 if places is None else tensor_bytes(places[: entries.shape[1]])
    )
    return tensor_bytes(entries) + read + tensor_bytes(out)


def head_bytes_moved(args: Arguments, out: Any) -> int:
    """Returns bytes moved: the base matrix's rows below the boundary, and the installed rows."""
    base, rows, installed = args["base"], args["rows"], args["installed"]
    entries = int(installed.sum()) * rows.shape[2] * rows.element_size()
    low = matrix_row_bytes(base, args["boundary"])
    return tensor_bytes(args["x"]) + low + entries + tensor_bytes(installed) + tensor_bytes(out)


def rope_bytes_moved(args: Arguments, out: Any) -> int:
    """Returns bytes moved: queries, keys and values are read, and written to the result or the caches."""
    others = [args[name] for name in ("positions", "slots", "rotation")]
    return 2 * tensor_bytes(args["qkv"]) + tensor_bytes(others)


def attention_bytes_moved(args: Arguments, out: Any) -> int:
    """Returns bytes moved: the filled part of the caches, at most the sliding window."""
    keys = args["keys"]
    lengths = args["lengths"].clamp(max=min(keys.shape[2], args["window"]))
    one = 2 * keys.shape[1] * keys.shape[3] * keys.element_size()
    return tensor_bytes(args["q"]) + int(lengths.sum()) * one + tensor_bytes(out)


def attention_launch_count(args: Arguments) -> int:
    """Returns 2 if the keys are divided among programs, whose results a second launch combines; else 1."""
    batch, kv_heads, places, _ = args["keys"].shape
    return 2 if attention_part_count(batch * kv_heads, min(places, args["window"])) > 1 else 1


def install_bytes_moved(args: Arguments, out: Any) -> int:
    """Returns bytes moved: for each entry, a row of each side is read and written, and its flag and span written."""
    new, pool = args["new"], args["pool"]
    row = pool.shape[1] * pool.shape[2] * pool.element_size()
    return tensor_bytes(new) + new.shape[1] * (2 * row + 1 + 8)


# number of launches of a kernel's Triton form, if it is not 1
KERNEL_LAUNCHES: dict[str, Callable[[Arguments], int]] = {
    "head.reference_joint_head": lambda args: 2,  # one over blocks of ids, one that combines their results
    "attention.reference_decode_attention": attention_launch_count,
}
KERNEL_BYTES: dict[str, Callable[[Arguments, Any], int]] = {
    "hyper_rows.reference_hyper_embedding": embedding_bytes_moved,
    "hyper_rows.reference_embed_entries": entry_row_bytes_moved,
    "head.reference_joint_head": head_bytes_moved,
    "attention.reference_rope_and_cache": rope_bytes_moved,
    "attention.reference_decode_attention": attention_bytes_moved,
    "hyper_rows.reference_install_rows": install_bytes_moved,
}

# ---- a decoding step: without hypertokens, with warm rows, and with cold rows

PROMPT = 2  # base ids read before the counted steps
TRIES = 64  # most steps until one installs an entry


@dataclass(frozen=True)
class StepCosts:
    """The launches of a step that installs an entry whose row is in the store (warm) or must be encoded (cold).

    Without hypertokens no step installs an entry, so `warm` and `cold` are equal.
    """

    warm: LaunchCounts
    cold: LaunchCounts


def count_step_costs(model: CudaModel) -> StepCosts:
    """Returns the launches of a step of one sequence after `PROMPT` base ids.

    All slots count as installed. The emitted ids are forced, so that a step installs an entry.
    """
    found = []
    for _ in range(1 + model.has_hypertokens):  # the second pass finds the row that the first has encoded
        batch = Batch(model, 1, PROMPT + TRIES + 1)
        batch.add()
        batch.read(0, distinct_base_ids(model, PROMPT))
        found.append(count_first_installing_step(batch))
    return StepCosts(warm=found[-1], cold=found[0])


def distinct_base_ids(model: CudaModel, count: int) -> np.ndarray:
    allowed = np.setdiff1d(np.arange(model.params.vocab_size), list(model.params.disabled_ids))
    return np.resize(allowed, count).astype(np.uint32)


def count_first_installing_step(batch: Batch) -> LaunchCounts:
    """Returns the launches of the first step that installs an entry; without hypertokens, of the first step."""
    allowed = distinct_base_ids(batch.model, TRIES)
    batch.tables.installed.fill_(True)
    for at in range(TRIES):
        forced = int(allowed[-1 - at])
        before = len(batch.book(0))
        ids = torch.tensor([forced], device=batch.model.device)
        with counting_launches() as found:
            take_step(batch, ids)
        if not batch.model.has_hypertokens or len(batch.book(0)) > before:
            return found
    raise ValueError(f"no entry was installed in {TRIES} steps")


def take_step(batch: Batch, ids: torch.Tensor) -> None:
    """Takes a whole step of a batch with one sequence; emits `ids` [1] after the head has run."""
    batch.choose_ids(lambda head: ids, logits=False)
    batch.start_body()
    for error in batch.update_codebooks(batch.wait_for_ids()).values():
        raise error
