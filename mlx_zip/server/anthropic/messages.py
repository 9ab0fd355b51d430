"""Anthropic's Messages API: answers, streamed and whole, and counts of a prompt's tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from copy import deepcopy
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.engine import Counts
from mlx_zip.server.answers.turn import Delta, Done, Reasoning, Text, ToolCall, Turn, Waiting, vendor_json
from mlx_zip.server.anthropic.bodies import CountBody, MessagesBody, make_messages_turn
from mlx_zip.server.core import Core
from mlx_zip.server.errors import ANTHROPIC, RequestError
from mlx_zip.server.fields import new_prefixed_id
from mlx_zip.server.http import (
    BodyRoute,
    check_model_name,
    comment_bytes,
    events_bytes,
    json_response,
    run_unless_client_gone,
    stream_response,
)


def messages_routes(core: Core) -> list[Route]:
    """Returns the routes of the Messages API."""

    async def messages(request: Request, body: MessagesBody) -> Response:
        """Answers a conversation."""
        check_model_name(core, body.model)
        turn, builder = make_messages_turn(body), MessageBuilder(body, core.model)
        if body.stream:
            frames = _message_frames(core, turn, builder)
            response = await stream_response(request, core, frames, builder.failure_frame)
        else:
            response = json_response(await run_unless_client_gone(request, _whole_message(core, turn, builder)))
        response.headers["request-id"] = new_prefixed_id("req")
        return response

    async def count_tokens(request: Request, body: CountBody) -> Response:
        """Counts the base tokens of a conversation."""
        check_model_name(core, body.model)
        ids = await run_unless_client_gone(request, core.prompt_ids(make_messages_turn(body)))
        return json_response({"input_tokens": len(ids)}, headers={"request-id": new_prefixed_id("req")})

    return [
        BodyRoute(core, "/v1/messages", MessagesBody, messages),
        BodyRoute(core, "/v1/messages/count_tokens", CountBody, count_tokens),
    ]


async def _whole_message(core: Core, turn: Turn, builder: MessageBuilder) -> dict[str, Any]:
    async with aclosing(core.answer(turn)) as deltas:
        async for delta in deltas:
            builder.add(delta)
    return builder.message


async def _message_frames(core: Core, turn: Turn, builder: MessageBuilder) -> AsyncGenerator[bytes, None]:
    """Yields one frame per delta: the delta's events, or a comment if it has none."""
    async with aclosing(core.answer(turn)) as deltas:
        async for delta in deltas:
            events = builder.add(delta)
            yield events_bytes(events) if events else comment_bytes("waiting")


# ---- the builder of a stream's events and of the whole message

Json = dict[str, Any]
SIGNATURE = "mlx_zip"  # of reasoning; some clients drop reasoning without one, and nothing checks it
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageBuilder:
    """Builds a message from deltas. `add` returns the events to send; `message` is the message so far.

    model: name of the model to report. make_id: function from a prefix to a new id.
    """

    def __init__(self, body: MessagesBody, model: str, make_id: Callable[[str], str] = new_prefixed_id) -> None:
        self.message: Json = {
            "id": make_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": messages_usage_json(Counts()),
        }
        self._omits = body.thinking is not None and body.thinking.display == "omitted"
        self._events: list[Json] = []
        self._began = False
        self._block: Json = {}  # the unfinished block, which is the last of the content; {} between blocks
        self._pieces: list[str] = []  # pieces of the block's text

    def add(self, delta: Delta) -> list[Json]:
        """Adds a delta to the message and returns the events to send."""
        if not self._begin_message(delta):
            return []
        match delta:
            case Text(text):
                self._open_block("text", {"text": ""})
                self._add_piece({"type": "text_delta", "text": text}, text)
            case Reasoning(text):
                self._open_block("thinking", {"thinking": "", "signature": ""})
                self._add_piece({"type": "thinking_delta", "thinking": text}, "" if self._omits else text)
            case ToolCall():
                self._add_call(delta)
            case Waiting():
                self._events.append({"type": "ping"})
            case Done():
                self._end_message(delta)
        return self._take_events()

    def failure_frame(self, failure: RequestError) -> bytes:
        """Returns the frame with the event that reports a failure and ends the stream."""
        error = failure.body(ANTHROPIC)["error"]
        return events_bytes([{"type": "error", "error": error}])

    def _begin_message(self, delta: Delta) -> bool:
        if not self._began and (not isinstance(delta, Waiting) or delta.prompt_tokens):
            self._began = True
            if isinstance(delta, Waiting):
                known = Counts(prompt_tokens=delta.prompt_tokens, cached_tokens=delta.cached_tokens)
                self.message["usage"] = messages_usage_json(known)
            self._events.append({"type": "message_start", "message": deepcopy(self.message)})
        return self._began

    def _add_call(self, call: ToolCall) -> None:
        self._open_block("tool_use", {"id": call.id, "name": call.name, "input": {}})
        self._add_piece({"type": "input_json_delta", "partial_json": call.arguments}, call.arguments)
        self._close_block()

    def _end_message(self, done: Done) -> None:
        self._close_block()
        reason = "stop_sequence" if done.stopped_by is not None else _STOP_REASONS[done.reason]
        end = {"stop_reason": reason, "stop_sequence": done.stopped_by}
        usage = messages_usage_json(done.counts, done.reasoning_tokens)
        figures = vendor_json(done)
        self.message |= {**end, "usage": usage, "mlx_zip": figures}
        self._events.append({"type": "message_delta", "delta": end, "usage": usage, "mlx_zip": figures})
        self._events.append({"type": "message_stop"})

    def _open_block(self, kind: str, fields: Json) -> None:
        if self._block.get("type") == kind:
            return
        self._close_block()
        self._block = {"type": kind, **fields}
        self.message["content"].append(self._block)
        self._events.append(
            {"type": "content_block_start", "index": self._block_index, "content_block": dict(self._block)}
        )

    def _add_piece(self, delta: Json, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._events.append({"type": "content_block_delta", "index": self._block_index, "delta": delta})

    def _close_block(self) -> None:
        """Ends the block that is being written, if there is one."""
        block, text = self._block, "".join(self._pieces)
        if not block:
            return
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "tool_use":
            block["input"] = from_json(text) if text else {}
        else:
            block |= {"thinking": text, "signature": SIGNATURE}
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            self._events.append({"type": "content_block_delta", "index": self._block_index, "delta": delta})
        self._events.append({"type": "content_block_stop", "index": self._block_index})
        self._block, self._pieces = {}, []

    @property
    def _block_index(self) -> int:
        return len(self.message["content"]) - 1

    def _take_events(self) -> list[Json]:
        events, self._events = self._events, []
        return events


def messages_usage_json(counts: Counts, reasoning_tokens: int = 0) -> Json:
    """Returns the usage in base tokens; `input_tokens` is the prompt without its cached tokens."""
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.base_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }
