"""Ratios of two engines' trials with 95 % intervals: paired where the trials ran in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

DRAWS = 10_000  # bootstrap samples
QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Ratio:
    """A ratio with its 95 % interval, from `low` to `high`. n: number of ratios, or of trials, that it comes from."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def over(self, divisor: float) -> Ratio:
        """Returns the ratio with value and interval divided by a number."""
        return Ratio(self.value / divisor, self.low / divisor, self.high / divisor, self.n)


def paired_ratio(a: Sequence[float], b: Sequence[float], groups: int | None = None, seed: int = 0) -> Ratio:
    """Returns the median of b / a, pair by pair, with its interval. a [n] and b [n] were measured in turns.

    groups: how many equal groups of neighbouring pairs belong together, such as the trials of one conversation; a
    group counts once, by its median, because its trials repeat one text. None: every pair is a group of its own.
    """
    pairs = np.divide(b, a).reshape(groups or len(a), -1)
    return of_samples(np.median(pairs, axis=1).tolist(), seed)


def of_samples(ratios: Sequence[float], seed: int = 0) -> Ratio:
    """Returns the median of ratios [n] and its interval by bootstrap: `DRAWS` samples of n drawn with replacement."""
    if not len(ratios):
        raise ValueError("no trials")
    return _bootstrap(tuple(ratios), seed)


@lru_cache(maxsize=1024)
def _bootstrap(ratios: tuple[float, ...], seed: int) -> Ratio:
    """Returns what `of_samples` does; pages ask for the ratio of one record in several tables."""
    samples = np.asarray(ratios, float)
    drawn = samples[np.random.default_rng(seed).integers(0, len(samples), (DRAWS, len(samples)))]
    low, high = np.quantile(np.median(drawn, axis=1), QUANTILES)
    return Ratio(float(np.median(samples)), float(low), float(high), len(samples))


def unpaired_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Ratio:
    """Returns the median of b [m] over that of a [n], with its interval, for trials that did not run in turns."""
    rng = np.random.default_rng(seed)
    drawn = [np.median(rng.choice(np.asarray(x, float), (DRAWS, len(x))), axis=1) for x in (a, b)]
    low, high = np.quantile(drawn[1] / drawn[0], QUANTILES)
    return Ratio(float(np.median(b) / np.median(a)), float(low), float(high), min(len(a), len(b)))
