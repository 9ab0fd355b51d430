"""Converts zip2zip checkpoints and PEFT adapters to mlx-lm folders, and mlx_zip models back.

Names are imported when they are first used, so that the command line can list its flags without importing MLX.
"""

from importlib import import_module
from typing import Any

_HOMES = {"convert": "mlx_zip.converters.conversion", "make_named_model": "mlx_zip.converters.named"}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
