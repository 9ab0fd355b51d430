"""mlx_zip: language models whose vocabulary grows while they run (zip2zip, arXiv 2506.01084), on MLX.

Names below are loaded when first used, so `import mlx_zip` stays light: it imports none of mlx, mlx_lm,
transformers or torch. Importing it also makes `mlx_lm` able to load converted models (see `mlx_zip.register`).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from mlx_zip.errors import explained_imports
from mlx_zip.register import register

__version__ = "0.1.0"

_HOMES = {
    "CodecParams": "mlx_zip.codec",
    "Codebook": "mlx_zip.codec",
    "compress": "mlx_zip.codec",
    "ZipConfig": "mlx_zip.config",
    "Layout": "mlx_zip.layout",
    "ZipState": "mlx_zip.state",
    "RowStore": "mlx_zip.hyper",
    "load": "mlx_zip.loading",
    "generate": "mlx_zip.generate",
    "stream_generate": "mlx_zip.generate",
    "batch_generate": "mlx_zip.generate",
    "convert": "mlx_zip.converters",
    "CodecError": "mlx_zip.errors",
    "ConfigError": "mlx_zip.errors",
    "ConversionError": "mlx_zip.errors",
    "DataError": "mlx_zip.errors",
    "GenerationError": "mlx_zip.errors",
    "InstallationError": "mlx_zip.errors",
    "MlxZipError": "mlx_zip.errors",
    "ModelError": "mlx_zip.errors",
    "TrainingError": "mlx_zip.errors",
}

__all__ = [*sorted(_HOMES), "register"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mlx_zip' has no attribute {name!r}")
    with explained_imports():
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))


class _Package(ModuleType):
    """`mlx_zip.generate` is the function, as in mlx_lm, also once the module of that name has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "generate" and isinstance(value, ModuleType):
            value = value.generate
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
register()
