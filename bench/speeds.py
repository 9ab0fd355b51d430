"""Computes the ratios and counts that the pages show from records of `bench generate` and `bench profile`."""

from __future__ import annotations

from .ratios import Ratio, of_samples, paired_ratio
from .records import Record

PROFILES = {
    "rows cold": "profile-cold-transformer",
    "rows cold, `res_latent_attn`": "profile-cold-latent",
    "rows warm": "profile-warm",
}
REQUESTS = {"code": "generate-code-1024", "chat": "generate-chat-1024"}
STORIES = "stories-chat"  # record of the bundled model in conversations of three stories, with cold and with warm rows
PUBLISHED = {"float32": "zip2zip-float", "8 bit": "zip2zip"}
TURNS = ("first", "second", "third")


def ratio(pair: tuple[Record, Record], figure: str) -> Ratio:
    """Returns the second record's figure over the first's, paired by trial; trials of one conversation are one pair."""
    a, b = (record["figures"][figure]["samples"] for record in pair)
    return paired_ratio(a, b, groups_of(pair[1]))


def groups_of(record: Record) -> int | None:
    """Returns the record's number of conversations if it has several, else None: then every trial is a pair."""
    conversations = record["workload"].get("conversations", 1)
    return conversations if conversations > 1 else None


def step_ratio(record: Record) -> Ratio:
    """Returns mlx_zip's time per step over mlx-lm's at equal KV length, from a record of `bench profile`."""
    return of_samples(record["ratio"]["samples"])


def per_step(pair: tuple[Record, Record]) -> float:
    """Returns the second record's base tokens per step, the median of its trials."""
    return pair[1]["figures"]["base_tokens_per_step"]["median"]


def pooled_per_step(pair: tuple[Record, Record]) -> float:
    """Returns the second record's base tokens per step: all base tokens of its conversations over all steps."""
    counts = pair[1]["counts"]
    return counts["base_tokens"] / counts["steps"]


def shortening(pair: tuple[Record, Record]) -> float:
    """Returns the length of the second record's prompt in ids, over its length in base ids."""
    counts = pair[1]["counts"]
    return counts["prompt_ids"] / counts["prompt_tokens"]


def detokenizing(record: Record) -> float:
    """Returns the processor time of detokenizing in us per base token, from a record of `bench profile`."""
    counts = record["counts"]
    return record["parts"]["text"]["cpu_us"]["mean"] * counts["steps"] / counts["base_tokens"]
