"""The table of `bench batch`: base tokens/s of one stream and of a batch, with and without hypertokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .records import Record, libraries
from .tables import table

KINDS = ("base", "zip")  # the plain model, and the one with hypertokens
SCOPES = {"whole": "whole requests", "all_open": "while all rows are open"}  # section of the figures: its name
HEADS = (
    "model",
    "hyper rows",
    "requests",
    "base tokens/s over",
    "one stream",
    "batch",
    "gain of batching",
    "over its base's",
    "preloaded; BLAS",
)


def batch_table(records: Sequence[Record]) -> str:
    """Returns a table with a row per record, model and scope of the figures; intervals are of 95 %."""
    return table(HEADS, [row for record in records for row in _rows(record)])


def _rows(record: Record) -> list[list[str]]:
    """Returns the rows of one record."""
    rows = []
    for scope, name in SCOPES.items():
        figures = record["figures"][scope]
        for kind in KINDS if figures else ():
            gain, setting = figures[kind]["gain"], record["setting"]
            rows.append(
                [
                    f"`{record['model'][kind]}`",
                    setting["rows"] if kind == "zip" else "-",
                    str(setting["requests"]),
                    name,
                    *(f"{figures[kind][way]['median']:,.0f}" for way in ("one_stream", "batch")),
                    _interval(gain),
                    _interval(figures["quotient"]) if kind == "zip" else "-",
                    libraries(record),
                ]
            )
    return rows


def _interval(figure: Mapping[str, Any]) -> str:
    """Returns a figure's median with its interval."""
    return f"{figure['median']:.2f} ({figure['low']:.2f} to {figure['high']:.2f})"
