"""One check of the selftest: its result, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_zip.errors import MlxZipError

PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "numpy")  # libraries whose versions are reported


@dataclass(frozen=True)
class Check:
    """A check's result. name: what was checked. passed: None for a measurement. figure: the result as text."""

    name: str
    passed: bool | None
    figure: str


def run_check(name: str, check: Callable[[], tuple[bool | None, str]]) -> Check:
    """Runs one check and returns its result; an error of the library, device or files counts as a failed check."""
    try:
        passed, figure = check()
    except (MlxZipError, OSError, RuntimeError, ValueError) as error:
        passed, figure = False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Check(name, passed, figure)
