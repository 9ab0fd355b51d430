"""What all routes share: JSON bodies of limited size, answers that end when the client disconnects, event streams."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.errors import first_message_line
from mlx_zip.files import refuse_json_constant
from mlx_zip.server.core import Core
from mlx_zip.server.errors import RequestError, as_request_error, json_bytes
from mlx_zip.server.fields import Body, parse_body

Some = TypeVar("Some")
Kind = TypeVar("Kind", bound=Body)
_CLOSE = {"Connection": "close"}
_DISCARDED_S = 2.0  # time for which the rest of a too large body is read, so that the client gets the answer
BODY_S = 60.0  # time within which a body must arrive
_PING_S = 15  # seconds between comments in a stream that has nothing else to send
_MOST_DEPTH = 100  # maximum nesting of a body's JSON
_LARGE = 1 << 18  # bytes; a body of this size or more is parsed in a thread


class ClientGone(Exception):
    """The client closed the connection before the answer was ready."""


def check_model_name(core: Core, name: str) -> None:
    """Raises `RequestError` with status 404 unless `name` is the served model or "default_model", as in mlx-lm."""
    if name not in (core.model, "default_model"):
        message = f"there is no model {name!r}; this server has {core.model!r} alone"
        raise RequestError(404, message, "model_not_found", "model")


class BodyRoute(Route):
    """A route whose requests have a JSON body, which `answer` gets as an instance of the class `body`.

    method: the HTTP method. most: maximum bytes of a body, None for `max_body_bytes` of the options.
    """

    def __init__(
        self,
        core: Core,
        path: str,
        body: type[Kind],
        answer: Callable[[Request, Kind], Awaitable[Response]],
        method: str = "POST",
        most: int | None = None,
    ) -> None:
        async def endpoint(request: Request) -> Response:
            return await answer(request, await read_body(request, core, body, most))

        endpoint.__doc__ = answer.__doc__
        super().__init__(path, endpoint, methods=[method])
        self.body = body


async def read_body(request: Request, core: Core, kind: type[Kind], most: int | None = None) -> Kind:
    """Returns a request's body as an instance of `kind`. most: maximum bytes, None for `max_body_bytes` of the options.

    Raises `RequestError` with status 415 if the content type is not JSON, 413 if the body has more than `most` bytes,
    408 if it arrives too slowly, 400 if it is not JSON; `PromptTooLongError` if its size means that a prompt is too
    long; `BodyError` if `kind` refuses it; `ClientGone` if the client disconnects.
    """
    _check_content_type(request)
    most = core.options.max_body_bytes if most is None else most
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 18 and int(length) <= most:
        await core.check_body_size(int(length), kind.most_prompts)
    try:
        async with asyncio.timeout(BODY_S):
            body = await _read_bytes(request, most)
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_S:g} s"
        raise RequestError(408, message, "timeout", headers=_CLOSE) from error
    except ClientDisconnect as error:
        raise ClientGone from error

    def parsed() -> Kind:
        return parse_body(kind, parse_json(body))

    return parsed() if len(body) < _LARGE else await core.run_in_thread(parsed)


def _check_content_type(request: Request) -> None:
    """Raises `RequestError` unless the headers announce uncompressed JSON in UTF-8."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise RequestError(
            415, "the body must be JSON in UTF-8, with the header Content-Type: application/json", "type"
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(415, "a compressed body (Content-Encoding) is not supported", "encoding")


async def _read_bytes(request: Request, most: int) -> bytes:
    """Returns the bytes of a body. Raises `RequestError` with status 413 if there are more than `most`."""
    length = request.headers.get("content-length", "")
    waits = request.headers.get("expect", "").lower() == "100-continue"
    large = length.isdecimal() and (len(length) > 18 or int(length) > most)
    body = bytearray()
    if not (large and waits):  # a client that waits for 100 Continue has sent nothing yet
        chunks = aiter(request.stream())
        if not large:
            async for chunk in chunks:
                body += chunk
                if large := len(body) > most:
                    break
        if large:
            body.clear()
            await _discard_body(chunks)
    if large:
        raise RequestError(413, f"the body is larger than {most} bytes", "request_too_large", headers=_CLOSE)
    return bytes(body)


async def _discard_body(chunks: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(_DISCARDED_S):
            async for _ in chunks:
                pass
    except TimeoutError:
        return


def parse_json(body: bytes) -> Any:
    """Returns the value of JSON text. Raises `RequestError` if it is not JSON, or nested too deep."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse_json_constant, parse_float=_parse_finite)
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8 at byte {error.start}", "invalid_json") from error
    except RecursionError as error:
        raise _json_depth_error() from error
    except ValueError as error:  # not JSON, or a number with thousands of digits
        raise RequestError(400, f"the body is not JSON: {first_message_line(error)}", "invalid_json") from error
    _check_json_depth(value)
    return value


def _parse_finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is too large")
    return number


def _check_json_depth(value: Any) -> None:
    """Raises `RequestError` if the lists and objects in `value` are nested too deep."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _json_depth_error()


def _json_depth_error() -> RequestError:
    return RequestError(400, f"the body is nested deeper than {_MOST_DEPTH} levels", "too_deep")


async def run_unless_client_gone(request: Request, work: Awaitable[Some]) -> Some:
    """Returns the result of `work`; if the client closes the connection, cancels `work` and raises `ClientGone`."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with a value as JSON."""
    return Response(json_bytes(value), status, media_type="application/json", headers=dict(headers or {}))


async def stream_response(
    request: Request,
    core: Core,
    frames: AsyncGenerator[bytes, None],
    on_error: Callable[[RequestError], bytes] | None = None,
) -> Response:
    """Returns a response that streams frames of server-sent events (see `event_bytes`) as they are yielded.

    Waits for the first frame, so that an error before it gets its own HTTP status. A later error becomes the last event
    of the stream: the frame that `on_error` returns or, if None, OpenAI's error object. Closes `frames` when the
    client disconnects.
    """
    first = await run_unless_client_gone(request, anext(frames, b""))
    return EventSourceResponse(
        _frames_until_error(first, frames, on_error or (lambda error: event_bytes(error.body()))),
        ping=_PING_S,
        ping_message_factory=lambda: ServerSentEvent(comment="waiting", sep="\n"),
        shutdown_grace_period=core.options.drain_s + 5,
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"},
    )


async def _frames_until_error(
    first: bytes, frames: AsyncGenerator[bytes, None], on_error: Callable[[RequestError], bytes]
) -> AsyncIterator[bytes]:
    """Yields `first`, then `frames`; after an error, the frame that `on_error` returns. Closes `frames` at the end."""
    async with aclosing(frames):
        if first:
            yield first
        try:
            async for frame in frames:
                yield frame
        except Exception as error:  # any error is reported to the client
            yield on_error(as_request_error(error))


def event_bytes(value: Any, event: str | None = None) -> bytes:
    """Returns a frame with one server-sent event, whose data is `value` as JSON. event: its name, None for none."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + json_bytes(value) + b"\n\n"


def events_bytes(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns a frame with several events, each named by its field "type"; b"" for no events."""
    return b"".join(event_bytes(event, event["type"]) for event in events)


def comment_bytes(text: str) -> bytes:
    """Returns a frame with a comment, which clients ignore and which keeps the connection open."""
    return f": {text}\n\n".encode()
