"""A small HTTP client on raw sockets that records when each event of a streamed answer arrives.

It talks to servers on this machine, one request per connection, in the dialect of chat completions.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
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


# ---- chat completions


def chat_text(reply: Reply) -> str:
    """Returns the text of a streamed chat completion."""
    choices = [choice for _, event in reply.events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def answered_tokens(reply: Reply) -> int:
    """Returns the base tokens of a streamed chat completion, as the server counts them."""
    found = next(
        event["usage"] for _, event in reversed(reply.events) if isinstance(event, dict) and event.get("usage")
    )
    return found["completion_tokens"]


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

    async def answer(self, content: str, max_tokens: int) -> Reply:
        """Returns the greedy streamed answer to one message."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await send_request(self.port, "/v1/chat/completions", body)


def first_text_s(reply: Reply) -> float:
    """Returns the seconds from the request to a streamed chat completion's first text; without text, to its end."""
    for seconds, event in reply.events:
        if isinstance(event, dict) and any(one["delta"].get("content") for one in event.get("choices") or ()):
            return seconds
    return reply.seconds
