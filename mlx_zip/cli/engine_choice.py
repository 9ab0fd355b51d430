"""The flag --engine of the commands that run models: declares it, chooses an engine, checks its flags and opens it.

What --engine auto means is defined in `choose_engine` alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_zip.device import set_device_from_environment
from mlx_zip.errors import (
    EngineError,
    GenerationError,
    MlxZipError,
    ModelError,
    import_or_explain,
    missing_library_error,
)
from mlx_zip.models.decoder_options import why_not_on_torch
from mlx_zip.models.model_folder import find_model_folder, read_model_config

AUTO, MLX, TORCH, CUDA, VLLM = "auto", "mlx", "torch", "cuda", "vllm"
ENGINE_NAMES = (AUTO, MLX, TORCH, CUDA)
SERVING_NAMES = (*ENGINE_NAMES, VLLM)  # --engine of the commands that use the `Engine` interface
LIBRARIES = ("torch", "triton")
SMALL_MB = 32  # size of weights below which auto takes MLX: it has answered before PyTorch is imported
_ON_TORCH = {  # flags that are refused with PyTorch: reason, or what to do instead
    "adapter_path": "merge the adapter with mlx_zip convert",
    "max_kv_size": "its KV caches do not rotate",
    **dict.fromkeys(("kv_bits", "kv_group_size", "quantized_kv_start"), "its KV caches are not quantized"),
    "draft_model": "only MLX has draft models",
    "draft_exact": "only MLX chooses near-ties again",
    "prompt_cache_file": "its prompt caches are not kept in files",
    **dict.fromkeys(("row_cache", "row_cache_bytes"), "its rows are kept in memory only"),
    "keep_cache": "its turns are read anew",
}
_ON_VLLM = {  # flags that are refused with vLLM: reason, or what to do instead
    **{name: _ON_TORCH[name] for name in ("adapter_path", "row_cache", "row_cache_bytes")},
    **dict.fromkeys(("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"), "vLLM has the keys and values"),
    **dict.fromkeys(("draft", "draft_model", "draft_exact"), "with hypertokens vLLM proposes no ids"),
    **dict.fromkeys(
        ("session_cache", "session_disk_bytes", "session_files", "prompt_cache_bytes"),
        "vLLM's prefix cache has the keys and values of conversations, and they cannot be written to a file",
    ),
    "prefill_step_size": "vLLM cuts prompts itself: --vllm-args '{\"max_num_batched_tokens\": 2048}'",
}
REFUSED = {TORCH: _ON_TORCH, CUDA: _ON_TORCH, VLLM: _ON_VLLM}  # engine -> flag that it refuses -> reason
RANK_VARIABLE = "MLX_RANK"  # environment variable that mlx.launch sets to the rank of the process
_NEUTRAL_VALUES = {
    "row_cache": ("off",),
    "session_cache": ("off",),
    "keep_cache": (False,),
    "kv_group_size": (64,),
    "quantized_kv_start": (5000,),
    "draft": ("off",),
    "draft_exact": (False,),
    "prompt_cache_bytes": (4 << 30,),
    "session_disk_bytes": (16 << 30,),
    "prefill_step_size": (2048,),
}  # values of a refused flag that are accepted, because they change nothing
_NOT_IN_VLLM_ARGS = {  # argument of vLLM that --vllm-args must not hold -> what sets it
    "model": "--model",
    "max_num_seqs": "--decode-concurrency",
    "trust_remote_code": "--trust-remote-code",
    "hf_overrides": "the model's config.json",
    "tokenizer": "the model's folder",
    "skip_tokenizer_init": "mlx_zip, which has the tokenizer",
}


def add_engine_flag(add: Any, names: Sequence[str] = ENGINE_NAMES) -> None:
    """Declares --engine. names: the engines to choose from; `SERVING_NAMES` for a command that can run on vLLM."""
    vllm = " vllm: vLLM, for many requests at a time, on one card or several;" if VLLM in names else ""
    add(
        "--engine",
        choices=names,
        default=AUTO,
        help="library that runs the model. mlx: MLX; torch: PyTorch, on an NVIDIA card if there is one, else on the "
        f"CPU; cuda: PyTorch on an NVIDIA card only;{vllm} auto: mlx or torch, whichever is installed; if both are: "
        f"mlx on a Mac, in a run of mlx.launch, for a model below {SMALL_MB} MB, and for a flag or model that torch "
        "does not support; else torch (default: auto)",
    )


def is_torch_engine(args: argparse.Namespace) -> bool:
    """Returns whether --engine is torch or cuda."""
    return args.engine in (TORCH, CUDA)


def choose_engine(args: argparse.Namespace, *models: Any, group: Any = None) -> None:
    """Replaces --engine auto in `args` by mlx or torch, and prints the reason if the choice may surprise the user.

    models: folders, hub ids or bundled models to run, downloaded if necessary; None is skipped. group: the machines of
    this run, None for one. Raises `ModelError` if a model is unknown or a name is empty, `ConfigError` if MLX does not
    have the device that MLX_ZIP_DEVICE names, and `GenerationError` if only torch is installed and refuses a flag.
    """
    if "" in models:
        raise ModelError("the name of the model is empty")
    if args.engine != AUTO:
        return
    args.engine, why = _pick_engine(args, [one for one in models if one is not None], group)
    check_engine_flags(args)
    if why is not None:
        print(f"engine: {args.engine}, {why}", file=sys.stderr)
    if args.engine == MLX:
        set_device_from_environment()


def _pick_engine(args: argparse.Namespace, models: Sequence[Any], group: Any) -> tuple[str, str | None]:
    """Returns the engine to use and the reason to print, None to print nothing."""
    if find_spec("torch") is None or group is not None or RANK_VARIABLE in os.environ:
        return MLX, None
    if find_spec("mlx") is None:
        return TORCH, "because MLX is not installed"
    if sys.platform == "darwin":
        return MLX, None
    folders = [find_model_folder(model, getattr(args, "revision", None)) for model in models]
    if folders and max(map(_weight_bytes, folders)) < SMALL_MB << 20:
        return MLX, None
    if (flag := next(_flags_refused_by_engine(args), None)) is not None:
        return MLX, f"because torch does not take --{flag.replace('_', '-')}"
    for folder in folders:
        if (reason := why_not_on_torch(read_model_config(folder))) is not None:
            return MLX, f"because torch does not run {reason}"
    return TORCH, "usually the faster one on this system (--engine mlx takes MLX)"


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def _flags_refused_by_engine(args: argparse.Namespace) -> Iterator[str]:
    """Yields the flags in `args` that the engine refuses; with --engine auto, those that PyTorch refuses."""
    for name in REFUSED.get(args.engine, _ON_TORCH):
        if (given := getattr(args, name, None)) is not None and given not in _NEUTRAL_VALUES.get(name, ()):
            yield name


def check_engine_flags(args: argparse.Namespace) -> None:
    """Raises `GenerationError` if the engine refuses a flag, or runs on one machine and the run has several."""
    if args.engine != VLLM and getattr(args, "vllm_args", None) is not None:
        raise GenerationError(f"--vllm-args cannot be used with --engine {args.engine}: name --engine vllm")
    if args.engine not in REFUSED:
        return
    if RANK_VARIABLE in os.environ:
        several = "vLLM starts several itself" if args.engine == VLLM else "mlx.launch runs a model on several with mlx"
        raise GenerationError(f"--engine {args.engine} runs on one machine; {several}")
    if (name := next(_flags_refused_by_engine(args), None)) is not None:
        flag = name.replace("_", "-")
        raise GenerationError(f"--{flag} cannot be used with --engine {args.engine}: {REFUSED[args.engine][name]}")


def connect_machines_of_run(args: argparse.Namespace) -> Any:
    """Returns the machines of this run, None for one. Raises `MachineError` if a machine cannot be reached."""
    if args.engine in REFUSED or (args.engine == AUTO and find_spec("mlx") is None):
        return None
    from mlx_zip.models.machines import connect_machines

    return connect_machines()


def open_row_store(args: argparse.Namespace) -> Any:
    """Returns a context manager that yields the row store set by flags, or None if the engine has its own store."""
    from mlx_zip.cli import row_cache

    return nullcontext() if args.engine in REFUSED else row_cache.open_row_cache(args)


def open_vllm_engine(name: Any, vllm_args: Mapping[str, Any], **options: Any) -> Any:
    """Returns the engine of a model on vLLM. vllm_args: --vllm-args. options: those of `mlx_zip.vllm.engine`.

    Raises `InstallationError` if vLLM is not installed, `GenerationError` if --vllm-args holds an argument that mlx_zip
    sets, `EngineError` if vLLM does not start.
    """
    if found := next((one for one in vllm_args if one in _NOT_IN_VLLM_ARGS), None):
        raise GenerationError(f"--vllm-args: {found!r} is set by {_NOT_IN_VLLM_ARGS[found]}")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if find_spec("vllm") is None:
        raise missing_library_error("--engine vllm", "vllm", extra=VLLM)
    from mlx_zip.vllm.engine import open_vllm_engine

    try:
        return open_vllm_engine(name, vllm_args=vllm_args, **options)
    except MlxZipError:
        raise
    except (RuntimeError, ValueError) as error:  # vLLM raises these for wrong arguments and devices
        raise EngineError(f"vLLM does not start: {' '.join(str(error).split())}") from error


def open_torch_engine(name: Any, engine: str, **options: Any) -> Any:
    """Returns the engine of a model on PyTorch. engine: "torch", or "cuda" to require a GPU.

    options: those of `open_cuda_engine`. Raises `InstallationError` if a library is not installed, `ModelError` if a
    GPU is required and none is usable.
    """
    module = import_torch_module("engine", engine)
    device = module.device_from_environment(needs_card=engine == CUDA)  # before anything is downloaded
    return module.open_cuda_engine(name, device=device, **options)


def import_torch_module(name: str, engine: str) -> Any:
    """Returns the module `mlx_zip.cuda.<name>`. Raises `InstallationError` if a library of `engine` is missing."""
    needed = LIBRARIES if engine == CUDA else LIBRARIES[:1]
    return import_or_explain(f"mlx_zip.cuda.{name}", f"--engine {engine}", *needed, extra=engine, implied=LIBRARIES)
