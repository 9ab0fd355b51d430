"""The picture of the report on packs: bits per byte against base ids per id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_zip.bench.plots import new_figure
from mlx_zip.bench.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture(lines: Sequence[Record]) -> Figure:
    """Returns a figure of bits per byte against base ids per id, from lines of `bench pack_quality`.

    Each curve begins at the model without a pack; the dotted line is the base model. Bars are standard errors over
    documents. Raises `InstallationError` without matplotlib.
    """
    figure = new_figure()
    panel = figure.subplots()
    empty = [line for line in lines if line["curve"] == "empty"]
    curves = dict.fromkeys(line["curve"] for line in lines if line["curve"] != "empty")
    for n, curve in enumerate(curves):
        points = sorted([*empty, *(line for line in lines if line["curve"] == curve)], key=lambda line: line["entries"])
        x, y = ([line[name] for line in points] for name in ("base_ids_per_id", "bits_per_byte"))
        errors = [line["bits_per_byte_standard_error"] or 0 for line in points]
        panel.errorbar(x, y, errors, color=f"C{n}", marker="o", capsize=3, label=f"packs {curve}")
        for line, at in zip(points, zip(x, y, strict=True), strict=True):
            panel.annotate(f"{line['entries']:,}", at, textcoords="offset points", xytext=(6, -12))
    panel.axhline(lines[0]["base_bits_per_byte"], color="black", linestyle=":", label=lines[0]["base"])
    panel.set(xlabel="base ids per id", ylabel="bits per byte", title=f"{lines[0]['model']}, {lines[0]['data']}")
    panel.grid(alpha=0.3)
    panel.legend()
    return figure
