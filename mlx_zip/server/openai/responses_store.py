"""Stored responses of OpenAI's Responses, of limited number and size; the least recently used are evicted first."""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import failure_reason
from mlx_zip.files import atomic_file, make_private, open_private
from mlx_zip.server.errors import RequestError, json_bytes

Json = Mapping[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response. items: all items that the model was given, those of earlier responses included."""

    response: Json
    items: Sequence[Json]

    @property
    def conversation(self) -> list[Json]:
        """The items that the conversation has so far, for a response that continues this one."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Responses by id, for one event loop. most, most_bytes: maximum number and total bytes of the kept responses.

    Each response is kept as JSON text, whose bytes are counted. files: keeps the responses on disk too, and is read at
    the start; None to keep them in memory only.
    """

    def __init__(self, most: int = 1000, most_bytes: int = 128 << 20, files: ResponseFiles | None = None) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._texts: OrderedDict[str, bytes] = OrderedDict()
        self._owners: dict[str, str] = {}  # id of an output item -> id of its response
        self.bytes = 0
        self._files = files
        for text, stored in files.read(most_bytes) if files is not None else ():
            self._keep_response(text, stored["response"])

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, response: Json, items: Sequence[Json]) -> None:
        """Keeps a response and its input items, unless they have more than `most_bytes`."""
        text = json_bytes({"response": response, "items": items})
        if len(text) > self._most_bytes or self._most < 1:
            return
        if self._files is not None:
            self._files.write(response["id"], text)
        self._keep_response(text, response)

    def _keep_response(self, text: bytes, response: Json) -> None:
        """Keeps a response in memory, and evicts others above the limits. text: response and items as JSON."""
        self._texts[response["id"]] = text
        self._owners |= {item["id"]: response["id"] for item in response["output"]}
        self.bytes += len(text)
        while len(self._texts) > self._most or self.bytes > self._most_bytes:
            self.delete(next(iter(self._texts)))

    def get(self, name: str, param: str | None = None, code: str = "not_found") -> StoredResponse:
        """Returns a stored response by id. param: request field with the id. Raises `RequestError` with status 404."""
        if name not in self._texts:
            message = f"there is no stored response {name[:80]!r}; the server keeps the latest ones"
            raise RequestError(404, message, code, param)
        self._texts.move_to_end(name)
        return StoredResponse(**json.loads(self._texts[name]))

    def delete(self, name: str) -> None:
        """Deletes a response, on disk too. Raises `RequestError` with status 404 if it is not stored."""
        for item in self.get(name).response["output"]:
            del self._owners[item["id"]]
        self.bytes -= len(self._texts.pop(name))
        if self._files is not None:
            self._files.delete(name)

    def clear(self) -> int:
        """Deletes all responses, on disk too; returns their number."""
        names = list(self._texts)
        for name in names:
            self.delete(name)
        return len(names)

    def close(self) -> None:
        """Waits until all files are written; later changes are kept in memory only."""
        if self._files is not None:
            self._files.close()

    def resolve_references(self, items: Sequence[Json]) -> list[Json]:
        """Returns the items of an input, with each reference replaced by the output item of a stored response.

        Raises `RequestError` with status 404 if a referenced item is not stored.
        """
        known: dict[str, Json] = {}  # so that each stored response is parsed only once
        return [
            self._stored_item(item["id"], i, known) if item["type"] == "item_reference" else item
            for i, item in enumerate(items)
        ]

    def _stored_item(self, name: str, place: int, known: dict[str, Json]) -> Json:
        """Returns an output item by its id. place: index of the reference. known: items by id; new ones are added."""
        if name not in self._owners:
            param = f"input.{place}.id"
            raise RequestError(404, f"{param}: there is no stored item {name[:80]!r}", "not_found", param)
        if name not in known:
            known |= {item["id"]: item for item in self.get(self._owners[name]).response["output"]}
        return known[name]


# ---- responses on disk

_NAME = re.compile(r"resp_[0-9a-f]{48}")
log = logging.getLogger(__name__)


class ResponseFiles:
    """A folder of responses that no other user can read. Files are written and deleted in a thread, in order.

    A folder or file that cannot be used is logged and skipped.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlx_zip-responses")
        why = make_private(folder)
        self.usable = why is None
        if why is not None:
            log.warning("responses are kept in memory only: %s %s", folder, why)

    def read(self, most_bytes: int) -> Iterator[tuple[bytes, Any]]:
        """Yields the JSON of each response, as bytes and as a value, oldest first. Skips files above `most_bytes`."""
        for path in self._response_paths():
            try:
                if not path.is_file():  # reading a pipe never ends
                    raise ValueError("it is no ordinary file")
                if path.stat().st_size > most_bytes:
                    raise ValueError(f"it has more than {most_bytes:,} bytes")
                text = path.read_bytes()
                value = json.loads(text)
                _check_stored_response(value, path.stem)
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                reason = "it holds no stored response" if isinstance(error, LookupError | TypeError) else error
                log.warning("%s is not used: %s", path, reason)
                continue
            yield text, value

    def _response_paths(self) -> list[Path]:
        """Returns the files of responses, oldest first."""
        if not self.usable:
            return []
        try:
            found = [path for path in self.folder.glob("resp_*.json") if _NAME.fullmatch(path.stem)]
            return sorted(found, key=lambda path: path.lstat().st_mtime_ns)
        except OSError as error:
            log.warning("%s cannot be read: %s", self.folder, failure_reason(error))
            return []

    def write(self, name: str, text: bytes) -> None:
        """Writes a response in the background. Ignores a name that is not an id of a response."""
        if _NAME.fullmatch(name):
            self._run_in_thread(lambda: _write_private_file(self.folder / f"{name}.json", text))

    def delete(self, name: str) -> None:
        """Deletes a response in the background."""
        if _NAME.fullmatch(name):
            self._run_in_thread(lambda: (self.folder / f"{name}.json").unlink(missing_ok=True))

    def close(self) -> None:
        """Waits until all writes and deletions are done; later ones are ignored."""
        self._thread.shutdown()
        self.usable = False

    def _run_in_thread(self, work: Callable[[], None]) -> None:
        if self.usable:
            self._thread.submit(_log_disk_errors, work)


def _check_stored_response(value: Any, name: str) -> None:
    """Raises `ValueError`, `LookupError` or `TypeError` unless `value` is a stored response with the id `name`."""
    output = value["response"]["output"]
    if value["response"]["id"] != name:
        raise ValueError("it holds another response than its name says")
    if not (isinstance(value["items"], list) and isinstance(output, list)):
        raise ValueError("its items are no lists")
    if not all(isinstance(item, dict) for item in [*value["items"], *output]):
        raise ValueError("an item is no object")
    if len({item["id"] for item in output}) < len(output):
        raise ValueError("two items have one id")


def _log_disk_errors(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        log.warning("a stored response: %s", failure_reason(error))


def _write_private_file(path: Path, text: bytes) -> None:
    with atomic_file(path) as partial, open_private(partial) as file:
        file.write(text)
