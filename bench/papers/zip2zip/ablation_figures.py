"""Figures 5 and 6 of the paper, from the recorded lines: training loss against bytes read, a curve per setting."""

from __future__ import annotations

from pathlib import Path

from mlx_zip.errors import missing_library
from mlx_zip.files import whole_file

from .ablation_results import Sweep

PANELS = ((1, "nats per id"), (2, "bits per byte"))  # where in a point of a curve, what


def draw(path: Path, sweep: Sweep) -> None:
    """One figure as PNG, at `path` whole or not at all; several seeds are several lines of one colour.

    Nats per id are what the paper draws; an id of a compressed text stands for more of it, so bits per byte are what
    compares. Raises `InstallationError` without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library("the figure", "matplotlib", extra="bench") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (column, label) in zip(figure.subplots(1, 2), PANELS, strict=True):
        for i, (key, lines) in enumerate(sweep.found.items()):
            for j, line in enumerate(lines):
                curve = line["training"]["curve"]
                points = [point[0] / 1e6 for point in curve], [point[column] for point in curve]
                panel.plot(*points, color=f"C{i}", linewidth=1, label=None if j else sweep.label(key))
        panel.set(xlabel="text read, MB", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"Training loss by {sweep.name}")
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
