"""Stored responses of OpenAI's Responses: kept in memory within bounds, the longest unused are forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_zip.server.errors import RequestError, json_bytes

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """A response. items: all that the model was given, those of responses before included. bytes: of both, as JSON."""

    response: Json
    items: Sequence[Json]
    bytes: int

    @property
    def conversation(self) -> list[Json]:
        """The items that a response which follows this one begins with."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Responses by id, for one event loop. most, most_bytes: how many are kept, and how many bytes they may have.

    Items that follow each other's responses are shared, but count for each of them, so memory stays below the bound.
    """

    def __init__(self, most: int = 1000, most_bytes: int = 256 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, response: Json, items: Sequence[Json]) -> None:
        """Keeps a response and the items that it answers. One that is larger than the bound is not kept."""
        stored = Stored(response, items, len(json_bytes(response)) + len(json_bytes(items)))
        if stored.bytes > self._most_bytes:
            return
        self._stored[response["id"]] = stored
        self.bytes += stored.bytes
        while len(self._stored) > self._most or self.bytes > self._most_bytes:
            self.bytes -= self._stored.popitem(last=False)[1].bytes

    def get(self, name: str, param: str | None = None, code: str = "not_found") -> Stored:
        """Returns a response by id. param: the field that names it. Raises `RequestError` with status 404."""
        if name not in self._stored:
            message = f"there is no stored response {name[:80]!r}; the server keeps the latest, until it ends"
            raise RequestError(404, message, code, param)
        self._stored.move_to_end(name)
        return self._stored[name]

    def drop(self, name: str) -> None:
        """Forgets a response. Raises `RequestError` with status 404."""
        self.bytes -= self.get(name).bytes
        del self._stored[name]

    def with_references(self, items: Sequence[Json], place: str = "input") -> list[Json]:
        """Returns items with stored ones in place of references to them. Raises `RequestError` for an unknown one."""
        if not any(item["type"] == "item_reference" for item in items):
            return list(items)
        known = {item["id"]: item for stored in self._stored.values() for item in stored.conversation}
        for i, item in enumerate(items):
            if item["type"] == "item_reference" and item["id"] not in known:
                message = f"{place}.{i}.id: there is no stored item {item['id'][:80]!r}"
                raise RequestError(404, message, "not_found", f"{place}.{i}.id")
        return [known[item["id"]] if item["type"] == "item_reference" else item for item in items]
