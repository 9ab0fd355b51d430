"""Makes mlx_lm able to load converted models and saved caches, without importing it.

mlx_lm looks a model class up as the module `mlx_lm.models.<model_type>`, and a saved cache entry as an attribute of
`mlx_lm.models.cache`. So a light module that loads its names on demand stands under the first name from the start,
and `ZipState` is set on the second as soon as that module has been imported by anyone.
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
    """Stands for `mlx_lm.models.zip2zip`: `Model` and `ModelArgs` come from `mlx_zip.models` when asked for."""

    def __getattr__(self, name: str) -> Any:
        if name in ("Model", "ModelArgs"):
            return getattr(import_module("mlx_zip.models"), name)
        raise AttributeError(name)


class _CacheFinder(importlib.abc.MetaPathFinder):
    """Finds `mlx_lm.models.cache` as Python would, and hands it `ZipState` after its code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _CACHE_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CacheLoader(spec.loader)
        return spec


class _CacheLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _hand_over(module)


def _hand_over(cache_module: Any) -> None:
    cache_module.ZipState = import_module("mlx_zip.state").ZipState


def register() -> None:
    """Registers once; called by `import mlx_zip`, and harmless when called again."""
    if _MODEL_MODULE in sys.modules:
        return
    module = _ModelModule(_MODEL_MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(_MODEL_MODULE, None)
    sys.modules[_MODEL_MODULE] = module
    if _CACHE_MODULE in sys.modules:
        _hand_over(sys.modules[_CACHE_MODULE])
    else:
        sys.meta_path.insert(0, _CacheFinder())
