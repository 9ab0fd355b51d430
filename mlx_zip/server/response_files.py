"""Stored responses as files, one per response, so that they are there after a restart."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_zip.errors import reason
from mlx_zip.files import make_private, whole_file

NAME = re.compile(r"resp_[0-9a-f]{48}")
log = logging.getLogger(__name__)


class ResponseFiles:
    """A folder of responses, which no other user can read. Files are written and deleted in a thread, in order.

    A folder that cannot be used, and a file that cannot be written or read, is logged, and nothing else happens.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlx_zip-responses")
        why = make_private(folder)
        self.usable = why is None
        if why is not None:
            log.warning("responses are kept in memory only: %s %s", folder, why)

    def read(self, most_bytes: int) -> Iterator[tuple[bytes, Any]]:
        """Yields the JSON of each response, as bytes and as a value, the last written last.

        most_bytes: a larger file is left alone.
        """
        for path in self._paths():
            try:
                if not path.is_file():  # reading a pipe never ends
                    raise ValueError("it is no ordinary file")
                text = path.read_bytes() if path.stat().st_size <= most_bytes else b""
                value = json.loads(text)
                _check(value, path.stem)
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                log.warning("%s is not used: %s", path, error)
                continue
            yield text, value

    def _paths(self) -> list[Path]:
        """Returns the files of responses, the last written last."""
        if not self.usable:
            return []
        try:
            found = [path for path in self.folder.glob("resp_*.json") if NAME.fullmatch(path.stem)]
            return sorted(found, key=lambda path: path.lstat().st_mtime_ns)
        except OSError as error:
            log.warning("%s cannot be read: %s", self.folder, reason(error))
            return []

    def write(self, name: str, text: bytes) -> None:
        """Writes a response soon. A name that is no response's is not written."""
        if NAME.fullmatch(name):
            self._later(lambda: _written(self.folder / f"{name}.json", text))

    def delete(self, name: str) -> None:
        """Deletes a response soon."""
        if NAME.fullmatch(name):
            self._later(lambda: (self.folder / f"{name}.json").unlink(missing_ok=True))

    def flush(self) -> None:
        """Returns when everything so far is on disk."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Returns when everything is on disk; nothing is written after that."""
        self._thread.shutdown()
        self.usable = False

    def _later(self, work: Callable[[], None]) -> None:
        """Does something in the thread."""
        if self.usable:
            self._thread.submit(_logged, work)


def _check(value: Any, name: str) -> None:
    """Raises `ValueError`, `LookupError` or `TypeError` for what is no stored response of this name."""
    output = value["response"]["output"]
    if value["response"]["id"] != name:
        raise ValueError("it holds another response than its name says")
    if not (isinstance(value["items"], list) and isinstance(output, list)):
        raise ValueError("its items are no lists")
    if not all(isinstance(item, dict) for item in [*value["items"], *output]):
        raise ValueError("an item is no object")
    if len({item["id"] for item in output}) < len(output):
        raise ValueError("two items have one id")


def _logged(work: Callable[[], None]) -> None:
    """Does something; an error of the disk is logged."""
    try:
        work()
    except OSError as error:
        log.warning("a stored response: %s", reason(error))


def _written(path: Path, text: bytes) -> None:
    """Writes a file that only its owner can read. Raises `OSError`."""
    with whole_file(path) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(text)
