"""One request in each dialect that the server speaks: its path, its body, and what the answer says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .http_client import Reply

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Dialect:
    """How to ask in a dialect, and how to read the answer.

    body(messages, max_tokens, stream) makes a greedy request, to which the caller adds the model's name. text(reply)
    and usage(reply) read the answer: its text, and its base tokens as (prompt, cached ones of these, answer).
    """

    name: str
    path: str
    body: Callable[[Messages, int, bool], dict[str, Any]]
    text: Callable[[Reply], str]
    usage: Callable[[Reply], tuple[int, int, int]]


def _chat_body(messages: Messages, max_tokens: int, stream: bool) -> dict[str, Any]:
    """Returns a body for /v1/chat/completions."""
    body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def _chat_text(reply: Reply) -> str:
    """Returns the text of a chat completion, streamed or whole."""
    if not reply.events:
        return reply.body["choices"][0]["message"]["content"] or ""
    choices = [choice for _, event in reply.events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _chat_usage(reply: Reply) -> tuple[int, int, int]:
    """Returns the usage of a chat completion."""
    found = reply.body["usage"] if not reply.events else _last_with(reply, "usage")["usage"]
    cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return found["prompt_tokens"], cached, found["completion_tokens"]


def _responses_body(messages: Messages, max_tokens: int, stream: bool) -> dict[str, Any]:
    """Returns a body for /v1/responses."""
    return {
        "input": list(messages),
        "max_output_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
        "store": False,
    }


def _response(reply: Reply) -> dict[str, Any]:
    """Returns the response object, from the last event of a streamed answer."""
    return reply.body if not reply.events else _last_with(reply, "response")["response"]


def _responses_text(reply: Reply) -> str:
    """Returns the text of a response."""
    items = [item for item in _response(reply)["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in items for part in item["content"])


def _responses_usage(reply: Reply) -> tuple[int, int, int]:
    """Returns the usage of a response."""
    found = _response(reply)["usage"]
    return found["input_tokens"], found["input_tokens_details"]["cached_tokens"], found["output_tokens"]


def _anthropic_body(messages: Messages, max_tokens: int, stream: bool) -> dict[str, Any]:
    """Returns a body for /v1/messages."""
    return {
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }


def _anthropic_text(reply: Reply) -> str:
    """Returns the text of a message."""
    if not reply.events:
        return "".join(block.get("text", "") for block in reply.body["content"])
    deltas = [event["delta"] for _, event in reply.events if event.get("type") == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas)


def _anthropic_usage(reply: Reply) -> tuple[int, int, int]:
    """Returns the usage of a message; what was cached is not among its input_tokens."""
    found: dict[str, Any] = {}
    for part in [reply.body] if not reply.events else [event for _, event in reply.events]:
        found |= (part.get("message") or part).get("usage") or {}
    cached = found.get("cache_read_input_tokens") or 0
    return found["input_tokens"] + cached, cached, found["output_tokens"]


def _last_with(reply: Reply, key: str) -> dict[str, Any]:
    """Returns the last event of a streamed answer that has a value for the key."""
    return next(event for _, event in reversed(reply.events) if isinstance(event, dict) and event.get(key))


CHAT = Dialect("chat completions", "/v1/chat/completions", _chat_body, _chat_text, _chat_usage)
RESPONSES = Dialect("responses", "/v1/responses", _responses_body, _responses_text, _responses_usage)
MESSAGES = Dialect("messages", "/v1/messages", _anthropic_body, _anthropic_text, _anthropic_usage)
DIALECTS = (CHAT, RESPONSES, MESSAGES)
