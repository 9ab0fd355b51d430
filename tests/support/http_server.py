"""A server on a real socket for tests, and a plain way to talk to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from mlx_zip.engine import Engine
from mlx_zip.server.answers.turn import Delta, Turn
from mlx_zip.server.core import Core
from mlx_zip.server.options import Options
from mlx_zip.server.running import Server, bind_socket

WAIT_S = 20.0


@dataclass
class Answer:
    """An answer: status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Served:
    """A server that runs in a thread."""

    port: int
    core: Core
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Sends a request and returns the whole answer. body: bytes as they are, or a value to send as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if data is not None else {}
        try:
            connection.request(method, path, data, {**kind, **(headers or {})})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def chat(self, text: str = "Tell me a story.", **fields: Any) -> Answer:
        """Asks for a chat completion."""
        messages = [{"role": "user", "content": text}]
        return self.ask("POST", "/v1/chat/completions", {"model": "stories", "messages": messages, **fields})

    def raw(self, data: bytes) -> socket.socket:
        """Returns a connection on which bytes have been sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        connection.sendall(data)
        return connection


def post(path: str, body: Any, *headers: str) -> bytes:
    """Returns the bytes of a POST request with a JSON body."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Returns all that comes until the other side closes."""
    found = b""
    while data := connection.recv(65536):
        found += data
    return found


def events(body: bytes) -> list[Any]:
    """Returns the data of a stream's events: JSON values, and "[DONE]"; comments are left out."""
    lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def replay(deltas: Sequence[Delta]) -> Any:
    """Returns what can stand in place of `Core.answers`: it answers every turn with the deltas, and keeps `turns`."""

    async def answers(turns: Sequence[Turn], inbox: Any = None) -> AsyncGenerator[tuple[int, Delta], None]:
        answers.turns += turns
        for index in range(len(turns)):
            for delta in deltas:
                yield index, delta

    answers.turns = []
    return answers


def until(holds: Any, wait_s: float = WAIT_S) -> bool:
    """Waits until a condition holds, and returns whether it does."""
    end = time.monotonic() + wait_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def serving(engine: Engine, options: Options | None = None) -> Iterator[Served]:
    """Serves an engine on a free port of 127.0.0.1."""
    core = Core(engine, options)
    listener, server = bind_socket("127.0.0.1", 0), Server(core)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert until(lambda: server.started)
        yield Served(listener.getsockname()[1], core, server)
    finally:
        engine.close()
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()
