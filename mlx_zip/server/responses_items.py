"""Items of OpenAI's Responses, which a conversation consists of, and the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlx_zip.server.fields import BodyError, Many, RefusalPart, Said, arguments_of

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Said):
    """A piece of a message's text. Its notes (annotations, log-probabilities) have no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Message(Said):
    """A message of the user, the system, the developer (whose messages are the system's) or the model."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Many[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]
    id: str | None = None
    status: Status | None = None


class FunctionCall(Said):
    """A call that the model made. arguments: JSON text of an object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Said):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[TextPart]
    id: str | None = None
    status: Status | None = None


class SummaryText(Said):
    """A piece of the model's reasoning."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(Said):
    """What the model reasoned. Encrypted content of another server cannot be read, and has no effect."""

    type: Literal["reasoning"]
    summary: Many[SummaryText] = Field(default_factory=list)
    content: Many[SummaryText] = Field(default_factory=list)
    id: str | None = None
    status: Status | None = None


class ItemReference(Said):
    """The id of an item of a stored response."""

    type: Literal["item_reference"]
    id: str


def _with_type(given: Any) -> Any:
    """Returns an item with its type; one without a type is a message."""
    return {**given, "type": "message"} if isinstance(given, Mapping) and given.get("type") is None else given


Item = Annotated[
    Message | FunctionCall | FunctionCallOutput | ReasoningItem | ItemReference,
    Field(discriminator="type"),
    BeforeValidator(_with_type),
]


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def named_item(item: Mapping[str, Any], make_id: Callable[[str], str]) -> dict[str, Any]:
    """Returns an item of a request as responses show it: with an id, a status, and content in parts."""
    named = {"id": make_id(_PREFIXES.get(item["type"], "item")), "status": "completed", **item}
    if isinstance(item.get("content"), str):
        notes = {"annotations": []} if item["role"] == "assistant" else {}
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        named["content"] = [{"type": kind, "text": item["content"], **notes}]
    return named


def messages_of(items: Sequence[Mapping[str, Any]], before: int = 0) -> list[dict[str, Any]]:
    """Returns the messages of items. What the model did in one go becomes one message: reasoning, text and calls.

    before: how many of the items precede those of the request. Raises `BodyError` for an output without its call, and
    for arguments that are no JSON object.
    """
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    for i, item in enumerate(items):
        kind, place = item["type"], f"input.{i - before}"
        if kind == "message":
            _add_message(messages, item)
        elif kind == "reasoning":
            pieces = item.get("content") or item.get("summary") or []
            messages.append({"role": "assistant", "reasoning_content": _joined(pieces, "\n"), "content": ""})
        elif kind == "function_call":
            calls.add(item["call_id"])
            _add_call(messages, item, f"{place}.arguments")
        elif item["call_id"] not in calls:
            raise BodyError(f"there is no call {item['call_id']!r} before this output", f"{place}.call_id")
        else:
            text = _joined(item["output"], "\n")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Adds a message; one of the model goes with the reasoning before it."""
    if item["role"] != "assistant":
        role = "user" if item["role"] == "user" else "system"
        messages.append({"role": role, "content": _joined(item["content"], "\n")})
        return
    text = _joined(item["content"], "")
    if messages and messages[-1].keys() == {"role", "reasoning_content", "content"} and not messages[-1]["content"]:
        messages[-1]["content"] = text
    else:
        messages.append({"role": "assistant", "content": text})


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """Adds a call to the model's message, or begins one. place: path of the arguments, for errors."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": arguments_of(item["arguments"] or "{}", place)}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _joined(content: str | Sequence[Mapping[str, Any]], between: str) -> str:
    """Returns the text of a content: text, or a list of parts."""
    if isinstance(content, str):
        return content
    return between.join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)
