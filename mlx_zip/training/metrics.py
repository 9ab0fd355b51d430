"""The log of a run, one JSON line per report or validation, and the curves drawn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_zip.errors import TrainingError, reason
from mlx_zip.files import check_in, whole_file

FILE = "metrics.jsonl"


class Metrics:
    """The run's log file, one JSON object per line. step: where the run resumes; lines of later steps are removed."""

    def __init__(self, run: Path, step: int) -> None:
        self.path = run / FILE
        kept = [line for line in read_metrics(run) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        try:
            with whole_file(self.path) as partial:
                partial.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TrainingError(f"cannot write {self.path}: {reason(error)}") from error

    def add(self, **values: Any) -> None:
        """Appends one line and closes the file, so that others can read it at once. Raises `TrainingError`."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise TrainingError(f"cannot write {self.path}: {reason(error)}") from error


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's log up to the first damaged one, such as a last line cut short by a crash.

    Raises `DataError` if the log is no ordinary file.
    """
    path = run / FILE
    if not path.exists():
        return []
    check_in(path)
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines


def plot(run: Path) -> Path:
    """Draws loss, bits per byte, learning rate and speed from the run's log; returns the path of `curves.png`.

    Raises `TrainingError` when there is nothing to draw, `InstallationError` without matplotlib.
    """
    from mlx_zip.training.curves import draw

    lines = read_metrics(run)
    if not lines:
        raise TrainingError(f"{run / FILE} has no lines to draw")
    return draw(run, lines)
