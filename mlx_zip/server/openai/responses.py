"""OpenAI's Responses API, streamed and whole. Running responses can be cancelled, stored ones continued and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.engine import Counts
from mlx_zip.server.answers.turn import Delta, Done, Turn
from mlx_zip.server.core import Core, Inbox
from mlx_zip.server.errors import RequestError
from mlx_zip.server.http import (
    BodyRoute,
    check_model_name,
    events_bytes,
    json_response,
    run_unless_client_gone,
    stream_response,
)
from mlx_zip.server.openai.responses_bodies import ResponseBody, item_with_id, make_response_turn
from mlx_zip.server.openai.responses_events import ResponseBuilder

CANCEL_S = 2.0  # how long to wait for a cancelled response to end before its state is returned
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def responses_routes(core: Core) -> list[Route]:
    """Returns the routes of the Responses API."""
    store = core.responses
    running: dict[str, _ResponseRequest] = {}

    async def create_response(request: Request, body: ResponseBody) -> Response:
        """Answers a conversation."""
        asked = _make_response_request(core, running, body)
        if body.stream:
            return await stream_response(request, core, asked.frames(), on_error=asked.failure_events)
        return json_response(await run_unless_client_gone(request, asked.whole_response()))

    async def input_tokens(request: Request, body: ResponseBody) -> Response:
        """Counts the base tokens that a request's prompt would have."""
        asked = _make_response_request(core, running, body)
        count = len(await run_unless_client_gone(request, core.prompt_ids(asked.turn))) if asked.items else 0
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def one_response(request: Request) -> Response:
        """Returns or deletes a response, stored or still being written; deleting ends one that is being written."""
        name = request.path_params["name"]
        if request.method == "DELETE":
            if name in running:
                running[name].stores = False
                await running[name].cancel()
            else:
                store.delete(name)
            return json_response({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise RequestError(400, "stream: a stored response cannot be streamed again", "unsupported", "stream")
        if name in running:
            return json_response(running[name].builder.response_so_far())
        return json_response(store.get(name).response)

    async def cancel(request: Request) -> Response:
        """Ends a response that is being written, and returns it; one that has ended is returned as it is."""
        name = request.path_params["name"]
        if name not in running:
            return json_response(store.get(name).response)
        return json_response(await running[name].cancel())

    async def input_items(request: Request) -> Response:
        """Lists the items that a response answers, the last first unless `order` is asc."""
        name = request.path_params["name"]
        items = running[name].items if name in running else store.get(name).items
        return json_response(_items_page(items, request.query_params))

    return [
        BodyRoute(core, "/v1/responses", ResponseBody, create_response),
        BodyRoute(core, "/v1/responses/input_tokens", ResponseBody, input_tokens),
        Route("/v1/responses/{name}", one_response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/cancel", cancel, methods=["POST"]),
        Route("/v1/responses/{name}/input_items", input_items, methods=["GET"]),
    ]


def _make_response_request(core: Core, running: dict[str, _ResponseRequest], body: ResponseBody) -> _ResponseRequest:
    """Returns the request made of a body. Raises `RequestError` if it names an unknown model, response or item."""
    check_model_name(core, body.model)
    before: list[Any] = []
    if body.previous_response_id is not None:
        stored = core.responses.get(body.previous_response_id, "previous_response_id", "previous_response_not_found")
        before = stored.conversation
    items = [*before, *(item_with_id(item) for item in core.responses.resolve_references(body.items))]
    most = core.answer_max_tokens(body.max_output_tokens, tools=True)
    turn = replace(make_response_turn(body, items, len(before)), max_tokens=most)
    return _ResponseRequest(core, running, items, turn, ResponseBuilder(body, core.model), body.store)


@dataclass(eq=False)
class _ResponseRequest:
    """One request. items: the whole conversation. running: requests in flight, by the id of the response.

    stores: whether the response is stored when it has ended. inbox: see `Core.answer`.
    """

    core: Core
    running: dict[str, _ResponseRequest]
    items: list[Any]
    turn: Turn
    builder: ResponseBuilder
    stores: bool
    inbox: Inbox = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def whole_response(self) -> dict[str, Any]:
        async with aclosing(self._delta_events()) as all_events:
            async for _ in all_events:
                pass
        return self.builder.response

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yields one frame per delta that has events."""
        begun = self.builder.begin()
        async with aclosing(self._delta_events()) as all_events:
            async for events in all_events:
                events, begun = [*begun, *events], []
                if events:
                    yield events_bytes(events)

    async def _delta_events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yields the events of each delta; if the response is cancelled, yields its last events too."""
        if not self.items:  # a probe: there is nothing to answer
            yield self._add_delta(Done("stop", Counts()))
            return
        name = self.builder.response["id"]
        self.running[name] = self
        try:
            async with aclosing(self.core.answer(self.turn, self.inbox)) as deltas:
                async for delta in deltas:
                    yield self._add_delta(delta)
            if self.builder.response["status"] == "in_progress":
                events = self.builder.cancel()
                self._store_response()
                yield events
        finally:
            del self.running[name]
            self.ended.set()

    async def cancel(self) -> dict[str, Any]:
        """Stops the answer, waits up to `CANCEL_S` seconds for its end, and returns the response."""
        self.inbox.put_nowait(None)
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self.ended.wait()
        found = self.builder.response_so_far()
        return found | ({"status": "cancelled"} if found["status"] == "in_progress" else {})

    def failure_events(self, failure: RequestError) -> bytes:
        """Returns the events that report the failure and end the stream."""
        return events_bytes(self.builder.fail(str(failure), _ERROR_CODES.get(failure.status, "server_error")))

    def _add_delta(self, delta: Delta) -> list[dict[str, Any]]:
        """Returns the events of a delta. After the last delta, stores the response if it is to be stored."""
        events = self.builder.add(delta)
        if isinstance(delta, Done):
            self._store_response()
        return events

    def _store_response(self) -> None:
        if self.stores:
            self.core.responses.add(self.builder.response, self.items)


def _items_page(items: Any, query: Mapping[str, str]) -> dict[str, Any]:
    """Returns a page of a list of items. query: limit (1 to 100), order ("asc" or "desc"), after (an item's id)."""
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise RequestError(400, "limit: this must be an integer from 1 to 100", "invalid_request", "limit")
    if order not in ("asc", "desc"):
        raise RequestError(400, "order: this must be asc or desc", "invalid_request", "order")
    ordered = list(items if order == "asc" else reversed(items))
    if after is not None:
        at = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            raise RequestError(404, f"after: there is no item {after[:80]!r}", "not_found", "after")
        ordered = ordered[at + 1 :]
    data, ids = ordered[: int(limit)], [item["id"] for item in ordered[: int(limit)]]
    ends = {"first_id": ids[0] if ids else "", "last_id": ids[-1] if ids else ""}
    return {"object": "list", "data": data, **ends, "has_more": len(ordered) > len(data)}
