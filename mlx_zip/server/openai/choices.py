"""Gathers whole answers from deltas, and sums the counts of all choices of a response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from mlx_zip.engine import Counts
from mlx_zip.server.answers.turn import Delta, Done, Reasoning, ShownToken, Text, TokenLogprob, ToolCall, Turn
from mlx_zip.server.bodies import usage_json
from mlx_zip.server.core import Core
from mlx_zip.server.vendor import sum_counts

DONE_FRAME = b"data: [DONE]\n\n"


class Choice:
    """One answer, gathered from deltas. done: the last delta, None until the answer has ended."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []
        self.tokens: list[ShownToken] = []
        self.done: Done | None = None

    def add_delta(self, delta: Delta) -> None:
        """Adds a delta."""
        if isinstance(delta, Text):
            self.texts.append(delta.text)
            self.logprobs += delta.logprobs
            self.tokens += delta.tokens
        elif isinstance(delta, Reasoning):
            self.thoughts.append(delta.text)
        elif isinstance(delta, ToolCall):
            self.calls.append(delta)
        elif isinstance(delta, Done):
            self.done = delta

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.texts)

    @property
    def reason(self) -> str | None:
        """Why the answer has ended, None before."""
        return None if self.done is None else self.done.reason


async def gather_choices(core: Core, turns: Sequence[Turn]) -> list[Choice]:
    """Returns the whole answers to `turns`. Raises what `Core.answers` raises."""
    choices = [Choice() for _ in turns]
    async with aclosing(core.answers(turns)) as answers:
        async for index, delta in answers:
            choices[index].add_delta(delta)
    return choices


def choice_ends(choices: Sequence[Choice]) -> list[Done]:
    """Returns the `Done` of each choice that has ended."""
    return [choice.done for choice in choices if choice.done is not None]


def completion_head(core: Core, prefix: str, kind: str) -> dict[str, Any]:
    """Returns the first fields of a completion, or of each chunk of a streamed one. prefix: prefix of the new id."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": core.model,
        "system_fingerprint": core.engine.info.fingerprint[:16],
    }


def total_counts(done: Sequence[Done], n: int) -> Counts:
    """Returns the counts of all choices together; a prompt's tokens count once. n: choices per prompt."""
    prompts = [one.counts for one in done[::n]]
    read, cached = sum(one.prompt_tokens for one in prompts), sum(one.cached_tokens for one in prompts)
    return replace(sum_counts([one.counts for one in done]), prompt_tokens=read, cached_tokens=cached)


def total_usage(done: Sequence[Done], n: int) -> dict[str, Any]:
    """Returns the usage of all choices together. n: choices per prompt."""
    return usage_json(total_counts(done, n), sum(one.reasoning_tokens for one in done))
