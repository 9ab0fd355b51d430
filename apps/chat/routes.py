"""The routes of the app's conversations, and of races between two models."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.apps.chat.models import Models
from mlx_zip.apps.chat.running_answers import (
    RunningAnswers,
    encode_frames,
    failure_frame,
    make_frame,
    new_message,
    strip_end,
)
from mlx_zip.apps.chat.store import Store
from mlx_zip.named import QUALITY
from mlx_zip.server.answers.turn import Done, Turn, live_counts_json
from mlx_zip.server.errors import RequestError
from mlx_zip.server.fields import Body, Fraction, Many, Size
from mlx_zip.server.http import BodyRoute, json_response, stream_response

PATH = "/app/api/conversations"
MOST_LISTED = 1000


def routes(store: Store, models: Models, answers: RunningAnswers, system: str) -> list[Route]:
    """Returns the routes of conversations and answers. system: the system prompt of new conversations that set none."""
    core, in_thread = models.main, models.main.run_in_thread

    async def listed(request: Request) -> Response:
        """Lists the conversations, the last changed first."""
        asked = request.query_params
        limit = _parse_number(asked.get("limit", "50"), MOST_LISTED)
        offset = _parse_number(asked.get("offset", "0"), 1 << 31)
        return json_response(await in_thread(store.conversations, asked.get("search", ""), limit, offset))

    async def create(request: Request, body: ConversationBody) -> Response:
        """Begins a conversation."""
        fields = {"system": system, **body.fields_set}
        await in_thread(models.check_system, fields["system"], body.model)
        return json_response(await in_thread(store.create, fields), 201)

    async def purge(request: Request) -> Response:
        """Deletes all conversations."""
        answers.stop()
        return json_response({"deleted": await in_thread(store.purge)})

    async def show(request: Request) -> Response:
        """Shows a conversation with its messages."""
        return json_response(require(await in_thread(store.conversation, request.path_params["id"])))

    async def change(request: Request, body: ChangeBody) -> Response:
        """Changes fields of a conversation."""
        one = request.path_params["id"]
        if body.leaf is not None:
            require(await in_thread(store.message, one, body.leaf), "message")
        if body.system:
            model = body.model or require(await in_thread(store.conversation, one))["model"]
            await in_thread(models.check_system, body.system, model)
        return json_response(require(await in_thread(store.change, one, body.fields_set)))

    async def delete(request: Request) -> Response:
        """Deletes a conversation."""
        one = request.path_params["id"]
        answers.stop(one)
        require(await in_thread(store.delete, one) or None)
        return json_response({"deleted": 1})

    async def stop(request: Request) -> Response:
        """Stops the answers of a conversation."""
        return json_response({"stopped": answers.stop(request.path_params["id"])})

    async def answer(request: Request, body: AnswerBody) -> Response:
        """Answers a message, or goes on with an answer, as an event stream."""
        frames = _answer_frames(store, models, answers, request.path_params["id"], body)
        return await stream_response(request, core, encode_frames(frames), on_error=failure_frame)

    return [
        Route(PATH, listed),
        BodyRoute(core, PATH, ConversationBody, create),
        Route(PATH, purge, methods=["DELETE"]),
        Route(PATH + "/{id}", show),
        BodyRoute(core, PATH + "/{id}", ChangeBody, change, "PATCH"),
        Route(PATH + "/{id}", delete, methods=["DELETE"]),
        Route(PATH + "/{id}/stop", stop, methods=["POST"]),
        BodyRoute(core, PATH + "/{id}/answer", AnswerBody, answer),
    ]


async def _answer_frames(
    store: Store, models: Models, answers: RunningAnswers, one: str, body: AnswerBody
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the frames of the answer that `body` requests in the conversation with id `one`. Raises `RequestError`."""
    in_thread = models.main.run_in_thread
    conversation = require(await in_thread(store.conversation, one))
    path = await in_thread(store.path, one, body.parent)
    _check_parent(body, path)
    async with models.using(body.model or conversation["model"]) as core:
        asked = [new_message("user", body.parent, body.text)] if body.text is not None else []
        path += asked
        if body.continues:
            message, path, new = strip_end(path[-1]), path[:-1], []
        else:
            message = new_message("assistant", path[-1]["id"], "", core.model)
            new = [*asked, message]
        turn = turn_of(core.options.max_tokens, conversation, path, message["text"])
        async with aclosing(answers.frames(core, one, turn, new, message)) as frames:
            async for frame in frames:
                yield frame


