"""Runs the server under uvicorn: lets answers end before the server stops, and stops it when its engine dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import (  # uvicorn brings its parser
    H11Protocol,
    h11,  # pyright: ignore[reportPrivateImportUsage]
)

from mlx_zip.engine import Engine
from mlx_zip.errors import failure_reason
from mlx_zip.server.app import make_app
from mlx_zip.server.core import Core
from mlx_zip.server.errors import RequestError, dialect_of, json_bytes
from mlx_zip.server.options import Options

log = logging.getLogger(__name__)
AFTER_DRAIN_S = 5.0  # time for sending the last events of answers that were cut off
AFTER_FAULT_S = 2.0
AT_ONCE_S = 1.0  # time for sending those events after a second SIGINT


class Server(uvicorn.Server):
    """Serves a core on sockets. fault: the exception that ended the engine's thread, None while the thread runs.

    On SIGTERM, SIGINT and SIGHUP no new connections are accepted, answers in flight have `drain_s` seconds to end, and
    the engine is closed. A second SIGINT ends the server at once. app: ASGI app to run, None for that of `make_app`.
    """

    def __init__(
        self,
        core: Core,
        log_level: str = "warning",
        on_start: Callable[[], None] = lambda: None,
        app: ASGIApp | None = None,
    ) -> None:
        self._core, self._on_start = core, on_start
        self.fault: BaseException | None = None
        drain_s = core.options.drain_s
        super().__init__(
            uvicorn.Config(
                app or make_app(core),
                http=_Connection,
                ws="none",
                log_level=log_level.lower(),
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=int(drain_s + AFTER_DRAIN_S),
            )
        )
        core.engine.call_on_fault(self._stop_after_fault)

    def _stop_after_fault(self, fault: BaseException) -> None:
        """Stops the server because the engine's thread has ended; called in that thread."""
        self.fault = fault
        self.config.timeout_graceful_shutdown = int(AFTER_FAULT_S)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Context manager: SIGHUP, sent when a terminal closes, ends the server like SIGTERM, unless it is ignored."""
        with super().capture_signals():
            main = threading.current_thread() is threading.main_thread()
            before = signal.getsignal(signal.SIGHUP)
            ours = main and before not in (signal.SIG_IGN, None)
            if ours:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if ours:
                    signal.signal(signal.SIGHUP, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen, and calls `on_start`."""
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers end, closes the engine, and closes all connections."""
        engine, drain_s = self._core.engine, self._core.options.drain_s
        closing = threading.Thread(target=engine.close, args=(drain_s,), daemon=True)
        closing.start()
        await super().shutdown(sockets)
        if self.force_exit:
            await self._abort_answers()
        while closing.is_alive() and not self.force_exit and self.fault is None:
            await asyncio.sleep(0.02)

    async def _abort_answers(self) -> None:
        """Ends answers in flight with an error, and aborts connections still busy after `AT_ONCE_S` seconds."""
        threading.Thread(target=self._core.engine.close, daemon=True).start()
        last = time.monotonic() + AT_ONCE_S
        while self.server_state.tasks and time.monotonic() < last:
            await asyncio.sleep(0.02)
        for connection in list(self.server_state.connections):
            cast(Any, connection).transport.abort()
        await self.lifespan.shutdown()


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address, not yet listening. Port 0 takes a free port. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def serve(engine: Engine, options: Options, listener: socket.socket, log_level: str) -> BaseException | None:
    """Prints one line with the address, and serves until a signal arrives, which is then raised again.

    Returns the exception that ended the engine's thread if the server stopped because of it, else None.
    """
    host, port = listener.getsockname()[:2]
    core = Core(engine, options)
    place = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def say() -> None:
        try:
            print(f"serving {core.model} on {place}/v1 (Ctrl-C ends)", flush=True)
        except OSError as error:  # the reader has left, or a disk is full: clients are served all the same
            log.warning("serving on %s/v1; the output cannot be written: %s", place, failure_reason(error))
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    server = Server(core, log_level, say)
    server.run([listener])
    return server.fault


# ---- a connection, with limits for clients that are slow, have closed one side or send invalid HTTP

HEAD_S = 60.0  # time within which a request's head must arrive
STALL_S = 60.0  # time after which a client that reads nothing is disconnected
MOST_BEGUN = 100  # bytes of a request's beginning that are kept; they may not be HTTP
MOST_AHEAD = 64 << 10  # bytes of further requests that are read while one is answered
HALF_CLOSED_S = 0.25  # time for which a client that has closed its sending side still gets an answer
LINGER_S, LINGER_BYTES = 2.0, 64 << 20  # limits of reading the rest of a refused request after its answer


class _Connection(H11Protocol):
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _has_eof = False  # whether the client has closed its sending side
    _lingered = 0  # bytes read since the answer to a refused request
    _begun = b""  # first bytes of a request's head; its path sets the dialect of errors

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _LingeringTransport(transport, self)))
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        """Takes bytes that arrived, and starts or stops the head timer. Drops bytes that follow a refused request."""
        if self._linger_timer is not None:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES:
                self.transport.abort()
            return
        if self._is_waiting_for_head:
            self._begun = (self._begun + data[:MOST_BEGUN])[:MOST_BEGUN]
        super().data_received(data)
        self._update_head_timer()
        self._keep_reading()

    def _keep_reading(self) -> None:
        """Keeps reading while a request is answered; otherwise a client that disconnects would go unnoticed."""
        is_paused = self.flow.read_paused and not self._is_waiting_for_head and self.conn.their_state is h11.DONE
        if is_paused and len(self.conn.trailing_data[0]) < MOST_AHEAD:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Goes on with the next request, whose first bytes may already have arrived."""
        self._begun = self.conn.trailing_data[0][:MOST_BEGUN]
        super().on_response_complete()

    @property
    def _is_waiting_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _update_head_timer(self) -> None:
        """Starts the timer if the connection waits for a request's head, and stops it otherwise."""
        waits = self._is_waiting_for_head
        if waits and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)
        elif not waits:
            self._head_timer = _cancel_timer(self._head_timer)

    @property
    def has_unread(self) -> bool:
        """Whether the client may have sent, or may still send, bytes that were not read."""
        if self._has_eof:
            return False
        partly = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        return partly or bool(self.conn.trailing_data[0])

    def linger(self) -> None:
        """Reads and drops input for up to `LINGER_S` seconds, then closes the connection.

        Closing a connection with unread input resets it, and the client may lose the answer that was sent.
        """
        self._head_timer = _cancel_timer(self._head_timer)
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)
        self.flow.resume_reading()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Closes the connection at once or, while an answer is in flight, after `HALF_CLOSED_S` seconds.

        Most clients that close their sending side close both sides.
        """
        self._has_eof = True
        if self._is_waiting_for_head or self._linger_timer is not None:
            return None
        self.loop.call_later(HALF_CLOSED_S, self.transport.close)
        return True

    def pause_writing(self) -> None:
        """Starts the timer that disconnects a client that does not read."""
        super().pause_writing()
        self._stall_timer = self._stall_timer or self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _cancel_timer(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer, self._linger_timer):
            _cancel_timer(timer)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP with an error as JSON, unless another answer has already begun.

        uvicorn calls it while it handles h11's error. The status is 431 if h11 suggests this for a head, else 400: it
        also does so for the sizes and the trailer of a body in chunks.
        """
        status = 400
        if self._is_waiting_for_head and getattr(sys.exception(), "error_status_hint", None) == 431:
            status, msg = 431, "the request's line and headers are too large"
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json_bytes(RequestError(status, msg, "invalid_http").body(dialect_of(self._request_path())))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: some clients offer HTTP/2 with every request, and are answered over HTTP/1.1."""

    def _request_path(self) -> str:
        if not self._is_waiting_for_head:
            return self.scope["path"]
        words = self._begun.decode("latin-1").split()
        return words[1] if len(words) > 1 else ""


class _LingeringTransport:
    """A connection's transport. If input is unread, `close` only ends writing, and the connection reads on."""

    def __init__(self, transport: asyncio.Transport, connection: _Connection) -> None:
        self._transport, self._connection, self._closing = transport, connection, False

    def close(self) -> None:
        """Closes at once if no input is unread; otherwise ends writing and lets the connection linger."""
        if self._closing or self._transport.is_closing():
            return
        if not self._connection.has_unread:
            self._transport.close()
            return
        self._closing = True
        self._transport.write_eof()
        self._connection.linger()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
