"""Anthropic's Messages, streamed and whole, and the count of a prompt's tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.server.anthropic.bodies import CountBody, MessagesBody, turn_of
from mlx_zip.server.anthropic_events import MessageBuilder
from mlx_zip.server.bodies import check_model
from mlx_zip.server.core import Core
from mlx_zip.server.errors import ANTHROPIC, Failure
from mlx_zip.server.http import (
    comment_bytes,
    described,
    events_bytes,
    json_response,
    read_body,
    stream_response,
    unless_gone,
)
from mlx_zip.server.ids import new_id


def routes(core: Core) -> list[Route]:
    """Returns the routes of messages."""

    async def messages(request: Request) -> Response:
        """Answers a conversation."""
        body = await read_body(request, core, MessagesBody)
        check_model(core, body.model)
        asked = _Asked(core, body)
        if body.stream:
            response = await stream_response(request, core, asked.frames(), ANTHROPIC, asked.failed)
        else:
            response = json_response(await unless_gone(request, asked.whole()))
        response.headers["request-id"] = new_id("req")
        return response

    async def count_tokens(request: Request) -> Response:
        """Counts the base tokens of a conversation."""
        body = await read_body(request, core, CountBody)
        check_model(core, body.model)
        ids = await unless_gone(request, core.prompt_ids(turn_of(body)))
        return json_response({"input_tokens": len(ids)}, headers={"request-id": new_id("req")})

    return [
        Route("/v1/messages", described(messages, MessagesBody), methods=["POST"]),
        Route("/v1/messages/count_tokens", described(count_tokens, CountBody), methods=["POST"]),
    ]


class _Asked:
    """One request for a message."""

    def __init__(self, core: Core, body: MessagesBody) -> None:
        self._core, self._turn = core, turn_of(body)
        self._builder = MessageBuilder(body, core.model)

    async def whole(self) -> dict[str, Any]:
        """Returns the message."""
        async with aclosing(self._core.answer(self._turn)) as deltas:
            async for delta in deltas:
                self._builder.add(delta)
        return self._builder.message

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yields the events, several at once where they come together."""
        async with aclosing(self._core.answer(self._turn)) as deltas:
            async for delta in deltas:
                events = self._builder.add(delta)
                yield events_bytes(events) if events else comment_bytes("waiting")

    def failed(self, failure: Failure) -> bytes:
        """Returns the last event of an answer that failed."""
        error = failure.body(ANTHROPIC)["error"]
        return events_bytes(self._builder.fail(error["type"], error["message"]))