def turn_of(max_tokens: int, conversation: dict[str, Any], path: list[dict[str, Any]], prefill: str = "") -> Turn:
    """Returns the turn that answers the last message of `path`, the messages so far in order.

    max_tokens: limit if the conversation sets none. prefill: text with which the answer begins.
    """
    sampling = dict(conversation["sampling"])
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": system}] if (system := conversation["system"]) else []
    )
    for message in path:
        reasoning = {"reasoning_content": message["reasoning"]} if message["reasoning"] else {}
        messages.append({"role": message["role"], "content": message["text"], **reasoning})
    return Turn(
        messages=messages,
        prefill=prefill or None,
        max_tokens=sampling.pop("max_tokens", max_tokens),
        sampling=sampling,
        pack=conversation["packs"],
        show=True,
    )


def _check_parent(body: AnswerBody, path: list[dict[str, Any]]) -> None:
    """Raises `RequestError` if the requested messages cannot follow `body.parent`, the last message of `path`."""
    if body.parent is not None and not path:
        raise RequestError(404, "there is no such message", "unknown_message", "parent")
    role = path[-1]["role"] if path else None
    if body.continues and body.text is not None:
        raise RequestError(400, "text and continue cannot be asked for together", "invalid_request", "continue")
    if path and path[-1]["state"] == "running":
        raise RequestError(409, "this answer is still being written", "running", "parent")
    if body.text is not None:
        if role == "user":
            raise RequestError(400, "a message of the user follows an answer", "invalid_request", "parent")
    elif role != ("assistant" if body.continues else "user"):
        wanted = "an answer" if body.continues else "a message of the user"
        raise RequestError(400, f"parent must be {wanted}", "invalid_request", "parent")


def _parse_number(given: str, most: int) -> int:
    if not (given.isascii() and given.isdecimal() and len(given) < 12):
        raise RequestError(400, f"{given[:40]!r} is no number", "invalid_request")
    return min(int(given), most)


def require(value: Any, kind: str = "conversation") -> Any:
    """Returns `value`, the result of a method of `Store`. Raises `RequestError` (404) if `value` is None."""
    if value is None:
        raise RequestError(404, f"there is no such {kind}", f"unknown_{kind}")
    return value


# ---- races: the main model and a second model answer the same request, one after the other


def race_routes(store: Store, models: Models) -> list[Route]:
    """Returns the route of races."""

    async def race(request: Request, body: RaceBody) -> Response:
        """Answers a request with two models in turn, as an event stream."""
        return await stream_response(
            request, models.main, encode_frames(_race_frames(store, models, body)), on_error=failure_frame
        )

    return [BodyRoute(models.main, "/app/api/race", RaceBody, race)]


async def _race_frames(store: Store, models: Models, body: RaceBody) -> AsyncGenerator[dict[str, Any], None]:
    """Yields frames of the main model (lane "zip") and of the second model (lane "base"), then both models' figures.

    Raises `RequestError`.
    """
    base = next((one for one in models.list_race_rivals() if one["name"] == body.base), None)
    if base is None:
        raise RequestError(404, f"there is no {body.base!r:.200} to race against", "model_not_found", "base")
    turn, ended = await _race_turn(store, models, body), {}
    zip_lane = {"label": _race_label(models), "model": models.main.model, "quality": QUALITY.get(models.main.model)}
    lanes = {"zip": zip_lane, "base": {"label": base["label"], "model": base["name"], "quality": base["quality"]}}
    for lane, about in lanes.items():
        yield {"type": "lane", "lane": lane, **about}
        asked = turn if lane == "zip" else replace(turn, pack=None)
        async with models.using(about["model"]) as core, aclosing(core.answer(asked)) as deltas:
            async for delta in deltas:
                if isinstance(delta, Done):
                    ended[lane] = live_counts_json(delta.counts)
                if (frame := make_frame(delta)) is not None:
                    yield {**frame, "lane": lane}
    yield {"type": "done", "lanes": ended}


