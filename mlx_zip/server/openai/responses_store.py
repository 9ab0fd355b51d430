"""Stored responses of OpenAI's Responses: kept within bounds, the longest unused are forgotten first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_zip.server.errors import RequestError, json_bytes
from mlx_zip.server.response_files import ResponseFiles

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """A response. items: all that the model was given, those of responses before included."""

    response: Json
    items: Sequence[Json]

    @property
    def conversation(self) -> list[Json]:
        """The items that a response which follows this one begins with."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Responses by id, for one event loop. most, most_bytes: how many are kept, and how many bytes they may have.

    Each is kept as JSON, so that what counts is what the memory holds. files: where they are kept too, and read from at
    the beginning; None for in memory only.
    """

    def __init__(self, most: int, most_bytes: int, files: ResponseFiles | None = None) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._texts: OrderedDict[str, bytes] = OrderedDict()
        self._owners: dict[str, str] = {}  # id of an output item -> id of its response
        self.bytes = 0
        self._files = files
        for text, stored in files.read(most_bytes) if files is not None else ():
            self._keep(text, stored["response"])

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, response: Json, items: Sequence[Json]) -> None:
        """Keeps a response and the items that it answers. One that is larger than the bound is not kept."""
        text = json_bytes({"response": response, "items": items})
        if len(text) > self._most_bytes or self._most < 1:
            return
        if self._files is not None:
            self._files.write(response["id"], text)
        self._keep(text, response)

    def _keep(self, text: bytes, response: Json) -> None:
        """Keeps a response, given as JSON too, and forgets others if there are too many."""
        self._texts[response["id"]] = text
        self._owners |= {item["id"]: response["id"] for item in response["output"]}
        self.bytes += len(text)
        while len(self._texts) > self._most or self.bytes > self._most_bytes:
            self.drop(next(iter(self._texts)))

    def get(self, name: str, param: str | None = None, code: str = "not_found") -> Stored:
        """Returns a response by id. param: the field that names it. Raises `RequestError` with status 404."""
        if name not in self._texts:
            message = f"there is no stored response {name[:80]!r}; the server keeps the latest ones"
            raise RequestError(404, message, code, param)
        self._texts.move_to_end(name)
        return Stored(**json.loads(self._texts[name]))

    def drop(self, name: str) -> None:
        """Forgets a response. Raises `RequestError` with status 404."""
        for item in self.get(name).response["output"]:
            del self._owners[item["id"]]
        self.bytes -= len(self._texts.pop(name))
        if self._files is not None:
            self._files.delete(name)

    def clear(self) -> int:
        """Forgets all responses; returns how many."""
        names = list(self._texts)
        for name in names:
            self.drop(name)
        return len(names)

    def with_references(self, items: Sequence[Json]) -> list[Json]:
        """Returns the items of an input, with output items of stored responses in place of references to them.

        Raises `RequestError` with status 404 for a reference to anything else.
        """
        known: dict[str, Json] = {}  # a stored response is read once, however many refer to it
        return [
            self._item(item["id"], i, known) if item["type"] == "item_reference" else item
            for i, item in enumerate(items)
        ]

    def _item(self, name: str, place: int, known: dict[str, Json]) -> Json:
        """Returns an output item by its id. place: of the reference in the input. known: extended by its response's."""
        if name not in self._owners:
            param = f"input.{place}.id"
            raise RequestError(404, f"{param}: there is no stored item {name[:80]!r}", "not_found", param)
        if name not in known:
            known |= {item["id"]: item for item in self.get(self._owners[name]).response["output"]}
        return known[name]
