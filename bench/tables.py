"""Writes rows of cells as Markdown or CSV tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

FORMATS = ("markdown", "csv")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "markdown") -> str:
    """Returns header and rows as Markdown or CSV (`FORMATS`); every row has as many cells as the header."""
    return _csv([header, *rows]) if kind == "csv" else _markdown(header, rows)


def _csv(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as CSV, without a last line end."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().rstrip("\n")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns header and rows as a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)


def _escaped(cell: str) -> str:
    """Returns a cell with its bars escaped, which would end it in Markdown."""
    return cell.replace("|", "\\|")
