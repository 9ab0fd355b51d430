"""Stands for transformers while types are checked: reading its 2,800 modules took half of the time."""

from typing import Any

def __getattr__(name: str) -> Any: ...
