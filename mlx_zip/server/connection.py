"""One connection of a client, by uvicorn, with bounds for clients that are slow, half gone or talk nonsense."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import (  # uvicorn brings its parser
    H11Protocol,
    h11,  # pyright: ignore[reportPrivateImportUsage]
)

from mlx_zip.server.errors import Failure, dialect_of, json_bytes
from mlx_zip.server.options import Options

MOST_BEGUN = 100  # bytes that are kept of what may be no HTTP
MOST_AHEAD = 64 << 10  # bytes of further requests that are read while one is answered
HALF_CLOSED_S = 0.25  # in which a client that has closed its sending side still gets an answer
LINGER_S, LINGER_BYTES = 2.0, 64 << 20  # how long, and how much of a refused request, is read behind its answer


def connection_class(options: Options) -> type[H11Protocol]:
    """Returns uvicorn's class of a connection, with the server's bounds."""
    return type("Connection", (Connection,), {"head_s": options.body_timeout_s, "stall_s": options.stall_timeout_s})


class Connection(H11Protocol):
    """A connection. head_s: time for the head of a request. stall_s: time in which a client must read something."""

    head_s = stall_s = 60.0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _has_eof = False  # whether the client has closed its sending side
    _lingered = 0  # bytes read since the answer to a refused request
    _begun = b""  # how the head of a request begins, as far as an error's dialect depends on it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the head of a request."""
        super().connection_made(cast(asyncio.Transport, _Lingering(transport, self)))
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; the clock runs while a head is incomplete."""
        if self._linger_timer is not None:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES:
                self.transport.abort()
            return
        if self._waits_for_head:
            self._begun = (self._begun + data[:MOST_BEGUN])[:MOST_BEGUN]
        super().data_received(data)
        self._expect_head()
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Keeps reading while a request is answered; otherwise a client that leaves would go unnoticed."""
        is_paused = self.flow.read_paused and not self._waits_for_head and self.conn.their_state is h11.DONE
        if is_paused and len(self.conn.trailing_data[0]) < MOST_AHEAD:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Goes on with the next request, of which bytes may have come already."""
        self._begun = self.conn.trailing_data[0][:MOST_BEGUN]
        super().on_response_complete()

    @property
    def _waits_for_head(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        """Starts the clock if no request is under way, and stops it otherwise."""
        waits = self._waits_for_head
        if waits and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)
        elif not waits:
            self._head_timer = _stopped(self._head_timer)

    @property
    def has_unread(self) -> bool:
        """Whether the client may have sent, or may go on to send, what was not read."""
        if self._has_eof:
            return False
        partly = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        return partly or bool(self.conn.trailing_data[0])

    def linger(self) -> None:
        """Reads on for a while and keeps nothing, so that the client reads its answer, and closes the connection.

        A connection that is closed with unread input is reset, and the client may lose what was sent to it.
        """
        self._head_timer = _stopped(self._head_timer)
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)
        self.flow.resume_reading()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Lets an answer that comes at once be sent. Then the client has left: most close both sides together."""
        self._has_eof = True
        if self._waits_for_head or self._linger_timer is not None:
            return None
        self.loop.call_later(HALF_CLOSED_S, self.transport.close)
        return True

    def pause_writing(self) -> None:
        """Starts the clock of a client that does not read."""
        super().pause_writing()
        self._stall_timer = self._stall_timer or self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops that clock."""
        super().resume_writing()
        self._stall_timer = _stopped(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all clocks."""
        for timer in (self._head_timer, self._stall_timer, self._linger_timer):
            _stopped(timer)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP with an error as JSON, unless another answer is already on its way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json_bytes(Failure(400, msg, "invalid_http").body(dialect_of(self._path())))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: some clients offer HTTP/2 with every request, and are answered as if they did not."""

    def _path(self) -> str:
        """Returns the path of the request under way, or what stands in its place in what is no HTTP."""
        if not self._waits_for_head:
            return self.scope["path"]
        words = self._begun.decode("latin-1").split()
        return words[1] if len(words) > 1 else ""


class _Lingering:
    """The transport of a connection. To close it while input is unread is to stop writing, and to read on."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection, self._closing = transport, connection, False

    def close(self) -> None:
        """Closes the connection, once its client has read what was sent or a while has passed."""
        if self._closing or self._transport.is_closing():
            return
        if not self._connection.has_unread:
            self._transport.close()
            return
        self._closing = True
        self._transport.write_eof()
        self._connection.linger()

    def is_closing(self) -> bool:
        """Returns whether nothing more can be sent."""
        return self._closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    """Stops a clock."""
    if timer is not None:
        timer.cancel()
