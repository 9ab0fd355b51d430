"""The flag --plot of the `vocab` commands, and the plots that they draw with matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_zip.cli.actions import checked_output_path
from mlx_zip.errors import DataError, errors_as

SUFFIXES = (".svg", ".png")
Points = Sequence[tuple[float, float]]


def add_plot_flag(add: Any, what: str) -> None:
    """Declares --plot. what: completes "write a plot of ..."."""
    add("--plot", metavar="FILE", help=f"write a plot of {what} to FILE (.svg or .png; needs matplotlib)")


def checked_plot_path(name: str | None, read: Iterable[str | Path | None]) -> Path | None:
    """Returns the path of --plot after checks; None without the flag. read: files that the command reads or writes.

    Raises `DataError` if the suffix is not in `SUFFIXES` or the file cannot be written, `InstallationError` if
    matplotlib is not installed.
    """
    if name is None:
        return None
    from mlx_zip.training.run_folder import load_matplotlib

    if Path(name).suffix not in SUFFIXES:
        raise DataError(f"--plot {name}: a plot is a {' or '.join(SUFFIXES)} file")
    load_matplotlib()
    return checked_output_path("--plot", name, read=read)


def draw_curves(path: Path, curves: Mapping[str, Points], axes: tuple[str, str], scale: str = "linear") -> None:
    """Draws one line per curve, with a legend if there are several.

    curves: name -> points (x, y). axes: labels of the x and y axis. scale: "linear" or "log", for both axes.
    """
    with _drawing(path, axes, len(curves) > 1) as axis:
        for name, points in curves.items():
            axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 40 else None)
        axis.set(xscale=scale, yscale=scale)
        axis.grid(alpha=0.3)


def draw_bars(path: Path, bars: Mapping[str, Mapping[str, float]], axes: tuple[str, str]) -> None:
    """Draws groups of bars: bars[series][group] is the height of a bar. axes: labels of the x and y axis."""
    groups = list(next(iter(bars.values())))
    width = 0.8 / len(bars)
    with _drawing(path, axes, len(bars) > 1) as axis:
        for i, (name, heights) in enumerate(bars.items()):
            axis.bar([at + i * width for at in range(len(groups))], [heights[g] for g in groups], width, label=name)
        axis.set_xticks([at + width * (len(bars) - 1) / 2 for at in range(len(groups))], groups)


@contextmanager
def _drawing(path: Path, axes: tuple[str, str], legend: bool) -> Iterator[Any]:
    """Context manager: yields matplotlib's axis to draw on, then writes the figure. Raises `DataError`."""
    from mlx_zip.files import atomic_file
    from mlx_zip.training.run_folder import load_matplotlib

    figure = load_matplotlib()[0](figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=axes[0], ylabel=axes[1])
    yield axis
    if legend:
        axis.legend()
    with errors_as(DataError, f"--plot {path}", OSError), atomic_file(path) as partial:
        figure.savefig(partial, format=path.suffix[1:], dpi=120)
