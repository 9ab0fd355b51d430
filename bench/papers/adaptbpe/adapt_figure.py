"""The picture of docs/adaptbpe.md: what is lost by the share of the merges that stay, from the recorded lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_zip.bench.records import Records
from mlx_zip.errors import MlxZipError, missing_library
from mlx_zip.files import whole_file

from .tables import METHODS, TEXTS, groups

ROOT = Path(__file__).resolve().parents[3]
PANELS = ("compression utility", "bits per byte")


def draw(path: Path, root: Path = ROOT) -> None:
    """Writes the SVG of the record's first text and model, whole or not at all.

    Raises `InstallationError` without matplotlib, `MlxZipError` for a record or a path that cannot be used.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library("the figure", "matplotlib", extra="bench") from error
    found = groups(Records(root).lines("adapt_model"))
    if not found:
        raise MlxZipError("adapt_model.jsonl has no line to draw")
    (text, _), shares = next(iter(found.items()))
    with matplotlib.rc_context({"svg.hashsalt": "mlx_zip", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 3), layout="constrained")
        FigureCanvasSVG(figure)
        for panel, label in zip(figure.subplots(1, 2), PANELS, strict=True):
            key = "utility" if label == PANELS[0] else "bits_per_byte"
            for method, name in METHODS.items():
                panel.plot(*_curve(shares, method, key), marker=".", label=name)
            panel.set(xlabel="merges kept, %", ylabel=label)
            panel.grid(alpha=0.3)
            panel.legend()
        figure.suptitle(f"{shares[1]['whole list']['model']}, {TEXTS.get(text, text)}")
        try:
            with whole_file(path) as partial:
                figure.savefig(partial, format="svg", metadata={"Date": None})
        except OSError as error:
            raise MlxZipError(f"{path} cannot be written: {error.strerror or error}") from error


def _curve(shares: Any, method: str, key: str) -> tuple[list[float], list[float]]:
    """Percent of the merges and what they give, the whole list last."""
    points = [(100 * share, methods[method][key]) for share, methods in shares.items() if method in methods]
    points.append((100, shares[1]["whole list"][key]))
    x, y = zip(*sorted(points), strict=True)
    return list(x), list(y)
