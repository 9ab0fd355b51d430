"""`Cores`: the cores of a main model and of the models that it is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from mlx_zip.engine import Engine
from mlx_zip.engine.engines import Engines
from mlx_zip.server.core import Core


class Cores:
    """Cores by the names of models, for one event loop. main: of `engines.main`."""

    def __init__(self, engines: Engines, main: Core) -> None:
        self.engines, self.main = engines, main
        self._other: Core | None = None

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Core]:
        """Yields the core of a model, which is opened if it is not open, and stays open inside.

        Waits and raises as `Engines.acquire` does. A main model is there at once.
        """
        if name in (self.main.model, self.main.engine.info.name):
            yield self.main
            return
        engine = await self._acquired(name)
        try:
            yield self._core(name, engine)
        finally:
            self.engines.release(engine)

    async def _acquired(self, name: str) -> Engine:
        """Returns the engine of a model. If the task is cancelled meanwhile, it is given back when it comes."""
        loop = asyncio.get_running_loop()
        waiting: Any = loop.run_in_executor(None, self.engines.acquire, name)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(self._give_back)
            raise

    def _give_back(self, waiting: Future[Engine]) -> None:
        """Gives back an engine that nobody waits for."""
        if not waiting.cancelled() and waiting.exception() is None:
            self.engines.release(waiting.result())

    def _core(self, name: str, engine: Engine) -> Core:
        """Returns the core of an engine; it has the main core's settings but packs, which are of the main model."""
        if self._other is None or self._other.engine is not engine:
            if self._other is not None:
                self._other.close()
            self._other = Core(engine, replace(self.main.options, model=name, packs={}, pack=None))
        return self._other

    def close(self) -> None:
        """Closes the other model, and ends its threads."""
        self.engines.close()
        if self._other is not None:
            self._other.close()
