"""Servers that a bench starts as separate processes, on free ports of this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from mlx_zip.errors import MlxZipError

from .client import send_request

START_S, END_S = 180.0, 30.0  # most seconds for a server to start and to end


class ServerProcess:
    """Context manager: runs a server in a separate process.

    words: the command after `python -m`, without host and port.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.port = free_port()
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self._log = TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self.words, "--host", "127.0.0.1", "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop_with(signal.SIGKILL)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_with(signal.SIGTERM)

    def wait_until_ready(self) -> None:
        """Waits until the server answers. Raises `MlxZipError` if it ends first or needs over `START_S` seconds."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise MlxZipError(f"the server {' '.join(self.words)} ended at once: {self.last_line()}")
            try:
                if send_request(self.port, "/health", timeout_s=5).status == 200:
                    return
            except MlxZipError:  # the server does not listen yet
                time.sleep(0.1)
        raise MlxZipError(f"the server {' '.join(self.words)} does not answer after {START_S:.0f} s")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's process."""
        assert self._process is not None, "the server has not been started"
        return self._process

    def stop_with(self, by: signal.Signals) -> int:
        """Sends the signal `by`; kills the process if it does not end in `END_S` seconds. Returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(by)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(END_S)
        return self.process.returncode

    def last_line(self) -> str:
        """Returns the last line that the server has printed."""
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
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
