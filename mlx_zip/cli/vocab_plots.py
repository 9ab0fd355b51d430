"""--plot FILE of the `vocab` commands: one picture per command, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.cli.actions import writable
from mlx_zip.errors import DataError

SUFFIXES = (".svg", ".png")
Points = Sequence[tuple[float, float]]


def add_plot(add: Any, what: str) -> None:
    """Declares --plot; what: a noun for the picture."""
    add("--plot", metavar="FILE", help=f"draw {what} to a .svg or .png file (needs matplotlib)")


def plot_file(name: str | None, read: Iterable[str | Path | None] = ()) -> Path | None:
    """Returns the path of --plot, None without the flag. read: other files of the command.

    Raises `DataError` for another suffix and a file that cannot be written, `InstallationError` without matplotlib.
    """
    if name is None:
        return None
    from mlx_zip.training.curves import load_matplotlib

    if Path(name).suffix not in SUFFIXES:
        raise DataError(f"--plot {name}: a plot is a {' or '.join(SUFFIXES)} file")
    load_matplotlib()
    return writable("--plot", name, read=read)


def draw_curves(path: Path, curves: Mapping[str, Points], axes: tuple[str, str], scale: str = "linear") -> None:
    """Draws one line per curve, with a legend if there are several. axes: labels of x and y. scale: of both axes."""
    figure, axis = _new(axes)
    for name, points in curves.items():
        axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 40 else None)
    axis.set(xscale=scale, yscale=scale)
    axis.grid(alpha=0.3)
    _finish(path, figure, axis, len(curves) > 1)


def draw_bars(path: Path, bars: Mapping[str, Mapping[str, float]], axes: tuple[str, str]) -> None:
    """Draws bars side by side: bars[series][group] is a height. axes: labels of the groups and the heights."""
    figure, axis = _new(axes)
    groups = list(next(iter(bars.values())))
    width = 0.8 / len(bars)
    for i, (name, heights) in enumerate(bars.items()):
        axis.bar([at + i * width for at in range(len(groups))], [heights[g] for g in groups], width, label=name)
    axis.set_xticks([at + width * (len(bars) - 1) / 2 for at in range(len(groups))], groups)
    _finish(path, figure, axis, len(bars) > 1)


def _new(axes: tuple[str, str]) -> tuple[Any, Any]:
    from mlx_zip.training.curves import load_matplotlib

    figure = load_matplotlib()[0](figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=axes[0], ylabel=axes[1])
    return figure, axis


def _finish(path: Path, figure: Any, axis: Any, legend: bool) -> None:
    from mlx_zip.files import whole_file

    if legend:
        axis.legend()
    try:
        with whole_file(path) as partial:
            figure.savefig(partial, format=path.suffix[1:], dpi=120)
    except OSError as error:
        raise DataError(f"--plot {path}: {error.strerror or error}") from error
