"""Converts zip2zip checkpoints and PEFT adapters to mlx-lm folders, and mlx_zip models back.

`convert` is imported when it is first used, so that the command line can list its flags without importing MLX.
"""

from importlib import import_module
from typing import Any

__all__ = ["convert"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("mlx_zip.converters.conversion"), name)
