"""Asserts that a conversion is refused and leaves no files behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_zip.errors import MlxZipError
from support.converting import convert


def assert_refused(tmp_path: Path, culprit: str, **options: Any) -> None:
    """Asserts that converting tmp_path/src fails with one line that matches and leaves no files behind."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(MlxZipError, match=culprit) as caught:
        convert(tmp_path / "src", tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
