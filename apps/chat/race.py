"""A race: the same request to the main model and to what it is compared with, one after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.apps.chat.answering import as_bytes, failed
from mlx_zip.apps.chat.bodies import RaceBody
from mlx_zip.apps.chat.frames import frame_of
from mlx_zip.apps.chat.models import Models
from mlx_zip.apps.chat.routes import found, turn_of
from mlx_zip.apps.chat.store import Store
from mlx_zip.bundled import QUALITY
from mlx_zip.server.errors import RequestError
from mlx_zip.server.http import described, read_body, stream_response
from mlx_zip.server.turn import Done, Turn
from mlx_zip.server.vendor import live_json


def routes(store: Store, models: Models) -> list[Route]:
    """Returns the route of races."""

    async def race(request: Request) -> Response:
        """Answers a request with two models in turn, as an event stream."""
        body = await read_body(request, models.main, RaceBody)
        return await stream_response(request, models.main, as_bytes(_race(store, models, body)), on_error=failed)

    return [Route("/app/api/race", described(race, RaceBody), methods=["POST"])]


async def _race(store: Store, models: Models, body: RaceBody) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the frames of both lanes, "zip" before "base", and at last their figures. Raises `RequestError`."""
    base = next((one for one in models.bases() if one["name"] == body.base), None)
    if base is None:
        raise RequestError(404, f"there is no {body.base!r:.200} to race against", "model_not_found", "base")
    turn, ended = await _turn(store, models, body), {}
    zip_lane = {"label": _label(models), "model": models.main.model, "quality": QUALITY.get(models.main.model)}
    lanes = {"zip": zip_lane, "base": {"label": base["label"], "model": base["name"], "quality": base["quality"]}}
    for lane, about in lanes.items():
        yield {"type": "lane", "lane": lane, **about}
        asked = turn if lane == "zip" else replace(turn, pack=None)
        async with models.using(about["model"]) as core, aclosing(core.answer(asked)) as deltas:
            async for delta in deltas:
                if isinstance(delta, Done):
                    ended[lane] = live_json(delta.counts)
                if (frame := frame_of(delta)) is not None:
                    yield {**frame, "lane": lane}
    yield {"type": "done", "lanes": ended}


def _label(models: Models) -> str:
    """Returns what the main model is, in words."""
    with_or_without = "with" if models.main.engine.info.merge_size else "without"
    return f"{models.main.model}, {with_or_without} hypertokens"


async def _turn(store: Store, models: Models, body: RaceBody) -> Turn:
    """Returns the turn that both models answer. Raises `RequestError`."""
    sampling = {} if body.sampling is None else body.sampling.given
    if body.max_tokens is not None:
        sampling["max_tokens"] = body.max_tokens
    if body.messages is not None:
        asked = {"system": "", "sampling": sampling, "packs": []}
        messages = [{"role": one.role, "text": one.content, "reasoning": ""} for one in body.messages]
        return turn_of(models.main.options.max_tokens, asked, messages)
    if body.conversation is None or body.leaf is None:
        raise RequestError(400, "a race needs a conversation and its leaf, or messages", "invalid_request")
    conversation = found(await models.main.aside(store.conversation, body.conversation))
    path = await models.main.aside(store.path, body.conversation, body.leaf)
    if not path or path[-1]["role"] != "user":
        raise RequestError(400, "leaf must be a message of the user", "invalid_request", "leaf")
    return turn_of(
        models.main.options.max_tokens, conversation | {"sampling": conversation["sampling"] | sampling}, path
    )
