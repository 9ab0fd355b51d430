"""What was typed in earlier chats, in a file that only its user can read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import History

from mlx_zip.errors import DataError, reason
from mlx_zip.files import check_in, whole_file

FILE = "chat_history.jsonl"
MOST_BYTES = 1 << 20  # of the file; beyond, the older half is dropped when a chat begins
MOST_CHARACTERS = 1 << 14  # of a message that is kept


class TypedLines(History):
    """The typed messages, one JSON string per line of a file, the newest last.

    warn: called with one line if the file cannot be read or written; the chat goes on without it.
    """

    def __init__(self, file: Path, warn: Callable[[str], None]) -> None:
        self.file, self._warn, self._works = file, warn, True
        self._try(self._shorten)
        super().__init__()

    def load_history_strings(self) -> Iterable[str]:
        """Returns the messages in the file, the newest first; lines that are damaged are left out."""
        lines: list[str] = []
        self._try(lambda: lines.extend(self._read()))
        return reversed([text for line in lines if (text := _text(line))])

    def store_string(self, string: str) -> None:
        """Adds a message to the file."""
        if len(string) <= MOST_CHARACTERS:
            self._try(lambda: self._append(json.dumps(string) + "\n"))

    def _read(self) -> list[str]:
        """Returns the file's lines, none without a file. Raises `OSError`."""
        if not self.file.exists():
            return []
        return self.file.read_text(encoding="utf-8", errors="replace").splitlines()

    def _append(self, line: str) -> None:
        """Adds a line in one write, so that two chats do not mix theirs. Raises `OSError`."""
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.fchmod(handle, 0o600)
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def _shorten(self) -> None:
        """Drops the older half of a file that is too large. Raises `OSError`."""
        if not self.file.exists() or self.file.stat().st_size <= MOST_BYTES:
            return
        lines = self._read()
        with whole_file(self.file) as partial:
            partial.touch(mode=0o600)
            partial.write_text("".join(line + "\n" for line in lines[len(lines) // 2 :]), encoding="utf-8")

    def _try(self, work: Callable[[], None]) -> None:
        """Does something with the file. After the first failure the file is left alone."""
        if not self._works:
            return
        try:
            check_in(self.file)  # reading a pipe or a device may never end
            work()
        except (OSError, DataError) as error:
            self._works = False
            why = reason(error).removeprefix(f"{self.file}: ")
            self._warn(f"what you type is not kept: {self.file}: {why}")


def _text(line: str) -> str:
    """Returns the message in a line of the file, "" if there is none."""
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return text if isinstance(text, str) else ""
