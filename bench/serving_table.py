"""The table of `bench serve`: each figure with its target, and whether the median meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .dialects import DIALECTS
from .tables import table

MOST_GROWN = 16  # MiB, by prompts of megabytes after the first ones
LEAST_CACHED = 0.95  # of the prompt of a later turn


@dataclass(frozen=True)
class Line:
    """One figure. bound: its target, None without one. most: the target is an upper bound. form: how both are shown."""

    name: str
    value: float
    form: str
    bound: float | None = None
    most: bool = True

    def row(self) -> list[str]:
        """Returns name, figure, target and verdict."""
        shown = self.form.format(self.value)
        if self.bound is None:
            return [self.name, shown, "-", "-"]
        is_met = self.value <= self.bound if self.most else self.value >= self.bound
        target = f"{'at most' if self.most else 'at least'} {self.form.format(self.bound)}"
        return [self.name, shown, target, "met" if is_met else "missed"]


def serving_table(record: Mapping[str, Any]) -> str:
    """Returns the figures of a record as a table; they are medians."""
    return table(("figure", "measured", "target", ""), [line.row() for line in _lines(record)])


def _lines(record: Mapping[str, Any]) -> Iterator[Line]:
    """Yields the figures of a record."""
    figures = record["figures"]
    one = figures["one_stream"]
    yield Line("one stream: time added to `generate`'s", one["overhead"]["median"], "{:.1%}", 0.1)
    yield Line("first text after the first id", one["first_byte_ms"]["median"], "{:.1f} ms", 20)
    yield Line("two prompts: time to first text over one's", figures["two_prompts"]["ratio"]["median"], "{:.2f}", 2.2)
    if "huge_prompts" in figures:  # older records have none
        yield from _huge(figures["huge_prompts"])
    yield from _streams(f"{record['setting']['streams']} streams", figures["streams"])
    for when, shares in figures["second_turn"].items():
        for dialect in DIALECTS:
            yield Line(f"cached, {when}, {dialect.name}", shares[dialect.name], "{:.1%}", LEAST_CACHED, most=False)


def _huge(found: Mapping[str, Any]) -> Iterator[Line]:
    """Yields the figures of prompts of megabytes."""
    yield Line("a prompt of 30 MiB is refused after", found["refused_ms"]["median"], "{:.0f} ms", 100)
    yield Line("a small chat beside four prompts of 4 MiB is late by", found["delay_ms"]["median"], "{:.0f} ms", 100)
    if found["growth_bytes"] is not None:
        yield Line("memory grows by", found["growth_bytes"] / 2**20, "{:.0f} MiB", MOST_GROWN)


def _streams(name: str, servers: Mapping[str, Any]) -> Iterator[Line]:
    """Yields the figures of several streams at a time. servers: figures by server: "zip", "base", "mlx-lm"."""
    for server, found in servers.items():
        yield Line(f"{name}, {server}: base tokens/s", found["streams"]["median"], "{:,.0f}")
        yield Line(f"{name}, {server}: over one stream's", found["gain"]["median"], "{:.2f}")
        bound = 1.5 if server == "zip" else None
        yield Line(f"{name}, {server}: most progress over least", found["unfairness"]["median"], "{:.2f}", bound)
    quotient = servers["zip"]["gain"]["median"] / servers["base"]["gain"]["median"]
    yield Line(f"{name}: gain of zip over base's", quotient, "{:.2f}", 0.9, most=False)
