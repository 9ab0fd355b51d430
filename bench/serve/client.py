"""A small HTTP client on raw sockets that records when each event of a streamed answer arrives.

It talks to servers on this machine, one request per connection. A `Dialect` knows a request's path and body, and reads
text and usage from the answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from mlx_zip.errors import MlxZipError


@dataclass
class Reply:
    """A server's answer.

    events: for a streamed answer, (seconds after the request was sent, content of a `data:` line). body: content of any
    other answer. JSON is parsed; anything else is kept as text. seconds: time until the last byte.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    events: list[tuple[float, Any]] = field(default_factory=list)
    seconds: float = 0.0


async def send_request(
    port: int,
    path: str,
    body: Any = None,
    *,
    timeout_s: float = 120.0,
) -> Reply:
    """Sends a request to 127.0.0.1 and returns the reply: a POST of `body` as JSON, or a GET if there is no body.

    Raises `MlxZipError` if no complete answer arrives within timeout_s seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await send_without_time_limit(port, path, body)
    except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise MlxZipError(f"{path} on port {port}: no whole answer ({type(error).__name__}: {error})") from error


async def send_without_time_limit(port: int, path: str, body: Any) -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        sent = time.perf_counter()
        writer.write(request_bytes(port, path, body))
        await writer.drain()
        reply = await read_head(reader)
        parts = (
            read_chunks(reader)
            if reply.headers.get("transfer-encoding") == "chunked"
            else read_body_parts(reader, reply)
        )
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            async with aclosing(read_event_data(parts)) as lines:
                async for line in lines:
                    reply.events.append((time.perf_counter() - sent, line))
        else:
            reply.body = parse_json_or_text(b"".join([part async for part in parts]))
        reply.seconds = time.perf_counter() - sent
        return reply
    finally:
        writer.close()


def request_bytes(port: int, path: str, body: Any) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + content


async def read_head(reader: asyncio.StreamReader) -> Reply:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines[1:] if line)
    return Reply(int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in pairs})


async def read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def read_body_parts(reader: asyncio.StreamReader, reply: Reply) -> AsyncIterator[bytes]:
    left = int(reply.headers.get("content-length", -1))
    while left and (part := await reader.read(65536 if left < 0 else min(left, 65536))):
        left -= len(part) if left > 0 else 0
        yield part


async def read_event_data(parts: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Yields the content of an event stream's `data:` lines: JSON values, or text that is not JSON, such as [DONE]."""
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield parse_json_or_text(line[5:].strip())


def parse_json_or_text(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")


# ---- dialects: the APIs that the server offers

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Dialect:
    """How to write a request in a dialect, and how to read the answer.

    body(messages, max_tokens, stream) makes a greedy request, to which the caller adds the model's name. text(reply)
    and usage(reply) read the answer: its text, and its base tokens as (prompt, of these cached, answer).
    """

    name: str
    path: str
    body: Callable[[Messages, int, bool], dict[str, Any]]
    text: Callable[[Reply], str]
    usage: Callable[[Reply], tuple[int, int, int]]


def _chat_body(messages: Messages, max_tokens: int, stream: bool) -> dict[str, Any]:
    body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def _chat_text(reply: Reply) -> str:
    if not reply.events:
        return reply.body["choices"][0]["message"]["content"] or ""
    choices = [choice for _, event in reply.events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _chat_usage(reply: Reply) -> tuple[int, int, int]:
    found = reply.body["usage"] if not reply.events else last_event_with(reply, "usage")["usage"]
    cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return found["prompt_tokens"], cached, found["completion_tokens"]


def _responses_body(messages: Messages, max_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "input": list(messages),
        "max_output_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
        "store": False,
    }


def final_response_object(reply: Reply) -> dict[str, Any]:
    """Returns the response object of an answer; of a streamed answer, from its last event."""
    return reply.body if not reply.events else last_event_with(reply, "response")["response"]


def _responses_text(reply: Reply) -> str:
    items = [item for item in final_response_object(reply)["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in items for part in item["content"])


def _responses_usage(reply: Reply) -> tuple[int, int, int]:
    found = final_response_object(reply)["usage"]
    return found["input_tokens"], found["input_tokens_details"]["cached_tokens"], found["output_tokens"]


def _anthropic_body(messages: Messages, max_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }


def _anthropic_text(reply: Reply) -> str:
    if not reply.events:
        return "".join(block.get("text", "") for block in reply.body["content"])
    deltas = [event["delta"] for _, event in reply.events if event.get("type") == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas)


def _anthropic_usage(reply: Reply) -> tuple[int, int, int]:
    """Returns the usage of a message, with cached tokens added to `input_tokens`, which do not include them."""
    found: dict[str, Any] = {}
    for part in [reply.body] if not reply.events else [event for _, event in reply.events]:
        found |= (part.get("message") or part).get("usage") or {}
    cached = found.get("cache_read_input_tokens") or 0
    return found["input_tokens"] + cached, cached, found["output_tokens"]


def last_event_with(reply: Reply, key: str) -> dict[str, Any]:
    return next(event for _, event in reversed(reply.events) if isinstance(event, dict) and event.get(key))


CHAT = Dialect("chat completions", "/v1/chat/completions", _chat_body, _chat_text, _chat_usage)
RESPONSES = Dialect("responses", "/v1/responses", _responses_body, _responses_text, _responses_usage)
MESSAGES = Dialect("messages", "/v1/messages", _anthropic_body, _anthropic_text, _anthropic_usage)
DIALECTS = (CHAT, RESPONSES, MESSAGES)


# ---- sending a request, and the times of its answer


async def served_model_name(port: int) -> str:
    """Returns the name of the first model that a server lists. Raises `MlxZipError` if it lists none."""
    reply = await send_request(port, "/v1/models")
    try:
        return reply.body["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise MlxZipError(f"the server on port {port} lists no model (/v1/models, status {reply.status})") from error


@dataclass(frozen=True)
class AskedServer:
    """A server to send requests to. model: the server's name for its model."""

    port: int
    model: str

    async def answer(self, content: str, max_tokens: int, dialect: Dialect = CHAT) -> Reply:
        """Returns the streamed answer to one message."""
        body = dialect.body([{"role": "user", "content": content}], max_tokens, True) | {"model": self.model}
        return await send_request(self.port, dialect.path, body)


def text_times(reply: Reply) -> list[float]:
    """Returns when each piece of text of a streamed chat completion arrived, in seconds after the request."""
    return [
        seconds
        for seconds, event in reply.events
        if isinstance(event, dict) and any(one["delta"].get("content") for one in event.get("choices") or ())
    ]


def first_text_s(reply: Reply) -> float:
    """Returns the seconds from the request to a streamed chat completion's first text; without text, to its end."""
    return next(iter(text_times(reply)), reply.seconds)
