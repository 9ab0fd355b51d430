"""Builds answers of OpenAI's Responses API from deltas: the events of a stream, and the whole response."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from mlx_zip.server.answers.turn import Delta, Done, Reasoning, Text, ToolCall, vendor_json
from mlx_zip.server.fields import new_prefixed_id
from mlx_zip.server.openai.choices import logprobs_json
from mlx_zip.server.openai.responses_bodies import ResponseBody

Json = dict[str, Any]


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
