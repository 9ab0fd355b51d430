"""A program in a pseudo-terminal: what it shows is read, keys are typed, and every wait has an end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Any

WAIT_S = 60.0
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[=>()][0-9A-B]?|\r")


def start_command(command: Sequence[str], environment: Mapping[str, str], slave: int) -> subprocess.Popen[bytes]:
    """Starts a command in a terminal."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    return subprocess.Popen(command, **streams, start_new_session=True, env={**os.environ, **environment})


class PseudoTerminal:
    """A running program. said: all that it has written so far, as text. start: starts its command in the terminal."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], columns: int = 80, start: Any = start_command
    ) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns)
        usual = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = start(command, {**usual, **environment}, slave)
        os.close(slave)
        self.said, self._seen = "", 0

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    @property
    def shown(self) -> str:
        """What was written, without control sequences."""
        return _CONTROLS.sub("", self.said)

    def type(self, keys: str | bytes) -> None:
        """Types keys; a long text in parts, because a terminal holds only so much."""
        data = keys.encode() if isinstance(keys, str) else keys
        end = time.monotonic() + WAIT_S
        while data:
            assert time.monotonic() < end, "the program does not read what is typed"
            self._read(0)
            if select.select([], [self._master], [], 0.1)[1]:
                data = data[os.write(self._master, data[:512]) :]

    def until(self, pattern: str, limit_s: float = WAIT_S) -> re.Match[str]:
        """Waits until something new is shown that matches, without control sequences; returns the match."""
        end = time.monotonic() + limit_s
        while True:
            if found := re.search(pattern, new := _CONTROLS.sub("", self.said[self._seen :]), re.DOTALL):
                self._seen += _length(self.said[self._seen :], found.end())
                return found
            assert time.monotonic() < end, f"{pattern!r} was not shown, but {new[-2000:]!r}"
            assert self._read(0.1) or self.process.poll() is None, f"ended before {pattern!r}: {new[-2000:]!r}"

    def ended(self, limit_s: float = WAIT_S) -> int:
        """Waits for the end, reads all that was written, and returns the exit status."""
        end = time.monotonic() + limit_s
        while self.process.poll() is None:
            assert time.monotonic() < end, f"the program goes on: {self.shown[-2000:]!r}"
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def resize(self, columns: int, rows: int = 24) -> None:
        """Gives the terminal another size, of which the program is told."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self, wait_s: float) -> bool:
        """Reads what is there; returns whether there was something."""
        if not select.select([self._master], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # the program has ended
            return False
        self.said += data.decode("utf-8", "replace")
        return bool(data)


def _length(said: str, characters: int) -> int:
    """How much of what was written shows so many characters, and then the control sequences after them."""
    end = 0
    for control in _CONTROLS.finditer(said):
        between = control.start() - end
        if between > characters:
            break
        characters -= between
        end = control.end()
    return end + characters
