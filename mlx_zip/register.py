"""Lets mlx_lm load converted models and saved caches, without importing mlx_lm.

mlx_lm looks up a model class in the module `mlx_lm.models.<model_type>`, and the class of a saved cache entry in
`mlx_lm.models.cache`. So a small module is registered as `mlx_lm.models.zip2zip`, which imports its classes when they
are first used, and `ZipState` is added to `mlx_lm.models.cache` as soon as that module is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

MODEL_TYPE = "zip2zip"
_MODEL_MODULE = f"mlx_lm.models.{MODEL_TYPE}"
_CACHE_MODULE = "mlx_lm.models.cache"


class _ModelModule(ModuleType):
    """The module `mlx_lm.models.zip2zip`: imports `Model` and `ModelArgs` from `mlx_zip.models` on first use."""

    def __getattr__(self, name: str) -> Any:
        if name in ("Model", "ModelArgs"):
            return getattr(import_module("mlx_zip.models"), name)
        raise AttributeError(name)


class _CacheFinder(importlib.abc.MetaPathFinder):
    """Finds `mlx_lm.models.cache` as Python would, and adds `ZipState` to it after its code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the cache module's spec with `_CacheLoader` as its loader; None for any other module."""
        if name != _CACHE_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CacheLoader(spec.loader)
        return spec


class _CacheLoader(importlib.abc.Loader):
    """Loads `mlx_lm.models.cache` with Python's own loader, then adds `ZipState` to it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _add_zip_state(module)


def _add_zip_state(cache_module: Any) -> None:
    """Adds `ZipState` to mlx_lm's cache module, where mlx_lm looks for the classes of saved cache entries."""
    cache_module.ZipState = import_module("mlx_zip.state").ZipState


def register() -> None:
    """Registers the model module and `ZipState` with mlx_lm. `import mlx_zip` calls this; further calls do nothing."""
    if _MODEL_MODULE in sys.modules:
        return
    module = _ModelModule(_MODEL_MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(_MODEL_MODULE, None)
    sys.modules[_MODEL_MODULE] = module
    if _CACHE_MODULE in sys.modules:
        _add_zip_state(sys.modules[_CACHE_MODULE])
    else:
        sys.meta_path.insert(0, _CacheFinder())