def _race_label(models: Models) -> str:
    with_or_without = "with" if models.main.engine.info.merge_size else "without"
    return f"{models.main.model}, {with_or_without} hypertokens"


async def _race_turn(store: Store, models: Models, body: RaceBody) -> Turn:
    """Returns the request, as a `Turn`, that both models answer. Raises `RequestError`."""
    sampling = {} if body.sampling is None else body.sampling.fields_set
    if body.max_tokens is not None:
        sampling["max_tokens"] = body.max_tokens
    if body.messages is not None:
        asked = {"system": "", "sampling": sampling, "packs": []}
        messages = [{"role": one.role, "text": one.content, "reasoning": ""} for one in body.messages]
        return turn_of(models.main.options.max_tokens, asked, messages)
    if body.conversation is None or body.leaf is None:
        raise RequestError(400, "a race needs a conversation and its leaf, or messages", "invalid_request")
    conversation = require(await models.main.run_in_thread(store.conversation, body.conversation))
    path = await models.main.run_in_thread(store.path, body.conversation, body.leaf)
    if not path or path[-1]["role"] != "user":
        raise RequestError(400, "leaf must be a message of the user", "invalid_request", "leaf")
    return turn_of(
        models.main.options.max_tokens, conversation | {"sampling": conversation["sampling"] | sampling}, path
    )


# ---- request bodies

MOST_PACKS = 100


def _check_unicode(text: str) -> str:
    """Returns `text`. Raises `ValueError` if `text` has an unpaired surrogate, which UTF-8 cannot encode."""
    text.encode()
    return text


Words = Annotated[str, AfterValidator(_check_unicode)]
Title = Annotated[Words, Field(max_length=500)]
Folder = Annotated[Words, Field(max_length=100)]
Name = Annotated[Words, Field(min_length=1, max_length=1000)]
PackNames = Annotated[Many[Name], Field(max_length=MOST_PACKS)]


class SamplingBody(Body):
    """How an answer is sampled. A field that is left out takes the value that the app was started with."""

    temp: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Fraction | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    max_tokens: Size | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None

    @property
    def fields_set(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        return self.model_dump(exclude_none=True)


class ConversationBody(Body):
    """The fields of a new conversation; the base class of `ChangeBody`."""

    title: Title | None = None
    model: Name | None = None
    system: Words | None = None
    packs: PackNames | None = None
    sampling: SamplingBody | None = None

    @property
    def fields_set(self) -> dict[str, Any]:
        """The fields that are not None, by name, as `Store.create` and `Store.change` take them."""
        return self.model_dump(exclude_none=True)


class ChangeBody(ConversationBody):
    """Changes to a stored conversation. A field that is None is not changed."""

    draft: Words | None = None
    leaf: Name | None = None
    pinned: bool | None = None
    folder: Folder | None = None


class AnswerBody(Body):
    """A request for an answer. parent: id of the message that the new messages follow. text: new user message to
    answer; None: answer `parent`. continue: extend the answer `parent` instead of starting a new one.
    """

    parent: Name | None = None
    text: Annotated[Words, Field(min_length=1)] | None = None
    continues: bool = Field(default=False, alias="continue")
    model: Name | None = None


class RaceMessage(Body):
    """A message of a race without a stored conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[Words, Field(min_length=1)]


class RaceBody(Body):
    """A request that two models answer: first the main model, then the model named `base`.

    messages: the whole request; None: answer the user message `leaf` of the stored conversation `conversation`.
    """

    conversation: Name | None = None
    leaf: Name | None = None
    messages: Annotated[Many[RaceMessage], Field(min_length=1)] | None = None
    base: Name
    sampling: SamplingBody | None = None
    max_tokens: Size | None = None
