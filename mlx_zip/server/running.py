"""The server as it runs under uvicorn: it lets answers end before it stops, and stops when its engine dies."""

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

from mlx_zip.engine import Engine
from mlx_zip.errors import reason
from mlx_zip.server.app import make_app
from mlx_zip.server.connection import connection_class
from mlx_zip.server.core import Core
from mlx_zip.server.options import Options

log = logging.getLogger(__name__)
AFTER_DRAIN_S = 5.0  # for what the answers that were cut off still send
AFTER_FAULT_S = 2.0
AT_ONCE_S = 1.0  # for the same after a second SIGINT


class Server(uvicorn.Server):
    """Serves a core on sockets. fault: what ended the engine's thread, None as long as it runs.

    On SIGTERM, SIGINT and SIGHUP no new connections are accepted, answers under way have `drain_s` seconds, and the
    engine is closed. A second SIGINT ends at once. app: what answers, None for the server's own routes.
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
                http=connection_class(core.options),
                ws="none",
                log_level=log_level.lower(),
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=int(drain_s + AFTER_DRAIN_S),
            )
        )
        core.engine.on_death(self._died)

    def _died(self, fault: BaseException) -> None:
        """Ends the server because the engine's thread has ended; called in that thread."""
        self.fault = fault
        self.config.timeout_graceful_shutdown = int(AFTER_FAULT_S)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Has SIGHUP, which a terminal that is closed sends, end the server as SIGTERM does, unless it is ignored."""
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
        """Begins to listen, and calls `on_start`."""
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers end, closes the engine, and closes all connections."""
        engine, drain_s = self._core.engine, self._core.options.drain_s
        closing = threading.Thread(target=engine.close, args=(drain_s,), daemon=True)
        closing.start()
        await super().shutdown(sockets)
        if self.force_exit:
            await self._end_at_once()
        while closing.is_alive() and not self.force_exit and self.fault is None:
            await asyncio.sleep(0.02)

    async def _end_at_once(self) -> None:
        """Ends answers under way with an error, and the connections of clients that do not read it."""
        threading.Thread(target=self._core.engine.close, daemon=True).start()
        last = time.monotonic() + AT_ONCE_S
        while self.server_state.tasks and time.monotonic() < last:
            await asyncio.sleep(0.02)
        for connection in list(self.server_state.connections):
            cast(Any, connection).transport.abort()
        await self.lifespan.shutdown()


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket of an address, on a free port for port 0; it does not listen yet. Raises `OSError`."""
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
    """Serves until a signal comes, which is then raised again; prints one line with the address when it begins.

    Returns what ended the engine's thread if that is why the server has stopped.
    """
    host, port = listener.getsockname()[:2]
    core = Core(engine, options)
    place = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def say() -> None:
        try:
            print(f"serving {core.model} on {place}/v1 (Ctrl-C ends)", flush=True)
        except OSError as error:  # the reader has left, or a disk is full: clients are served all the same
            log.warning("serving on %s/v1; the output cannot be written: %s", place, reason(error))
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    server = Server(core, log_level, say)
    server.run([listener])
    return server.fault
