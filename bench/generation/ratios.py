"""Computes ratios of two engines' trials that alternated, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlx_zip.bench.records import Record

DRAWS = 10_000  # bootstrap samples
QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Ratio:
    """A ratio with its 95 % interval, `low` to `high`. n: number of samples that the ratio was computed from."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def divided_by(self, divisor: float) -> Ratio:
        """Returns the ratio with value and interval divided by a number."""
        return Ratio(self.value / divisor, self.low / divisor, self.high / divisor, self.n)


def paired_ratio(a: Sequence[float], b: Sequence[float], groups: int | None = None) -> Ratio:
    """Returns the median of the ratios b[i] / a[i], with its interval. a, b: samples [n] of trials that alternated.

    groups: number of equal groups of neighbouring pairs, such as the trials of one conversation; a group counts once,
    by its median, because its trials repeat one text. None: every pair is its own group.
    """
    pairs = np.divide(b, a).reshape(groups or len(a), -1)
    return median_with_interval(tuple(np.median(pairs, axis=1).tolist()))


@lru_cache(maxsize=1024)
def median_with_interval(ratios: tuple[float, ...]) -> Ratio:
    """Returns the median of ratios [n] and its bootstrap interval, from `DRAWS` samples of n drawn with replacement.

    Results are cached, because pages use the ratio of one record in several tables.
    """
    if not ratios:
        raise ValueError("no trials")
    samples = np.asarray(ratios, float)
    drawn = samples[np.random.default_rng(0).integers(0, len(samples), (DRAWS, len(samples)))]
    low, high = np.quantile(np.median(drawn, axis=1), QUANTILES)
    return Ratio(float(np.median(samples)), float(low), float(high), len(samples))


def figure_ratio(pair: tuple[Record, Record], figure: str) -> Ratio:
    """Returns the second record's figure divided by the first's, both records of `bench generate`.

    Their trials are paired (or their conversations, if there are several). Raises `ValueError` for records of two
    commands, whose trials did not alternate.
    """
    if pair[0]["run"] != pair[1]["run"]:
        raise ValueError("the records are of two commands")
    a, b = (record["figures"][figure]["samples"] for record in pair)
    return paired_ratio(a, b, pair[1]["workload"].get("conversations"))
