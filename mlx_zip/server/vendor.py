"""The field `mlx_zip` of requests and answers, for what OpenAI's and Anthropic's APIs have no field for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlx_zip.engine import Counts
from mlx_zip.server.answers.turn import Done, ShownToken
from mlx_zip.server.fields import Body


class VendorFields(Body):
    """The field `mlx_zip` of a request. tokens: whether the answer says which tokens its text consists of."""

    tokens: bool = False


def vendor_json(done: Done, counts: Counts | None = None) -> dict[str, Any]:
    """Returns the field `mlx_zip` of an answer: its figures, as in `Counts`, and `vendor_notes`.

    counts: counts of all answers of the response together, None for those of `done`.
    """
    counts = done.counts if counts is None else counts
    names = ("steps", "hypertokens", "prompt_ids", "entries", "codebook_size", "kv_bytes_saved", "proposed", "accepted")
    times = {name: round(getattr(counts, name), 6) for name in ("queued_s", "first_id_s", "total_s")}
    return {name: getattr(counts, name) for name in names} | _rates_json(counts) | times | vendor_notes(done)


def _rates_json(counts: Counts) -> dict[str, float]:
    return {
        "base_tokens_per_step": round(counts.base_tokens / counts.steps, 3) if counts.steps else 0.0,
        "base_tokens_per_pass": round(counts.base_tokens_per_pass, 3),
    }


def vendor_notes(done: Done) -> dict[str, Any]:
    """Returns notes for the field `mlx_zip`: tools left out, and where the prompt differs from a kept conversation."""
    left_out = {"tools_left_out": list(done.left_out)} if done.left_out else {}
    return left_out | ({} if done.differs is None else {"prompt_differs": asdict(done.differs)})


def shown_token_json(token: ShownToken) -> dict[str, Any]:
    """Returns a shown token as JSON: "t" text, "id"; for a hypertoken also "p" parts, "o" origin, "a" `ShownToken.at`.

    "d": true if a draft had proposed the token, "c": true if the token begins in an earlier piece of text.
    """
    found: dict[str, Any] = {"t": token.text, "id": token.id}
    if token.origin:
        found |= {"p": list(token.parts), "o": token.origin, "a": token.at}
    return found | ({"d": True} if token.from_draft else {}) | ({"c": True} if token.continues else {})


def live_counts_json(counts: Counts) -> dict[str, Any]:
    """Returns an answer's counts so far as JSON. seconds: since the request. base_tokens_per_s: since the first id."""
    names = ("base_tokens", "steps", "hypertokens", "entries", "codebook_size", "kv_bytes_saved")
    names += ("proposed", "accepted")
    since_first = counts.total_s - counts.first_id_s if counts.first_id_s else 0.0
    return {
        **{name: getattr(counts, name) for name in names},
        **_rates_json(counts),
        "seconds": round(counts.total_s, 4),
        "base_tokens_per_s": round(counts.base_tokens / since_first, 1) if since_first > 0 else 0.0,
    }
