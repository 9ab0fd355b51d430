"""What the page shows of the app: models, packs, storage, defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import mlx_zip
from mlx_zip.apps.chat.models import Models
from mlx_zip.apps.chat.store import Store
from mlx_zip.server.http import json_response


@dataclass(frozen=True)
class Settings:
    """What the app was started with. system: the system prompt of new conversations. ceiling: measured, None if not."""

    system: str = ""
    ceiling: dict[str, float] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


def routes(store: Store, models: Models, settings: Settings) -> list[Route]:
    """Returns the route of the app's state."""
    core = models.main

    async def state(request: Request) -> Response:
        """Shows the app's models, packs, storage and defaults."""
        return json_response(
            {
                "version": mlx_zip.__version__,
                "model": core.model,
                "models": [
                    {"name": core.model, "hypertokens": core.engine.info.merge_size > 0, "loaded": True, "base": None}
                ],
                "packs": [{"name": name, "entries": len(pack.entries)} for name, pack in core.options.packs.items()],
                "ceiling": settings.ceiling,
                "storage": await core.aside(_storage, store),
                "defaults": {"system": settings.system, "sampling": _sampling(models)},
                "race": [],
            }
        )

    return [Route("/app/api/state", state)]


def _storage(store: Store) -> dict[str, Any]:
    """Returns where the conversations are, their size, and what is wrong with that place."""
    database = store.database
    file = None if database.path is None else str(database.path)
    return {"file": file, "bytes": database.bytes(), "note": database.note, "problem": database.problem}


def _sampling(models: Models) -> dict[str, Any]:
    """Returns the sampling of conversations that choose none."""
    options = models.main.options
    neutral = {"temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "repetition_penalty": None}
    given = {name: value for name, value in options.sampling.items() if name in neutral}
    return {**neutral, **given, "max_tokens": options.max_tokens}
