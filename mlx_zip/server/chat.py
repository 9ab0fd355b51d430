"""OpenAI's chat completions, streamed and whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.server.bodies import likely_json, usage
from mlx_zip.server.chat_bodies import ChatBody
from mlx_zip.server.core import Core
from mlx_zip.server.fields import parse
from mlx_zip.server.http import comment_bytes, event_bytes, json_response, read_json, stream_response, unless_gone
from mlx_zip.server.turn import Delta, Done, Reasoning, Text, ToolCall, Turn, Waiting
from mlx_zip.server.vendor import summed, vendor_figures

END = b"data: [DONE]\n\n"


def routes(core: Core) -> list[Route]:
    """Returns the routes of chat completions."""

    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        asked = parse(ChatBody, await read_json(request, core))
        turns = asked.turns(core)
        if asked.stream:
            return await stream_response(request, core, _Stream(core, asked).frames(turns))
        return json_response(await unless_gone(request, _whole(core, asked, turns)))

    paths = ("/v1/chat/completions", "/chat/completions")
    return [Route(path, described(chat_completions, ChatBody), methods=["POST"]) for path in paths]


def described(endpoint: Any, body: type) -> Any:
    """Returns the endpoint, with the class of its body for the description of the routes."""
    endpoint.body = body
    return endpoint


class Choice:
    """One answer as it comes, for a whole response."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.logprobs: list[Any] = []
        self.done: Done | None = None

    def take(self, delta: Delta) -> None:
        """Adds a delta."""
        if isinstance(delta, Text):
            self.texts.append(delta.text)
            self.logprobs += delta.logprobs
        elif isinstance(delta, Reasoning):
            self.reasoning.append(delta.text)
        elif isinstance(delta, ToolCall):
            self.calls.append(delta)
        elif isinstance(delta, Done):
            self.done = delta

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.texts)

    def as_json(self, index: int, with_logprobs: bool) -> dict[str, Any]:
        """Returns the answer as one of a chat completion's choices."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text if self.texts or not self.calls else None}
        message["refusal"] = None
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [_call(call) for call in self.calls]
        logprobs = {"content": likely_json(self.logprobs), "refusal": None} if with_logprobs else None
        reason = None if self.done is None else self.done.reason
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, Any]:
    """Returns a call of a tool as JSON."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def gathered(core: Core, turns: Sequence[Turn]) -> list[Choice]:
    """Returns the whole answers of turns."""
    choices = [Choice() for _ in turns]
    async with aclosing(core.answers(turns)) as answers:
        async for index, delta in answers:
            choices[index].take(delta)
    return choices


async def _whole(core: Core, asked: ChatBody, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns a chat completion."""
    choices = await gathered(core, turns)
    done = [choice.done for choice in choices if choice.done is not None]
    return {
        **_head(core, "chat.completion"),
        "choices": [choice.as_json(i, asked.logprobs) for i, choice in enumerate(choices)],
        "usage": _usage(done),
        "mlx_zip": vendor_figures(summed([one.counts for one in done])),
    }


def _head(core: Core, kind: str) -> dict[str, Any]:
    """Returns the fields that an answer, or each chunk of one, begins with."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": core.model,
        "system_fingerprint": core.engine.info.fingerprint[:16],
    }


def _usage(done: Sequence[Done]) -> dict[str, Any]:
    """Returns the usage of all choices together; their common prompt counts once."""
    counts = summed([one.counts for one in done])
    first = done[0].counts
    counts = type(counts)(
        prompt_tokens=first.prompt_tokens, cached_tokens=first.cached_tokens, base_tokens=counts.base_tokens
    )
    return usage(counts, sum(one.reasoning_tokens for one in done))


class _Stream:
    """The chunks of one streamed chat completion."""

    def __init__(self, core: Core, asked: ChatBody) -> None:
        self._core, self._asked = core, asked
        self._head = _head(core, "chat.completion.chunk")
        self._end = {"usage": None} if asked.include_usage else {}
        self._calls: dict[int, int] = {}  # choice -> how many calls it has made
        self._done: list[Done] = []

    async def frames(self, turns: Sequence[Turn]) -> AsyncIterator[bytes]:
        """Yields the stream, frame by frame."""
        async with aclosing(self._core.answers(turns)) as answers:
            async for index, delta in answers:
                if frame := self._frame(index, delta):
                    yield frame
        if self._asked.include_usage:
            yield event_bytes({**self._head, "choices": [], "usage": _usage(self._done)})
        yield END

    def _frame(self, index: int, delta: Delta) -> bytes:
        """Returns the frame of a delta."""
        if isinstance(delta, Text):
            logprobs = {"content": likely_json(delta.logprobs), "refusal": None} if self._asked.logprobs else None
            return self._chunk(index, {"content": delta.text}, logprobs=logprobs)
        if isinstance(delta, Waiting):
            if delta.total:
                return comment_bytes(f"reading the prompt {delta.read}/{delta.total}")
            return self._chunk(index, {"role": "assistant", "content": ""})
        if isinstance(delta, Reasoning):
            return self._chunk(index, {"reasoning_content": delta.text})
        if isinstance(delta, ToolCall):
            nth = self._calls[index] = self._calls.get(index, -1) + 1
            return self._chunk(index, {"tool_calls": [{"index": nth, **_call(delta)}]})
        self._done.append(delta)
        return self._chunk(index, {}, delta.reason, {"mlx_zip": vendor_figures(delta.counts)})

    def _chunk(
        self, index: int, delta: Any, reason: str | None = None, more: Any = None, logprobs: Any = None
    ) -> bytes:
        """Returns the frame of one chunk."""
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event_bytes({**self._head, "choices": [choice], **self._end, **(more or {})})
