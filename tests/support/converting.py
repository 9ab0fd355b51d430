"""Converts checkpoints in tests and reads the results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import mlx_zip.converters as converters


def convert(source: Path, out: Path, **options: Any) -> Path:
    return converters.convert(str(source), out, progress=False, **options)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def loaded(folder: Path) -> tuple[Any, Any]:
    import mlx_lm

    return mlx_lm.load(str(folder))


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def assert_same_tensors(folder: Path, expected: dict[str, np.ndarray]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
