"""OpenAI's Responses API, streamed and whole. Running responses can be cancelled, stored ones continued and deleted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.engine import Counts
from mlx_zip.server.answers.turn import Delta, Done, Reasoning, Text, ToolCall, Turn, vendor_json
from mlx_zip.server.core import Core, Inbox
from mlx_zip.server.errors import RequestError
from mlx_zip.server.fields import new_prefixed_id
from mlx_zip.server.http import (
    BodyRoute,
    check_model_name,
    events_bytes,
    json_response,
    run_unless_client_gone,
    stream_response,
)
from mlx_zip.server.openai.choices import logprobs_json
from mlx_zip.server.openai.responses_bodies import ResponseBody, item_with_id, make_response_turn

Json = dict[str, Any]
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

    async def whole_response(self) -> Json:
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

    async def _delta_events(self) -> AsyncGenerator[list[Json], None]:
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

    async def cancel(self) -> Json:
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

    def _add_delta(self, delta: Delta) -> list[Json]:
        """Returns the events of a delta. After the last delta, stores the response if it is to be stored."""
        events = self.builder.add(delta)
        if isinstance(delta, Done):
            self._store_response()
        return events

    def _store_response(self) -> None:
        if self.stores:
            self.core.responses.add(self.builder.response, self.items)


def _items_page(items: Any, query: Mapping[str, str]) -> Json:
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


# ---- the builder of a stream's events and of the whole response


class ResponseBuilder:
    """Builds a response from deltas. Methods return the events to send, in order; `response` is the response so far.

    model: name of the model to report. make_id: function from a prefix to a new id.
    """

    def __init__(self, body: ResponseBody, model: str, make_id: Callable[[str], str] = new_prefixed_id) -> None:
        self.response = {"id": make_id("resp"), **_initial_fields(body, model), "created_at": int(time.time())}
        self._logprobs, self._make_id = body.logprobs is not None, make_id
        self._events: list[Json] = []
        self._sequence = 0
        self._item: Json = {}  # the unfinished item, which is the last of the output; {} between items
        self._pieces: list[str] = []  # pieces of the item's text

    def begin(self) -> list[Json]:
        """Returns the events to send before the first delta."""
        for kind in ("response.created", "response.in_progress"):
            self._add_event(kind, response=deepcopy(self.response))
        return self._take_events()

    def add(self, delta: Delta) -> list[Json]:
        """Adds a delta to the response and returns the events to send."""
        match delta:
            case Text(text, logprobs):
                self._add_text(text, logprobs_json(logprobs) if self._logprobs else [])
            case Reasoning(text):
                self._add_reasoning(text)
            case ToolCall():
                self._add_call(delta)
            case Done():
                self._end_response(delta)
        return self._take_events()

    def fail(self, message: str, code: str = "server_error") -> list[Json]:
        """Marks the response as failed and returns the events to send. code: OpenAI's code of the error."""
        self._close_item("incomplete")
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        self._add_event("response.failed", response=self.response)
        return self._take_events()

    def cancel(self) -> list[Json]:
        """Marks the response as cancelled and returns the events to send."""
        self._close_item("incomplete")
        self.response["status"] = "cancelled"
        self._add_event("response.incomplete", response=self.response)
        return self._take_events()

    def response_so_far(self) -> Json:
        """Returns a copy of the response as it is now, with the text that is being written."""
        found, text = deepcopy(self.response), "".join(self._pieces)
        if self._item:
            item = found["output"][-1]
            part = next((item[name][0] for name in ("content", "summary") if name in item), None)
            (item if part is None else part).update({"arguments" if part is None else "text": text})
        return found

    def _add_text(self, text: str, logprobs: list[Json]) -> None:
        if not self._is_open("message"):
            self._open_item({"id": self._make_id("msg"), "type": "message", "role": "assistant", "content": []})
            self._item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            self._add_event(
                "response.content_part.added", **self._item_place(), part=deepcopy(self._item["content"][0])
            )
        self._pieces.append(text)
        self._item["content"][0]["logprobs"] += logprobs
        if text or logprobs:
            self._add_event("response.output_text.delta", **self._item_place(), delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> None:
        if not self._is_open("reasoning"):
            self._open_item({"id": self._make_id("rs"), "type": "reasoning", "summary": []})
            self._item["summary"].append({"type": "summary_text", "text": ""})
            part = deepcopy(self._item["summary"][0])
            self._add_event("response.reasoning_summary_part.added", **self._item_place(), part=part)
        self._pieces.append(text)
        self._add_event("response.reasoning_summary_text.delta", **self._item_place(), delta=text)

    def _add_call(self, call: ToolCall) -> None:
        item = {"id": self._make_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        self._open_item({**item, "arguments": ""})
        self._pieces.append(call.arguments)
        self._add_event("response.function_call_arguments.delta", **self._item_place(), delta=call.arguments)
        self._close_item("completed")

    def _end_response(self, done: Done) -> None:
        if not self.response["output"]:
            self._add_text("", [])
        cut = done.reason == "length"
        self._close_item("incomplete" if cut else "completed")
        status = "incomplete" if cut else "completed"
        self.response |= {"status": status, "usage": response_usage_json(done), "mlx_zip": vendor_json(done)}
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self._add_event(f"response.{status}", response=self.response)

    def _is_open(self, kind: str) -> bool:
        return self._item.get("type") == kind

    def _open_item(self, item: Json) -> None:
        self._close_item("completed")
        self._item = {**item, "status": "in_progress"}
        self.response["output"].append(self._item)
        place = {"output_index": len(self.response["output"]) - 1}
        self._add_event("response.output_item.added", **place, item=deepcopy(self._item))

    def _close_item(self, status: str) -> None:
        """Ends the item that is being written, if there is one."""
        item, text = self._item, "".join(self._pieces)
        if not item:
            return
        if item["type"] == "message":
            part = item["content"][0]
            part["text"] = text
            self._add_event("response.output_text.done", **self._item_place(), text=text, logprobs=part["logprobs"])
            self._add_event("response.content_part.done", **self._item_place(), part=part)
        elif item["type"] == "reasoning":
            part = item["summary"][0]
            part["text"] = text
            self._add_event("response.reasoning_summary_text.done", **self._item_place(), text=text)
            self._add_event("response.reasoning_summary_part.done", **self._item_place(), part=part)
        else:
            item["arguments"] = text
            self._add_event(
                "response.function_call_arguments.done", **self._item_place(), name=item["name"], arguments=text
            )
        item["status"] = status
        place = {"output_index": len(self.response["output"]) - 1}
        self._add_event("response.output_item.done", **place, item=deepcopy(item))
        self._item, self._pieces = {}, []

    def _item_place(self) -> Json:
        parts = {"message": {"content_index": 0}, "reasoning": {"summary_index": 0}, "function_call": {}}
        place = {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}
        return place | parts[self._item["type"]]

    def _add_event(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1

    def _take_events(self) -> list[Json]:
        events, self._events = self._events, []
        return events


def response_usage_json(done: Done) -> Json:
    """Returns the usage, in base tokens."""
    counts = done.counts
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.base_tokens,
        "output_tokens_details": {"reasoning_tokens": done.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.base_tokens,
    }


def _initial_fields(body: ResponseBody, model: str) -> Json:
    """Returns the fields of a new response: those that the request sets, and those not known yet, as None."""
    given = body.model_dump(by_alias=True)
    same = ("instructions", "max_output_tokens", "parallel_tool_calls", "previous_response_id", "store", "temperature")
    same += ("top_p", "tool_choice", "truncation", "metadata", "background")
    return {
        "object": "response",
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "completed_at": None,
        "usage": None,
        **{name: given[name] for name in same},
        "tools": given["tools"],
        "text": {"format": given["text"]["format"], "verbosity": "medium"},
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "top_logprobs": body.top_logprobs or 0,
        "service_tier": "default",
    }
