"""Stands for transformers while types are checked: reading its 2,800 modules took half of pyright's time."""

from typing import Any

def __getattr__(name: str) -> Any: ...
