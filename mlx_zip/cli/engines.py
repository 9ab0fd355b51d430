"""The flag --engine of the commands that run models, and what opens the engine that it names."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from mlx_zip.errors import GenerationError, missing_library

MLX, CUDA = "mlx", "cuda"
LIBRARIES = ("torch", "triton")
REFUSED = {  # flags that --engine cuda has no use for, and what to do
    "adapter_path": "merge the adapter with mlx_zip convert",
    "kv_bits": "its KV caches are not quantized",
    "kv_group_size": "its KV caches are not quantized",
    "quantized_kv_start": "its KV caches are not quantized",
    "prompt_cache_file": "its prompt caches are not kept in files",
    "row_cache": "its rows are kept in memory only",
    "row_cache_bytes": "its rows are kept in memory only",
}
RANK = "MLX_RANK"  # what mlx.launch tells each process
_OFF = {"row_cache": "off", "kv_group_size": 64, "quantized_kv_start": 5000}  # values that ask for nothing


def add_flag(add: Any) -> None:
    """Declares --engine."""
    add(
        "--engine",
        choices=(MLX, CUDA),
        default=MLX,
        help="what computes: mlx, or cuda (PyTorch and Triton) on an NVIDIA card (default: mlx)",
    )


def is_cuda(args: argparse.Namespace) -> bool:
    """Returns whether the command runs on PyTorch."""
    return args.engine == CUDA


def check_flags(args: argparse.Namespace) -> None:
    """Raises `GenerationError` for a flag that cannot be used together with --engine cuda, and on several machines."""
    if is_cuda(args) and RANK in os.environ:
        raise GenerationError("--engine cuda runs on one machine; without it mlx.launch runs a model on several")
    for name, why in REFUSED.items() if is_cuda(args) else ():
        if (given := getattr(args, name, None)) is not None and given != _OFF.get(name):
            raise GenerationError(f"--{name.replace('_', '-')} cannot be used with --engine cuda: {why}")


def open_row_store(args: argparse.Namespace) -> Any:
    """Returns a context with the store of rows that flags ask for; with None if the engine has its own."""
    from mlx_zip.cli import rows

    return nullcontext() if is_cuda(args) else rows.open_store(args)


def open_cuda(name: Any, **options: Any) -> Any:
    """Returns the engine of a model on PyTorch. options: those of `open_cuda_engine`, and those that MLX alone has.

    Raises `InstallationError` if its libraries are not installed, and `ModelError` if there is no card for it.
    """
    try:
        engine = import_module("mlx_zip.cuda.engine")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        raise missing_library("--engine cuda", *LIBRARIES, extra="cuda") from error
    for alone in ("adapter_path", "kv_bits", "kv_group_size", "quantized_kv_start", "row_cache"):
        options.pop(alone, None)
    engine.chosen_device()  # before anything is downloaded
    return engine.open_cuda_engine(name, **options)
