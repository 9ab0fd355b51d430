"""A small HTTP client on raw sockets that notes when each event of a streamed answer arrives.

It asks servers on this machine. One connection carries one request.
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
    """What a server answered.

    events: of a streamed answer, (seconds after the request was sent, JSON of a `data:` line). body: JSON of another
    answer, None if it is no JSON. seconds: until the last byte.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    events: list[tuple[float, Any]] = field(default_factory=list)
    seconds: float = 0.0


async def ask(
    port: int,
    path: str,
    body: Any = None,
    *,
    leave_after: int | None = None,
    timeout_s: float = 120.0,
    method: str | None = None,
) -> Reply:
    """Sends a request to 127.0.0.1 and returns the reply; by default a POST of JSON, or a GET if there is no body.

    body: a value to be sent as JSON, or bytes to be sent as they are. leave_after: close the connection after so many
    events of a streamed answer. Raises `MlxZipError` if the server does not answer whole within timeout_s seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(port, path, body, leave_after, method or ("GET" if body is None else "POST"))
    except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise MlxZipError(f"{path} on port {port}: no whole answer ({type(error).__name__}: {error})") from error


async def _ask(port: int, path: str, body: Any, leave_after: int | None, method: str) -> Reply:
    """Does what `ask` does, without a limit on the time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        sent = time.perf_counter()
        writer.write(_request(port, path, body, method))
        await writer.drain()
        reply = await _head(reader)
        parts = _chunks(reader) if reply.headers.get("transfer-encoding") == "chunked" else _rest(reader, reply)
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            async with aclosing(_data_lines(parts)) as lines:
                async for line in lines:
                    reply.events.append((time.perf_counter() - sent, line))
                    if len(reply.events) == leave_after:
                        break
        else:
            reply.body = _json(b"".join([part async for part in parts]))
        reply.seconds = time.perf_counter() - sent
        return reply
    finally:
        writer.close()


def _request(port: int, path: str, body: Any, method: str) -> bytes:
    """Returns the bytes of a request."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = [
        f"{method} {path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + content


async def _head(reader: asyncio.StreamReader) -> Reply:
    """Reads status and headers, names in lower case."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines[1:] if line)
    return Reply(int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in pairs})


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the parts of a chunked body."""
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader, reply: Reply) -> AsyncIterator[bytes]:
    """Yields the parts of a body that is not chunked."""
    left = int(reply.headers.get("content-length", -1))
    while left and (part := await reader.read(65536 if left < 0 else min(left, 65536))):
        left -= len(part) if left > 0 else 0
        yield part


async def _data_lines(parts: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Yields what the `data:` lines of an event stream hold: JSON values, or a text that is none, such as [DONE]."""
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                text = line[5:].strip()
                value = _json(text)
                yield text.decode() if value is None else value


def _json(text: bytes) -> Any:
    """Returns the JSON value of a text, or None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None
