"""Checks engine names, and makes engines by their names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from mlx_zip.errors import MlxZipError, missing_library

from .engines import MlxLm, MlxZip
from .lookup import PlainLookup, ZipLookup
from .runs import ENGINES, Engine
from .shape_table import Models

LIBRARIES = {"hf": ("torch", "transformers"), "hf-compiled": ("torch", "transformers"), "zip2zip": ("torch", "zip2zip")}
ONE_REQUEST = ("hf-compiled", "zip2zip")  # engines that cannot continue a conversation


def check_engines(names: Sequence[str]) -> None:
    """Raises `MlxZipError` for an unknown engine or one named twice, `InstallationError` if libraries are missing."""
    for at, name in enumerate(names):
        if name not in ENGINES:
            raise MlxZipError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
        if name in names[:at]:
            raise MlxZipError(f"engine {name} is named twice")
        missing = [library for library in LIBRARIES.get(name, ()) if find_spec(library) is None]
        if missing:
            raise missing_library(f"engine {name}", *missing)


def make_engine(name: str, models: Models, options: Any) -> Engine:
    """Makes the engine called `name`, a name that `check_engines` accepts. options: the flags `draft` and `published`.

    Raises `MlxZipError` if the engine cannot run these models.
    """
    if name.startswith("mlx-zip") and models.zipped is None:
        raise MlxZipError(f"{name} needs a model with hypertokens: --model or --shape")
    if name == "mlx-lm":
        return MlxLm(models, models.plain)
    if name == "mlx-zip":
        return MlxZip(models, models.zipped)  # type: ignore[arg-type]
    if name.endswith("+lookup"):
        return PlainLookup(models, options.draft) if name == "mlx-lm+lookup" else ZipLookup(models, options.draft)
    from .torch_engines import make_torch_engine  # torch is an extra

    return make_torch_engine(name, models, options.published)
