"""Writes a run's log (one JSON line per report or validation), and plots it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_zip.errors import TrainingError, errors_as, missing_library_error
from mlx_zip.files import atomic_file, check_regular_file

METRICS_FILE = "metrics.jsonl"
_PANELS = (
    ("bits_per_byte", "bits per byte"),
    ("loss", "nats per id"),
    ("learning_rate", "learning rate"),
    ("bytes_per_s", "bytes/s"),
)


class MetricsLog:
    """A run's log file, one JSON object per line. step: step at which the run resumes; later lines are removed."""

    def __init__(self, run: Path, step: int) -> None:
        self.path = run / METRICS_FILE
        kept = [line for line in read_metrics(run) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        with errors_as(TrainingError, f"cannot write {self.path}", OSError), atomic_file(self.path) as partial:
            partial.write_text(text, encoding="utf-8")

    def add(self, **values: Any) -> None:
        """Appends one line to the file, at once on disk. Raises `TrainingError` if the file cannot be written."""
        with (
            errors_as(TrainingError, f"cannot write {self.path}", OSError),
            open(self.path, "a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(values) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's log up to the first damaged line, such as a last line cut short by a crash.

    Raises `DataError` if the log is not a regular file.
    """
    path = run / METRICS_FILE
    if not path.exists():
        return []
    check_regular_file(path)
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


def plot_training_curves(run: Path) -> Path:
    """Draws loss, bits per byte, learning rate and speed from the run's log; returns the path of `curves.png`.

    Each of the four panels shows one quantity by optimizer step, in training and in validation. Raises `TrainingError`
    if the log is empty, and `InstallationError` if matplotlib is missing.
    """
    lines = read_metrics(run)
    if not lines:
        raise TrainingError(f"{run / METRICS_FILE} has no lines to draw")
    figure_class, canvas = load_matplotlib()
    figure = figure_class(figsize=(10, 6), layout="constrained")
    canvas(figure)
    for panel, (key, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for name, label_of in ((key, "training"), (f"val_{key}", "validation")):
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), label=label_of, linewidth=1)
        panel.set(xlabel="step", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    path = run / "curves.png"
    figure.savefig(path, dpi=120)
    return path


def load_matplotlib() -> tuple[Any, Any]:
    """Returns matplotlib's classes for figure and canvas. Raises `InstallationError` if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library_error("--plot", "matplotlib", extra="bench") from error
    return Figure, FigureCanvasAgg
