"""Figures 5 and 6 of the paper, from the recorded lines: training loss against bytes read, a curve per setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_zip.bench.plots import new_figure
from mlx_zip.bench.records import Records

from .ablation_results import Results, Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = ((1, "nats per id"), (2, "bits per byte"))  # (index into a point of a training curve, label of the y axis)


def curves(sweep: Sweep) -> Figure:
    """Returns the figure of one sweep: training loss against text read; the seeds of a setting share one colour.

    The paper draws nats per id. An id stands for more text at higher compression, so settings can be compared only by
    bits per byte. Raises `InstallationError` without matplotlib.
    """
    figure = new_figure()
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
    return figure


PICTURES: dict[str, Callable[[Records], Figure]] = {
    "docs/reports/ablations-figure5.svg": lambda records: curves(Results(records.lines("ablations")).sizes),
    "docs/reports/ablations-figure6.svg": lambda records: curves(Results(records.lines("ablations")).encoders),
}
