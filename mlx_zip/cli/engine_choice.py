"""The flag --engine of the commands that run models: which engine computes, and what opens it.

`choose_engine` is the one place that says what --engine auto means.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_zip.device import choose_device
from mlx_zip.errors import GenerationError, missing_library_error
from mlx_zip.models.decoder_options import why_not_on_torch
from mlx_zip.models.model_folder import find_model_folder, read_model_config

AUTO, MLX, TORCH, CUDA = "auto", "mlx", "torch", "cuda"
ENGINE_NAMES = (AUTO, MLX, TORCH, CUDA)
LIBRARIES = ("torch", "triton")
SMALL_MB = 32  # of weights: for a smaller model PyTorch takes longer to be imported than MLX to answer
REFUSED = {  # flags that PyTorch has no use for, and what to do
    "adapter_path": "merge the adapter with mlx_zip convert",
    "max_kv_size": "its KV caches do not rotate",
    "kv_bits": "its KV caches are not quantized",
    "kv_group_size": "its KV caches are not quantized",
    "quantized_kv_start": "its KV caches are not quantized",
    "draft_model": "only MLX has draft models",
    "draft_exact": "only MLX chooses near-ties again",
    "prompt_cache_file": "its prompt caches are not kept in files",
    "row_cache": "its rows are kept in memory only",
    "row_cache_bytes": "its rows are kept in memory only",
    "keep_cache": "its turns are read anew",
}
RANK_VARIABLE = "MLX_RANK"  # environment variable in which mlx.launch gives each process its number
_NEUTRAL_VALUES = {
    "row_cache": "off",
    "keep_cache": False,
    "kv_group_size": 64,
    "quantized_kv_start": 5000,
    "draft_exact": False,
}  # values that ask for nothing


def add_engine_flag(add: Any) -> None:
    """Declares --engine."""
    add(
        "--engine",
        choices=ENGINE_NAMES,
        default=AUTO,
        help="library that runs the model. mlx: MLX; torch: PyTorch, on an NVIDIA card if there is one, else on the "
        "CPU; cuda: PyTorch on an NVIDIA card only; auto: torch if it is installed, but mlx on a Mac, for a model "
        f"below {SMALL_MB} MB, and for a flag or model that torch does not support (default: auto)",
    )


def is_torch(args: argparse.Namespace) -> bool:
    """Returns whether the command runs on PyTorch; false for auto."""
    return args.engine in (TORCH, CUDA)


def choose_engine(args: argparse.Namespace, *models: Any, group: Any = None) -> None:
    """Replaces --engine auto in `args` by mlx or torch. Prints a line if the choice is not what a user would expect.

    models: folders, hub ids or bundled models, downloaded if need be; None for one that is in a file. group: the
    machines of this run, None for one. Raises `ModelError` if there is no such model, `ConfigError` for a device that
    MLX does not have.
    """
    if args.engine != AUTO:
        return
    args.engine, why = _pick_engine(args, [one for one in models if one is not None], group)
    if why is not None:
        print(f"engine: {args.engine}, {why}", file=sys.stderr)
    if args.engine == MLX:
        choose_device()


def _pick_engine(args: argparse.Namespace, models: Sequence[Any], group: Any) -> tuple[str, str | None]:
    """Returns the installed engine to take for what is asked, and what to say of it, None for nothing."""
    if find_spec("torch") is None or group is not None or RANK_VARIABLE in os.environ:
        return MLX, None
    if find_spec("mlx") is None:
        return TORCH, "because MLX is not installed"
    if sys.platform == "darwin":
        return MLX, None
    folders = [find_model_folder(model, getattr(args, "revision", None)) for model in models]
    if folders and max(map(_weight_bytes, folders)) < SMALL_MB << 20:
        return MLX, None
    if (flag := next(_mlx_only_flags(args), None)) is not None:
        return MLX, f"because torch does not take --{flag.replace('_', '-')}"
    for folder in folders:
        if (reason := why_not_on_torch(read_model_config(folder))) is not None:
            return MLX, f"because torch does not run {reason}"
    return TORCH, "usually the faster one on this system (--engine mlx takes MLX)"


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def _mlx_only_flags(args: argparse.Namespace) -> Any:
    for name in REFUSED:
        if (given := getattr(args, name, None)) is not None and given != _NEUTRAL_VALUES.get(name):
            yield name


def check_engine_flags(args: argparse.Namespace) -> None:
    """Raises `GenerationError` for a flag that cannot be used together with PyTorch, and on several machines."""
    if not is_torch(args):
        return
    if RANK_VARIABLE in os.environ:
        raise GenerationError(
            f"--engine {args.engine} runs on one machine; mlx.launch runs a model on several with mlx"
        )
    if (name := next(_mlx_only_flags(args), None)) is not None:
        flag = name.replace("_", "-")
        raise GenerationError(f"--{flag} cannot be used with --engine {args.engine}: {REFUSED[name]}")


def machines_of_run(args: argparse.Namespace) -> Any:
    """Returns the machines of this run, None for one machine. Raises `MachineError`."""
    if is_torch(args) or (args.engine == AUTO and find_spec("mlx") is None):
        return None
    from mlx_zip.models.machines import connect_machines

    return connect_machines()


def open_row_store(args: argparse.Namespace) -> Any:
    """Returns a context with the store of rows that flags ask for; with None if the engine has its own."""
    from mlx_zip.cli import row_cache

    return nullcontext() if is_torch(args) else row_cache.open_store(args)


def open_torch_engine(name: Any, engine: str, **options: Any) -> Any:
    """Returns the engine of a model on PyTorch. engine: torch, or cuda, which needs a card.

    options: those of `open_cuda_engine`, and those that MLX alone has. Raises `InstallationError` if its libraries are
    not installed, and `ModelError` if there is no card for it.
    """
    module = import_torch_module("engine", engine)
    for alone in (
        "adapter_path",
        "kv_bits",
        "kv_group_size",
        "quantized_kv_start",
        "draft_model",
        "num_draft_tokens",
        "draft_exact",
        "row_cache",
        "keep_wired_s",
        "max_kv_size",
    ):
        options.pop(alone, None)
    device = module.device_from_environment(needs_card=engine == CUDA)  # before anything is downloaded
    return module.open_cuda_engine(name, device=device, **options)


def import_torch_module(name: str, engine: str) -> Any:
    """Returns a module of `mlx_zip.cuda`. engine: as in `open_torch_engine`. Raises `InstallationError`."""
    try:
        return import_module(f"mlx_zip.cuda.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        needed = LIBRARIES if engine == CUDA else LIBRARIES[:1]
        raise missing_library_error(f"--engine {engine}", *needed, extra=engine) from error
