"""Ratios and counts that the pages show, computed from one or two records of `bench generate` and `bench profile`."""

from __future__ import annotations

from .ratios import Ratio, of_samples, paired_ratio
from .records import Record

PROFILES = {
    "rows warm": "profile-warm",
    "rows cold": "profile-cold-transformer",
    "rows cold, `res_latent_attn`": "profile-cold-latent",
}
REQUESTS = {"code": "generate-code-1024", "chat": "generate-chat-1024"}
STORIES = "stories-chat"  # the bundled model in conversations of three stories, with cold and with warm rows
PUBLISHED = {"float32": "zip2zip-float", "8 bit": "zip2zip"}
TURNS = ("first", "second", "third")


def ratio(pair: tuple[Record, Record], figure: str) -> Ratio:
    """The second record's figure over the first's, trial by trial; trials of one conversation count as one pair."""
    a, b = (record["figures"][figure]["samples"] for record in pair)
    return paired_ratio(a, b, groups_of(pair[1]))


def groups_of(record: Record) -> int | None:
    """Conversations of a record if it has several, else None: every trial then counts by itself."""
    conversations = record["workload"].get("conversations", 1)
    return conversations if conversations > 1 else None


def step_ratio(record: Record) -> Ratio:
    """`bench profile`: mlx-zip's step over mlx-lm's at equal KV length."""
    return of_samples(record["ratio"]["samples"])


def per_step(pair: tuple[Record, Record]) -> float:
    """Base tokens per step of the second."""
    return pair[1]["figures"]["base_tokens_per_step"]["median"]


def pooled_per_step(pair: tuple[Record, Record]) -> float:
    """Base tokens per step of the second: all base tokens of its conversations over all steps."""
    counts = pair[1]["counts"]
    return counts["base_tokens"] / counts["steps"]


def shortening(pair: tuple[Record, Record]) -> float:
    """Ids of the second's prompt over its base ids."""
    counts = pair[1]["counts"]
    return counts["prompt_ids"] / counts["prompt_tokens"]


def detokenizing(record: Record) -> float:
    """`bench profile`: us of processor time per base token."""
    counts = record["counts"]
    return record["parts"]["text"]["cpu_us"]["mean"] * counts["steps"] / counts["base_tokens"]
