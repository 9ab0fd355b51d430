"""The models that answer: the one that the app was started with, and at most one other at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from mlx_zip.server.core import Core
from mlx_zip.server.errors import RequestError


class Models:
    """main: answers unless a conversation names another model."""

    def __init__(self, main: Core) -> None:
        self.main = main

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncGenerator[Core, None]:
        """Gives what answers with a model; None for the main one. Raises `RequestError` for an unknown name."""
        if name not in (None, self.main.model):
            raise RequestError(404, f"there is no model {name!r:.200}", "model_not_found", "model")
        yield self.main
