"""The picture of the AdaptBPE report: compression utility and bits per byte by the share of merges that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_zip.bench.plots import new_figure
from mlx_zip.bench.records import Records
from mlx_zip.errors import MlxZipError

from .lines import METHODS, TEXTS, groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {"compression utility": "utility", "bits per byte": "bits_per_byte"}


def picture(records: Records) -> Figure:
    """Returns a figure of utility and of bits per byte by share of merges kept, a curve per method.

    It shows the first text and model in the record `adapt_model`. Raises `InstallationError` without matplotlib,
    `MlxZipError` for a record without lines.
    """
    found = groups(records.lines("adapt_model"))
    if not found:
        raise MlxZipError("adapt_model.jsonl has no line to draw")
    (text, _), shares = next(iter(found.items()))
    figure = new_figure(8, 3)
    for panel, (label, key) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for method, name in METHODS.items():
            panel.plot(*_curve(shares, method, key), marker=".", label=name)
        panel.set(xlabel="merges kept, %", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"{shares[1]['whole list']['model']}, {TEXTS.get(text, text)}")
    return figure


def _curve(shares: Any, method: str, key: str) -> tuple[list[float], list[float]]:
    """Returns the points of one method: per cent of merges kept (rising up to 100), and the value of `key` for each.

    shares: recorded lines by share kept and method, as `groups` returns them.
    """
    points = [(100 * share, methods[method][key]) for share, methods in shares.items() if method in methods]
    points.append((100, shares[1]["whole list"][key]))
    x, y = zip(*sorted(points), strict=True)
    return list(x), list(y)
