"""The routes that show the app's models, packs, storage and defaults, open models and suggest packs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import mlx_zip
from mlx_zip.apps.chat.models import Models
from mlx_zip.apps.chat.routes import Name, PackNames, Words
from mlx_zip.apps.chat.running_answers import failure_frame
from mlx_zip.apps.chat.store import Store
from mlx_zip.errors import GenerationError, MlxZipError
from mlx_zip.packs.pack import as_pack
from mlx_zip.server.core import Core
from mlx_zip.server.fields import Body
from mlx_zip.server.http import BodyRoute, event_bytes, json_response, stream_response
from mlx_zip.text.prompts import encode_text

MOST_FITTED = 20_000  # characters at the beginning of a prompt on which packs are compared


@dataclass(frozen=True)
class Settings:
    """The app's start settings. system: the system prompt of new conversations.

    ceiling: the machine's limits for the main model, as in `mlx_zip.engine.Ceiling`; None if unknown.
    """

    system: str = ""
    ceiling: dict[str, float] | None = None


class FitBody(Body):
    """A prompt for which the app suggests a pack. packs: names of the packs that the prompt's conversation uses."""

    text: Annotated[Words, Field(min_length=1)]
    packs: PackNames = Field(default_factory=list)


class ModelBody(Body):
    """A model to open: the name of one of the app's models, a folder or a hub id."""

    name: Name


def routes(store: Store, models: Models, settings: Settings) -> list[Route]:
    """Returns the routes of the app's state, of opening a model and of finding a pack."""
    core = models.main

    async def state(request: Request) -> Response:
        """Shows the app's models, packs, storage and defaults."""
        return json_response(
            {
                "version": mlx_zip.__version__,
                "model": core.model,
                "models": models.list_models(),
                "packs": await core.run_in_thread(_list_packs, core),
                "ceiling": settings.ceiling,
                "storage": await core.run_in_thread(_describe_storage, store),
                "defaults": {"system": settings.system, "sampling": _default_sampling(models)},
                "race": models.list_race_rivals(),
            }
        )

    async def open_model(request: Request, body: ModelBody) -> Response:
        """Opens a model, as an event stream that ends when it is open."""
        return await stream_response(request, core, _opening_frames(models, body.name), on_error=failure_frame)

    async def fit(request: Request, body: FitBody) -> Response:
        """Says how many ids a prompt is read as, and with which pack it is read as the fewest."""
        return json_response(
            await core.run_in_thread(_find_best_pack, core, body.text[:MOST_FITTED], core.resolve_pack(body.packs))
        )

    return [
        Route("/app/api/state", state),
        BodyRoute(core, "/app/api/fit", FitBody, fit),
        BodyRoute(core, "/app/api/models", ModelBody, open_model),
    ]


def _list_packs(core: Core) -> list[dict[str, Any]]:
    """Returns the packs that conversations can choose, with the number of their entries.

    reason: why the main model cannot use the pack, None if it can.
    """
    return [_describe_pack(core, name, pack) for name, pack in core.options.packs.items()]


def _describe_pack(core: Core, name: str, pack: Any) -> dict[str, Any]:
    entries, reason = 0, None
    try:
        found = as_pack(pack)
        entries = len(found.entries)
        core.engine.check_pack(found)
    except MlxZipError as error:
        reason = str(error)
    return {"name": name, "entries": entries, "reason": reason}


def _find_best_pack(core: Core, text: str, pack: Any) -> dict[str, Any]:
    """Returns "ids", the number of ids of a prompt with `pack`, and "best", the app's pack that gives the fewest ids.

    best: the pack's name and number of ids; None if no pack gives fewer ids than `pack`.
    """
    base_ids = encode_text(core.engine.tokenizer, text)
    ids = core.engine.count_prompt_ids(base_ids, pack)
    sizes = {
        name: size
        for name, pack in core.options.packs.items()
        if (size := _size_with_pack(core, base_ids, pack)) is not None
    }
    best = min(sizes, key=sizes.__getitem__, default=None)
    if best is None or sizes[best] >= ids:
        return {"ids": ids, "best": None}
    return {"ids": ids, "best": {"name": best, "ids": sizes[best]}}


def _size_with_pack(core: Core, base_ids: Sequence[int], pack: Any) -> int | None:
    """Returns the number of ids that a prompt compresses to, None if the model cannot use the pack."""
    try:
        return core.engine.count_prompt_ids(base_ids, pack)
    except GenerationError:
        return None


async def _opening_frames(models: Models, name: str) -> AsyncGenerator[bytes, None]:
    yield event_bytes({"type": "opening", "name": name})
    await models.open(name)
    yield event_bytes({"type": "done", "name": name})


def _describe_storage(store: Store) -> dict[str, Any]:
    database = store.database
    file = None if database.path is None else str(database.path)
    return {"file": file, "bytes": database.bytes(), "note": database.note}


def _default_sampling(models: Models) -> dict[str, Any]:
    options = models.main.options
    neutral = {"temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "repetition_penalty": None}
    given = {name: value for name, value in options.sampling.items() if name in neutral}
    return {**neutral, **given, "max_tokens": options.max_tokens}
