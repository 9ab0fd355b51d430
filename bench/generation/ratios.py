"""Computes ratios of two engines' trials, with 95 % intervals; pairs the trials if they alternated."""

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


def paired_ratio(a: Sequence[float], b: Sequence[float], groups: int | None = None, seed: int = 0) -> Ratio:
    """Returns the median of the ratios b[i] / a[i], with its interval. a, b: samples [n] of trials that alternated.

    groups: number of equal groups of neighbouring pairs, such as the trials of one conversation; a group counts once,
    by its median, because its trials repeat one text. None: every pair is its own group.
    """
    pairs = np.divide(b, a).reshape(groups or len(a), -1)
    return median_with_interval(np.median(pairs, axis=1).tolist(), seed)


def median_with_interval(ratios: Sequence[float], seed: int = 0) -> Ratio:
    """Returns the median of ratios [n] and its bootstrap interval, from `DRAWS` samples of n drawn with replacement."""
    if not len(ratios):
        raise ValueError("no trials")
    return bootstrap_median(tuple(ratios), seed)


@lru_cache(maxsize=1024)
def bootstrap_median(ratios: tuple[float, ...], seed: int) -> Ratio:
    """Like `median_with_interval`, but cached, because pages use the ratio of one record in several tables."""
    samples = np.asarray(ratios, float)
    drawn = samples[np.random.default_rng(seed).integers(0, len(samples), (DRAWS, len(samples)))]
    low, high = np.quantile(np.median(drawn, axis=1), QUANTILES)
    return Ratio(float(np.median(samples)), float(low), float(high), len(samples))


def unpaired_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Ratio:
    """Returns median(b) / median(a) with its interval. a, b: samples [n] and [m] of trials that did not alternate."""
    rng = np.random.default_rng(seed)
    drawn = [np.median(rng.choice(np.asarray(x, float), (DRAWS, len(x))), axis=1) for x in (a, b)]
    low, high = np.quantile(drawn[1] / drawn[0], QUANTILES)
    return Ratio(float(np.median(b) / np.median(a)), float(low), float(high), min(len(a), len(b)))


# ---- ratios from records of `bench generate` and `bench profile`

PROFILES = {
    "bundled model, 8 bit, rows cold": "profile-stories-cold",
    "bundled model, 8 bit, rows warm": "profile-stories",
    "`small-125m`, rows cold": "profile-cold-transformer",
    "`small-125m`, rows cold, `res_latent_attn`": "profile-cold-latent",
    "`small-125m`, rows warm": "profile-warm",
}
REQUESTS = {"code": "generate-code-1024", "chat": "generate-chat-1024"}
STORIES = "stories-chat"  # bundled model, conversations of three stories, cold and warm rows
PUBLISHED = {"float32": "zip2zip-float", "8 bit": "zip2zip"}
TURNS = ("first", "second", "third")


def figure_ratio(pair: tuple[Record, Record], figure: str) -> Ratio:
    """Returns the second record's figure divided by the first's, paired by trial (or by conversation, if several)."""
    a, b = (record["figures"][figure]["samples"] for record in pair)
    return paired_ratio(a, b, conversation_count(pair[1]))


def conversation_count(record: Record) -> int | None:
    """Returns the argument `groups` of `paired_ratio`: the record's number of conversations, or None if it is 1."""
    conversations = record["workload"].get("conversations", 1)
    return conversations if conversations > 1 else None


def step_time_ratio(record: Record) -> Ratio:
    """Returns mlx_zip's time per step divided by mlx-lm's at equal KV length, from a record of `bench profile`."""
    return median_with_interval(record["ratio"]["samples"])


def base_tokens_per_step(pair: tuple[Record, Record]) -> float:
    """Returns the second record's base tokens per step: the median of the record's trials."""
    return pair[1]["figures"]["base_tokens_per_step"]["median"]


def pooled_base_tokens_per_step(pair: tuple[Record, Record]) -> float:
    """Returns the second record's base tokens per step: base tokens of all conversations divided by all steps."""
    counts = pair[1]["counts"]
    return counts["base_tokens"] / counts["steps"]


def prompt_ids_per_base_id(pair: tuple[Record, Record]) -> float:
    """Returns the length of the second record's prompts in ids, divided by their length in base ids."""
    counts = pair[1]["counts"]
    return counts["prompt_ids"] / counts["prompt_tokens"]


def detokenizing_us_per_base_token(record: Record) -> float:
    """Returns the processor time of detokenizing in us per base token, from a record of `bench profile`."""
    counts = record["counts"]
    return record["parts"]["text"]["cpu_us"]["mean"] * counts["steps"] / counts["base_tokens"]
