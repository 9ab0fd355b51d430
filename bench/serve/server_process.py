"""Servers that a bench starts as separate processes, on free ports of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from mlx_zip.errors import MlxZipError

from .client import send_request

START_S, END_S = 180.0, 30.0  # most seconds for a server to start and to end


@contextmanager
def running_server(words: Sequence[str]) -> Iterator[int]:
    """Context manager: runs a server in a separate process and yields its port, when the server answers.

    words: the command after `python -m`, without host and port. Raises `MlxZipError` if the server does not answer.
    """
    port = free_port()
    command = [sys.executable, "-m", *words, "--host", "127.0.0.1", "--port", str(port)]
    with TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until_ready(process, port, f"the server {' '.join(words)}", log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, name: str, log: IO[bytes]) -> None:
    """Waits until the server answers. Raises `MlxZipError` if it ends first or needs over `START_S` seconds."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise MlxZipError(f"{name} ended at once: {last_line(log)}")
        try:
            if send_request(port, "/health", timeout_s=5).status == 200:
                return
        except MlxZipError:  # the server does not listen yet
            time.sleep(0.1)
    raise MlxZipError(f"{name} does not answer after {START_S:.0f} s")


def last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "nothing printed")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def serve_command(model: str, folder: Path) -> list[str]:
    """Returns the command, after `python -m`, that serves a model.

    folder: for sessions, so that the server neither reads nor leaves any in the user's folder.
    """
    return ["mlx_zip", "serve", "--model", model, "--session-cache", str(folder)]
