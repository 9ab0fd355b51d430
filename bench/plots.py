"""Pictures by matplotlib; equal figures give equal bytes, so that `pages --check` detects an outdated picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import missing_library_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STABLE: dict[Any, Any] = {"svg.hashsalt": "mlx_zip", "svg.fonttype": "none"}  # fixed ids; text is not drawn as paths


@dataclass(frozen=True)
class Curve:
    """A named line through points (x, y), from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One chart: the labels of its axes x and y, and its curves."""

    x: str
    y: str
    curves: Sequence[Curve]


def new_figure(width: float = 10, height: float = 4) -> Figure:
    """Returns an empty figure of width x height inches. Raises `InstallationError` if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library_error("a picture", "matplotlib", extra="bench") from error
    return Figure(figsize=(width, height), layout="constrained")


def line_charts(panels: Sequence[Panel]) -> Figure:
    """Draws line charts side by side. Curves of equal name share a colour and an entry in the legend below."""
    figure = new_figure(3.6 * len(panels), 3.8)
    colours: dict[str, str] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for curve in panel.curves:
            label = curve.name if curve.name not in colours else None
            colour = colours.setdefault(curve.name, f"C{len(colours)}")
            x, y = zip(*curve.points, strict=True)
            axes.plot(x, y, color=colour, marker="o", markersize=3, linewidth=1.5, label=label)
        axes.set(xlabel=panel.x, ylabel=panel.y)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(len(colours), 2 * len(panels)), fontsize=9)
    return figure


def render_figure(figure: Figure, suffix: str) -> bytes:
    """Returns the figure as the bytes of an .svg or .png file; equal figures give equal bytes."""
    import matplotlib

    out = BytesIO()
    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context(STABLE):
        figure.savefig(out, format=suffix[1:], dpi=120, metadata=metadata)
    return out.getvalue()
