"""The tables and pictures of the reports on the zip2zip paper, made from the records."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_zip.bench.records import Records

from . import ablation_tables, codec_figure, compression_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _latency(records: Records) -> Figure:
    lines = records.lines("codec-figure4")
    return codec_figure.latency_figure([line for line in lines if line["data"] == lines[0]["data"]])


TABLES: dict[str, Callable[[Records], str]] = {**ablation_tables.TABLES, **compression_tables.TABLES}
PICTURES: dict[str, Callable[[Records], Figure]] = {
    **ablation_tables.PICTURES,
    "docs/reports/compression-figure4.svg": _latency,
}
