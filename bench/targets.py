"""The speed targets of docs/performance.md: each with its bound, and what the records have for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .ratios import Ratio
from .records import Records, libraries
from .speeds import PUBLISHED, REQUESTS, STORIES, TURNS, detokenizing, per_step, ratio, shortening, step_ratio
from .tables import table


@dataclass(frozen=True)
class Target:
    """A figure of the records and its bound.

    measured: computes the figure. record: name of the record that it comes from. most: True for an upper bound, False
    for a lower one. unit: follows the number.
    """

    name: str
    bound: float
    measured: Callable[[Records], Ratio | float]
    record: str = ""
    most: bool = True
    unit: str = ""

    def row(self, records: Records) -> list[str]:
        """Returns name, libraries, bound, measured figure, and whether its median and interval are within the bound."""
        found = self.measured(records)
        value = found.value if isinstance(found, Ratio) else found
        worst = value if not isinstance(found, Ratio) else found.high if self.most else found.low
        shown = str(found) if isinstance(found, Ratio) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        bound = f"{'at most' if self.most else 'at least'} {self.bound:g}{self.unit}"
        blas = libraries(records.lines(self.record)[0]) if self.record else "-"
        return [self.name, blas, bound, f"{shown}{self.unit}", self._judged(value, worst)]

    def _judged(self, value: float, worst: float) -> str:
        """Returns whether the median is within the bound. worst: the end of its interval that is nearest to failing."""
        is_met, surely = ((x <= self.bound if self.most else x >= self.bound) for x in (value, worst))
        return "missed" if not is_met else "met" if surely else "met; the interval reaches past it"


def _speedup_over_compression(records: Records) -> Ratio:
    """Returns the gain in base tokens/s on code over base tokens per step: 1 if a step is as fast as mlx-lm's."""
    pair = records.pair(REQUESTS["code"])
    return ratio(pair, "base_tokens_per_s").over(per_step(pair))


def _first_id_over_length(records: Records) -> Ratio:
    """Returns the time to the first id on code over mlx-lm's, divided by how much shorter the compressed prompt is."""
    pair = records.pair(REQUESTS["code"])
    return ratio(pair, "ttft_ms").over(shortening(pair))


def _bytes_per_s(turn: int, rows: str) -> Callable[[Records], Ratio]:
    """Returns the measure of a story's bytes/s over the base's. turn: the story, from 0; rows: "cold" or "warm"."""
    return lambda records: ratio(records.pair(STORIES, turn=turn, rows=rows), "bytes_per_s")


def _over_published(precision: str) -> Callable[[Records], Ratio]:
    """Returns the measure of steps/s over the published package's. precision: a key of `PUBLISHED`."""
    return lambda records: ratio(records.pair(PUBLISHED[precision], "zip2zip"), "steps_per_s")


HOST = (("`small-125m`", "profile-warm"), ("bundled model", "profile-stories"))  # name, record

TARGETS = (
    *(
        Target(f"step over mlx-lm's at equal KV length, {name}", bound, lambda r, f=f: step_ratio(r.one(f)), f)
        for name, bound, f in (
            ("bundled model, rows cold", 1.35, "profile-stories-cold"),
            ("bundled model, rows warm", 1.10, "profile-stories"),
            ("`small-125m`, rows cold, two transformer layers", 1.25, "profile-cold-transformer"),
            ("`small-125m`, rows cold, `res_latent_attn`", 1.15, "profile-cold-latent"),
            ("`small-125m`, rows warm", 1.02, "profile-warm"),
        )
    ),
    Target(
        "code, 1,024 + 256, warm: base tokens/s over compression x mlx-lm's",
        0.95,
        _speedup_over_compression,
        REQUESTS["code"],
        most=False,
    ),
    Target(
        "the same: time to first id over mlx-lm's x compressed length", 1.1, _first_id_over_length, REQUESTS["code"]
    ),
    *(
        Target(
            f"bundled model, bytes/s over its base's: {TURNS[turn]} story, {rows}",
            bound,
            _bytes_per_s(turn, rows),
            STORIES,
            most=False,
        )
        for turn in (0, 2)
        for rows, bound in (("cold", 1.5), ("warm", 1.85))
    ),
    *(
        Target(
            f"bundled model, steps/s over the published package's, {name}", 3, _over_published(name), file, most=False
        )
        for name, file in PUBLISHED.items()
    ),
    *(
        Target(
            f"host work of mlx_zip per step, processor time, {name}",
            bound,
            lambda r, file=file: r.one(file)["ours_cpu_us"]["median"],
            file,
            unit=" us",
        )
        for (name, file), bound in zip(HOST, (400, 250), strict=True)
    ),
    *(
        Target(f"detokenizing a base token, {name}", 20, lambda r, f=f: detokenizing(r.one(f)), f, unit=" us")
        for name, f in HOST
    ),
    Target(
        "a lookup among 1 M stored rows of width 256",
        2,
        lambda r: r.one("rows")["lookup_first_us_per_row"]["median"],
        "rows",
        unit=" us",
    ),
    Target("opening them", 200, lambda r: r.one("rows")["open_ms"]["median"], "rows", unit=" ms"),
)


def all_targets(records: Records) -> str:
    """Returns the table of all targets, without those of the bundled model while its record is missing."""
    known = [target for target in TARGETS if STORIES in records.files or target.record != STORIES]
    return table(["", "preloaded; BLAS", "wanted", "measured", ""], [target.row(records) for target in known])
