"""The engines' names, which docs/bench.md explains: checks them, and makes engines by their names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from mlx_zip.errors import MlxZipError, missing_library_error

from .interface import Engine
from .shape_table import Models

ENGINES = {  # name: libraries that the engine needs
    "mlx-lm": ("mlx",),
    "mlx-zip": ("mlx",),
    "torch-zip": ("torch",),
    "torch-base": ("torch",),
    "vllm-zip": ("vllm",),
    "vllm-base": ("vllm",),
    **dict.fromkeys(("hf", "hf-float32", "hf-bfloat16"), ("torch", "transformers")),
    "zip2zip": ("torch", "zip2zip"),
}
CHOOSING = ("vllm-zip", "vllm-base")  # engines that emit only the ids that they choose, and so cannot replay a text


def check_engine_names(names: Sequence[str]) -> None:
    """Raises `MlxZipError` if an engine is unknown or named twice, `InstallationError` if its libraries are missing."""
    for at, name in enumerate(names):
        if name not in ENGINES:
            raise MlxZipError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
        if name in names[:at]:
            raise MlxZipError(f"engine {name} is named twice")
        missing = [library for library in ENGINES[name] if find_spec(library) is None]
        if missing:
            raise missing_library_error(f"engine {name}", *missing)


def engines_need_mlx(names: Sequence[str]) -> bool:
    """Returns whether any of these engines needs MLX.

    If MLX is installed, engines on transformers and the published package do, because they then use models made in MLX.
    """
    if find_spec("mlx") is None:
        return any(name.startswith("mlx-") for name in names)
    return any(not name.startswith(("torch-", "vllm-")) for name in names)


def make_engine(name: str, models: Models, options: Any) -> Engine:
    """Returns the engine called `name`, which must have passed `check_engine_names`.

    options: the flags of `bench generate`, of which engines read `published` and `vllm_args`. Raises `MlxZipError` if
    the engine cannot run these models.
    """
    if name.startswith("torch-"):
        from .cuda_engines import TorchEngine  # torch is an extra

        return TorchEngine(name, models)
    if name.startswith("vllm-"):
        from .vllm_engines import VllmBenchEngine  # vLLM is an extra

        return VllmBenchEngine(name, models, options.vllm_args)
    if name.startswith("mlx-"):
        from .mlx_engines import MlxLm, MlxZip

        return MlxLm(models) if name == "mlx-lm" else MlxZip(models)
    from .torch_engines import PublishedZip2zipEngine, TransformersEngine

    return PublishedZip2zipEngine(models, options.published) if name == "zip2zip" else TransformersEngine(models, name)
