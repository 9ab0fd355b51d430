"""The models that answer: the one that the app was started with, and at most one other at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from mlx_zip.engine import Engine
from mlx_zip.engine.engines import OFF, Engines, OtherModel
from mlx_zip.errors import GenerationError
from mlx_zip.server.core import Core, result_or_undo
from mlx_zip.server.errors import RequestError
from mlx_zip.server.options import Options
from mlx_zip.text.prompts import check_system_message


class Models:
    """The app's models, for one event loop. main: the model that answers unless a conversation names another.

    options: settings of the main model's core. open_model: opens a model by its name; None if only the known models can
    be used. hypertokens: model name -> whether the model has hypertokens; a model of which that is unknown has no
    entry.
    """

    def __init__(
        self,
        engines: Engines,
        options: Options,
        open_model: Callable[[str], Engine] | None = None,
        hypertokens: dict[str, bool] | None = None,
    ) -> None:
        self.engines, self.main, self._open_model = engines, Core(engines.main, options), open_model
        self._other: Core | None = None  # core of the other model that was opened last
        self._hypertokens = {self.main.model: self.main.engine.info.merge_size > 0, **(hypertokens or {})}
        self._refusals = {self.main.model: _system_refusal(self.main)}
        for other in engines.others.values():
            if other.kind == "control":  # a control has hypertokens if the main model has none, and vice versa
                self._hypertokens.setdefault(other.name, not self._hypertokens[self.main.model])

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncGenerator[Core, None]:
        """Context manager: opens the model `name` (None: the main model) if needed, and yields its `Core`.

        The model stays open in the block. Waits and raises as `Engines.acquire` does. Raises `RequestError` if no model
        has that name.
        """
        if not name or name == self.main.model:
            yield self.main
            return
        if name not in self.engines.others:
            raise RequestError(404, f"there is no model {name!r:.200}", "model_not_found", "model")
        opening = asyncio.get_running_loop().run_in_executor(None, self.engines.acquire, name)
        engine = await result_or_undo(opening, self.engines.release)
        try:
            core = self._core_of(name, engine)
            self._hypertokens[name] = engine.info.merge_size > 0
            if name not in self._refusals:
                self._refusals[name] = await core.run_in_thread(_system_refusal, core)
            yield core
        finally:
            self.engines.release(engine)

    def _core_of(self, name: str, engine: Engine) -> Core:
        """Returns the core of another model, with the main core's options but no packs: they fit the main one only."""
        if self._other is None or self._other.engine is not engine:
            if self._other is not None:
                self._other.close()
            self._other = Core(engine, replace(self.main.options, model=name, packs={}, pack=None))
        return self._other

    def close(self) -> None:
        """Closes the model that is open besides the main one, if any, and ends the threads of its core."""
        self.engines.close()
        if self._other is not None:
            self._other.close()

    def check_system(self, system: str, name: str | None = None) -> None:
        """Raises `GenerationError` if the main model's chat template cannot render the system prompt `system`.

        name: the conversation's model. Nothing is checked if `name` is another model, whose chat template may not be
        loaded, or if `system` is empty, which means no system prompt.
        """
        if system and name in (None, self.main.model):
            check_system_message(self.main.engine.tokenizer, system, self.main.options.template_options)

    async def open(self, name: str) -> None:
        """Opens a model and, if it is new, adds it to the list. Raises `RequestError` or the errors of opening."""
        others, make = self.engines.others, self._open_model
        known = name == self.main.model or name in others
        if not known and make is not None:
            others[name] = OtherModel(name, "model", lambda: make(name), f"{name}: a model that you named")
        other = others.get(name)
        try:
            async with self.using(name):
                pass
        except BaseException:
            if not known:
                others.pop(name, None)
            raise
        if other is not None:
            others[name] = other  # a concurrent request that failed may have removed it

    def list_models(self) -> list[dict[str, Any]]:
        """Returns the models that a conversation can choose, as the page shows them.

        no_system: why the model accepts no system prompt; None if it accepts one or was not opened yet.
        """
        others = [one for one in self.engines.others.values() if one.kind != OFF]
        control = next((one.name for one in others if one.kind == "control"), None)
        names = {self.main.model: control, **{one.name: None for one in others}}
        loaded = {self.main.model, *self.engines.loaded}
        return [
            {
                "name": name,
                "hypertokens": self._hypertokens.get(name, True),
                "loaded": name in loaded,
                "base": base,
                "no_system": self._refusals.get(name),
            }
            for name, base in names.items()
        ]

    def list_race_rivals(self) -> list[dict[str, Any]]:
        """Returns the models that the main model can race against, as the page shows them."""
        others = self.engines.others.values()
        return [{name: getattr(one, name) for name in ("name", "kind", "label", "quality")} for one in others]


def _system_refusal(core: Core) -> str | None:
    """Returns why a model's chat template rejects a system prompt, None if it accepts one."""
    try:
        check_system_message(core.engine.tokenizer, "Be brief.", core.options.template_options)
    except GenerationError as error:
        return str(error)
    return None
