"""The choice between a Triton kernel and its PyTorch reference, and the checks that all dispatchers share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

import torch

IMPLEMENTATIONS = ("triton", "reference")
_FORCED: ContextVar[str | None] = ContextVar("_FORCED", default=None)


@contextmanager
def force_implementation(impl: str) -> Iterator[None]:
    """Context manager: dispatchers that are called with `impl` None use this `impl`, "triton" or "reference"."""
    before = _FORCED.set(impl)
    try:
        yield
    finally:
        _FORCED.reset(before)


@cache
def has_triton() -> bool:
    """Returns whether triton is installed."""
    return find_spec("triton") is not None


def should_use_triton(impl: str | None, *tensors: torch.Tensor | None) -> bool:
    """Returns True to launch the Triton kernel for these tensors, False to run the reference.

    impl: "triton" or "reference" forces one; None follows `force_implementation` if in use, else takes Triton for CUDA
    tensors. Raises ValueError if `impl` is another name, the tensors are on several devices, or Triton cannot run.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise ValueError(f"tensors are on several devices: {sorted(map(str, devices))}")
    on_gpu = devices.pop().type == "cuda"
    impl = _FORCED.get() if impl is None else impl
    if impl is None:
        return on_gpu and has_triton()
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl {impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if impl == "triton":
        _raise_unless_triton_runs(on_gpu)
    return impl == "triton"


def _raise_unless_triton_runs(on_gpu: bool) -> None:
    if not has_triton():
        raise ValueError("impl 'triton': triton is not installed (extra [cuda])")
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("impl 'triton': CPU tensors need Triton's interpreter (TRITON_INTERPRET=1)")


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Raises ValueError unless a tensor is contiguous and has this shape; None in the shape accepts any size."""
    wanted = len(shape) == tensor.dim() and all(w in (None, s) for w, s in zip(shape, tensor.shape, strict=True))
    if not wanted:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def to_reference_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the dtype in which references compute: float64 stays, all else becomes float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
