"""Exports models in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_zip.converters import export as module


def export(model: Path, out: Path, **options: Any) -> Path:
    return module.export(str(model), out, progress=False, **options)
