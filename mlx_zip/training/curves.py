"""Curves of a run, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_zip.errors import missing_library

FILE = "curves.png"
PANELS = (
    ("bits_per_byte", "bits per byte"),
    ("loss", "nats per id"),
    ("learning_rate", "learning rate"),
    ("bytes_per_s", "bytes/s"),
)


def load_matplotlib() -> tuple[Any, Any]:
    """Returns matplotlib's classes for a figure and its canvas. Raises `InstallationError` without the library."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library("--plot", "matplotlib", extra="bench") from error
    return Figure, FigureCanvasAgg


def draw(run: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Draws `curves.png` in the run's folder and returns its path. lines: the run's log.

    Each of the four panels shows one quantity over the optimizer steps, in training and in validation.
    """
    figure_class, canvas = load_matplotlib()
    figure = figure_class(figsize=(10, 6), layout="constrained")
    canvas(figure)
    for panel, (key, label) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for name, label_of in ((key, "training"), (f"val_{key}", "validation")):
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), label=label_of, linewidth=1)
        panel.set(xlabel="step", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    path = run / FILE
    figure.savefig(path, dpi=120)
    return path
