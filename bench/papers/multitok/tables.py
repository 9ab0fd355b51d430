"""The tables of docs/multitok.md as `mlx_zip.bench.pages` writes them."""

from __future__ import annotations

from collections.abc import Callable

from mlx_zip.bench.records import Record, Records

from . import multitok_page

NAMES = ("multitok", "classify", "packs-multitok")


def _lines(records: Records) -> list[Record]:
    return [line for name in NAMES for line in records.lines(name)]


TABLES: dict[str, Callable[[Records], str]] = {
    name: lambda records, make=make: make(_lines(records)) for name, make in multitok_page.TABLES.items()
}
PICTURES = {}
