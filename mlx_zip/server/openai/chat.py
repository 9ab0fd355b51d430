"""OpenAI's chat completions, streamed and whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.server.bodies import likely_json
from mlx_zip.server.chat_bodies import ChatBody
from mlx_zip.server.core import Core
from mlx_zip.server.http import (
    comment_bytes,
    described,
    event_bytes,
    json_response,
    read_body,
    stream_response,
    unless_gone,
)
from mlx_zip.server.openai.choices import END, Choice, counts_of, ended, gathered, head, usage_of
from mlx_zip.server.turn import Done, Learned, Live, Reasoning, Text, TokenLogprob, ToolCall, Turn, Waiting
from mlx_zip.server.vendor import token_json, vendor_figures, vendor_notes


def routes(core: Core) -> list[Route]:
    """Returns the routes of chat completions."""

    async def chat_completions(request: Request) -> Response:
        """Answers a conversation, as OpenAI's chat completions do; with mlx_zip.tokens, answers have them there too."""
        asked = await read_body(request, core, ChatBody)
        turns = asked.turns(core)
        if asked.stream:
            return await stream_response(request, core, _Stream(core, asked).frames(turns))
        return json_response(await unless_gone(request, _whole(core, asked, turns)))

    paths = ("/v1/chat/completions", "/chat/completions")
    return [Route(path, described(chat_completions, ChatBody), methods=["POST"]) for path in paths]


async def _whole(core: Core, asked: ChatBody, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns a chat completion."""
    choices = await gathered(core, turns)
    done = ended(choices)
    shown = {"tokens": [token_json(one) for one in choices[0].tokens]} if asked.mlx_zip.tokens else {}
    return {
        **head(core, "chatcmpl", "chat.completion"),
        "choices": [_choice(i, choice, asked.logprobs) for i, choice in enumerate(choices)],
        "usage": usage_of(done, asked.n),
        "mlx_zip": vendor_figures(counts_of(done, asked.n)) | vendor_notes(done[0]) | shown,
    }


def _choice(index: int, choice: Choice, with_logprobs: bool) -> dict[str, Any]:
    """Returns one of a chat completion's choices."""
    content = choice.text if choice.texts or not choice.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.thoughts:
        message["reasoning_content"] = "".join(choice.thoughts)
    if choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    logprobs = _logprobs(choice.logprobs) if with_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}


def _logprobs(found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns the log-probabilities of a text."""
    return {"content": likely_json(found), "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    """Returns a call of a tool."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _Stream:
    """The chunks of one streamed chat completion."""

    def __init__(self, core: Core, asked: ChatBody) -> None:
        self._core, self._asked = core, asked
        self._head = head(core, "chatcmpl", "chat.completion.chunk")
        self._end = {"usage": None} if asked.include_usage else {}
        self._calls: dict[int, int] = {}  # choice -> number of its last call
        self._done: dict[int, Done] = {}

    async def frames(self, turns: Sequence[Turn]) -> AsyncGenerator[bytes, None]:
        """Yields the stream, frame by frame."""
        async with aclosing(self._core.answers(turns)) as answers:
            async for index, delta in answers:
                if not isinstance(delta, Learned | Live):
                    yield self._frame(index, delta)
        if self._asked.include_usage:
            done = [self._done[i] for i in sorted(self._done)]
            yield event_bytes({**self._head, "choices": [], "usage": usage_of(done, self._asked.n)})
        yield END

    def _frame(self, index: int, delta: Text | Waiting | Reasoning | ToolCall | Done) -> bytes:
        """Returns the frame of a delta."""
        if isinstance(delta, Text):
            logprobs = _logprobs(delta.logprobs) if self._asked.logprobs else None
            shown = {"mlx_zip": {"tokens": [token_json(one) for one in delta.tokens]}} if delta.tokens else None
            return self._chunk(index, {"content": delta.text}, more=shown, logprobs=logprobs)
        if isinstance(delta, Waiting):
            if delta.total:
                return comment_bytes(f"reading the prompt {delta.read}/{delta.total}")
            if delta.waits_for:
                return comment_bytes("waiting for another model's answers to end")
            return self._chunk(index, {"role": "assistant", "content": ""})
        if isinstance(delta, Reasoning):
            return self._chunk(index, {"reasoning_content": delta.text})
        if isinstance(delta, ToolCall):
            nth = self._calls[index] = self._calls.get(index, -1) + 1
            return self._chunk(index, {"tool_calls": [{"index": nth, **_call(delta)}]})
        self._done[index] = delta
        return self._chunk(index, {}, delta.reason, {"mlx_zip": vendor_figures(delta.counts) | vendor_notes(delta)})

    def _chunk(
        self, index: int, delta: Any, reason: str | None = None, more: Any = None, logprobs: Any = None
    ) -> bytes:
        """Returns the frame of one chunk."""
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event_bytes({**self._head, "choices": [choice], **self._end, **(more or {})})
