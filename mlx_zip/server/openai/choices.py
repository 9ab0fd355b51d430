"""What chat completions and completions share: request fields, chunks of a stream, usage and log-probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mlx_zip.engine import Counts
from mlx_zip.server.answers.turn import Done, TokenLogprob, Waiting, vendor_json
from mlx_zip.server.core import Core
from mlx_zip.server.fields import (
    Body,
    BodyError,
    Fraction,
    NonEmptyText,
    PackNames,
    Size,
    Stops,
    at_most_fields,
)
from mlx_zip.server.http import check_model_name, comment_bytes, event_bytes

PENALTY_WINDOW = 256  # default number of recent base tokens that a penalty looks at
LEAST_LOGPROB = -9999.0  # reported in place of minus infinity, as OpenAI does
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    """Options of a stream. include_usage: whether the stream ends with the usage."""

    harmless = frozenset({"include_obfuscation"})

    include_usage: bool = False


class CompletionFields(Body):
    """Fields of both chat completions and completions. The fields from `top_k` on are not in OpenAI's API."""

    harmless = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})

    model: str = "default_model"
    max_tokens: Size | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], at_most_fields(1000)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: NonEmptyText | Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=8)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: Literal[False] = False
    ignore_eos: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Fraction | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    repetition_context_size: Size = PENALTY_WINDOW
    presence_context_size: Size = PENALTY_WINDOW
    frequency_context_size: Size = PENALTY_WINDOW
    pack: PackNames | None = None

    @field_validator("logit_bias")
    @classmethod
    def _check_bias_ids(cls, given: Mapping[str, float] | None) -> Any:
        for key in given or {}:
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise ValueError(f"{key[:40]!r} is no id of a token")
        return given

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, choice: int = 0) -> dict[str, Any]:
        """Returns the fields of `Sampling` that the request sets. choice: index of the answer, added to the seed."""
        names = ("top_p", "min_p", "xtc_probability", "xtc_threshold")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for kind in ("repetition", "presence", "frequency"):
            if (penalty := getattr(self, f"{kind}_penalty")) is not None:
                found |= {f"{kind}_penalty": penalty, f"{kind}_context_size": getattr(self, f"{kind}_context_size")}
        if self.temperature is not None:
            found["temp"] = self.temperature
        if self.top_k is not None:
            found["top_k"] = max(self.top_k, 0)
        if self.seed is not None:
            found["seed"] = (self.seed + choice) % (1 << 64)
        if self.logit_bias:
            found["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return found

    def check(self, core: Core) -> None:
        """Raises `RequestError` if the model is unknown, `BodyError` if fields contradict each other or the model."""
        check_model_name(core, self.model)
        if self.stream_options is not None and not self.stream:
            raise BodyError("only a stream can have this field", "stream_options")
        width = core.engine.info.vocab_size
        if wrong := [key for key in self.logit_bias or {} if int(key) >= width]:
            raise BodyError(f"{wrong[0]} is no base id of this model, which has {width}", "logit_bias")


# ---- answers


Answers = AsyncGenerator[tuple[int, Any], None]  # (index of a choice, delta), as `Core.answers` returns them


async def gather_deltas(answers: Answers, count: int) -> list[list[Any]]:
    """Returns the deltas of each of `count` whole answers, without `Waiting`. Raises what `answers` raises."""
    found: list[list[Any]] = [[] for _ in range(count)]
    async with aclosing(answers):
        async for index, delta in answers:
            if not isinstance(delta, Waiting):
                found[index].append(delta)
    return found


async def completion_frames(
    core: Core,
    asked: CompletionFields,
    head: tuple[str, str],
    answers: Answers,
    make_fields: Callable[[int, Any], dict[str, Any] | str | None],
) -> AsyncGenerator[bytes, None]:
    """Yields the frames of a streamed completion, then its usage if the request asks for it, and the end mark.

    head: prefix of the completion's id, and the kind of its chunks. make_fields: function from a choice's index and a
    delta to the other fields of a chunk, the text of a comment, or None for no frame. Raises what `answers` raises.
    """
    first = {**_completion_head(core, *head), "choices": [], **({"usage": None} if asked.include_usage else {})}
    done: dict[int, Done] = {}
    async with aclosing(answers):
        async for index, delta in answers:
            if isinstance(delta, Done):
                done[index] = delta
            fields = make_fields(index, delta)
            if fields is not None:
                yield comment_bytes(fields) if isinstance(fields, str) else event_bytes({**first, **fields})
    if asked.include_usage:
        yield event_bytes({**first, "usage": total_usage([done[i] for i in sorted(done)], asked.n)})
    yield b"data: [DONE]\n\n"


def whole_completion(
    core: Core,
    asked: CompletionFields,
    head: tuple[str, str],
    choices: list[dict[str, Any]],
    answers: Sequence[Sequence[Any]],
) -> dict[str, Any]:
    """Returns a completion that is not streamed. head: prefix of its id, and its kind. answers: see `gather_deltas`."""
    done = [delta for deltas in answers for delta in deltas if isinstance(delta, Done)]
    figures = vendor_json(done[0], total_counts(done, asked.n))
    return {
        **_completion_head(core, *head),
        "choices": choices,
        "usage": total_usage(done, asked.n),
        "mlx_zip": figures,
    }


def _completion_head(core: Core, prefix: str, kind: str) -> dict[str, Any]:
    """Returns the first fields of a completion, or of each chunk of a streamed one. prefix: prefix of the new id."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": core.model,
        "system_fingerprint": core.engine.info.fingerprint[:16],
    }


def total_counts(done: Sequence[Done], n: int) -> Counts:
    """Returns the counts of all choices together: maxima of times, entries and codebook sizes, else sums.

    A prompt's tokens count once. n: choices per prompt.
    """
    added = ("prompt_ids", "base_tokens", "steps", "hypertokens", "kv_bytes_saved")
    added += ("proposed", "accepted", "proposed_tokens", "accepted_tokens")
    largest = ("entries", "codebook_size", "queued_s", "first_id_s", "total_s")
    return Counts(
        **{name: sum(getattr(one.counts, name) for one in done[::n]) for name in ("prompt_tokens", "cached_tokens")},
        **{name: sum(getattr(one.counts, name) for one in done) for name in added},
        **{name: max(getattr(one.counts, name) for one in done) for name in largest},
    )


def total_usage(done: Sequence[Done], n: int) -> dict[str, Any]:
    """Returns the usage of all choices together, in base tokens. n: choices per prompt.

    accepted_prediction_tokens: tokens of the answers that a draft had proposed, from the request's prediction or
    another source. rejected_prediction_tokens: proposed tokens that are not in the answers; completion_tokens leaves
    them out.
    """
    counts = total_counts(done, n)
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.base_tokens,
        "total_tokens": counts.prompt_tokens + counts.base_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.reasoning_tokens for one in done),
            "accepted_prediction_tokens": counts.accepted_tokens,
            "rejected_prediction_tokens": counts.proposed_tokens - counts.accepted_tokens,
        },
    }


def logprobs_json(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns log-probabilities in the form of chat completions; a hypertoken is one entry."""
    return [
        _token_logprob_json(one.text, one.bytes, one.logprob)
        | {"top_logprobs": [_token_logprob_json(*likely) for likely in one.likely]}
        for one in logprobs
    ]


def _token_logprob_json(text: str, data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}
