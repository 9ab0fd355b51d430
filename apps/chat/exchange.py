"""Exports conversations as JSON or Markdown, and imports exported JSON; includes the routes of exports and imports."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.apps.chat.routes import PATH, Folder, Name, PackNames, SamplingBody, Title, Words, require
from mlx_zip.apps.chat.store import CUT, Store, new_id
from mlx_zip.server.core import Core
from mlx_zip.server.errors import RequestError, json_bytes
from mlx_zip.server.fields import Body, BodyError
from mlx_zip.server.http import BodyRoute, json_response

FORMAT, VERSION = "mlx_zip conversations", 1
MOST_TOKENS = 1_000_000  # per message
MOST_MESSAGES = MOST_CONVERSATIONS = 1_000_000  # not reached: `MOST_BYTES` allows fewer
Time = Annotated[float, Field(ge=0, le=1e11)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Figure = Annotated[float, Field(ge=0)]
Parts = Annotated[list[Words], Field(max_length=1000, fail_fast=True)]


class TokenBody(Body):
    """A token of an answer's text; the fields are those of `mlx_zip.server.answers.turn.shown_token_json`."""

    t: Words
    id: int | None = None
    p: Parts | None = None
    o: Literal["pack", "prompt", "answer"] | None = None
    a: int | None = None
    d: bool | None = None
    c: bool | None = None


class DiffersBody(Body):
    """Where an answer's prompt differed from the cached ids; see the server's `PromptDifference`."""

    at: int = 0
    kept: Words = ""
    now: Words = ""


class FiguresBody(Body):
    """An answer's counts, times and rates, as the page shows them."""

    base_tokens: Count = 0
    steps: Count = 0
    hypertokens: Count = 0
    entries: Count = 0
    codebook_size: Count = 0
    kv_bytes_saved: Count = 0
    proposed: Count = 0
    accepted: Count = 0
    base_tokens_per_step: Figure = 0.0
    base_tokens_per_pass: Figure = 0.0
    seconds: Figure = 0.0
    base_tokens_per_s: Figure = 0.0
    prompt_differs: DiffersBody | None = None


class MessageBody(Body):
    """A message of an imported conversation; its parent comes earlier in the list."""

    id: Name
    parent: Name | None = None
    role: Literal["user", "assistant"]
    text: Words
    reasoning: Words = ""
    created: Time
    state: Literal["running", "whole", "stopped", "cut", "failed"] = "whole"
    reason: Words | None = None
    tokens: Annotated[list[TokenBody], Field(max_length=MOST_TOKENS, fail_fast=True)] | None = None
    figures: FiguresBody | None = None
    learned: Annotated[list[Parts], Field(max_length=MOST_TOKENS, fail_fast=True)] = Field(default_factory=list)
    model: Name | None = None


class ImportedBody(Body):
    """A conversation in a file to import."""

    id: Name
    title: Title = ""
    created: Time
    updated: Time
    model: Name | None = None
    system: Words = ""
    packs: PackNames = Field(default_factory=list)
    sampling: SamplingBody = Field(default_factory=SamplingBody)
    draft: Words = ""
    leaf: Name | None = None
    pinned: bool = False
    folder: Folder = ""
    messages: Annotated[list[MessageBody], Field(max_length=MOST_MESSAGES, fail_fast=True)]


class ImportBody(Body):
    """The content of a file to import, which `export_conversations` made."""

    format: Literal["mlx_zip conversations"]
    version: Literal[1]
    exported: Time | None = None
    conversations: Annotated[list[ImportedBody], Field(max_length=MOST_CONVERSATIONS, fail_fast=True)]

    @model_validator(mode="before")
    @classmethod
    def _check_format(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("format") != FORMAT:
            raise ValueError("this is no export of this app: its field format is another")
        if given.get("version") != VERSION:
            raise ValueError(f"this is no export of this app's version {VERSION}: it has {given.get('version')!r:.40}")
        return given


def export_conversations(conversations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the JSON object of an export file that holds these conversations."""
    return {"format": FORMAT, "version": VERSION, "exported": time.time(), "conversations": list(conversations)}


def import_conversations(body: ImportBody) -> list[dict[str, Any]]:
    """Returns the conversations in `body` with new ids, for `Store.add`. Raises `BodyError` if an old id is invalid."""
    return [_import_conversation(one, f"conversations.{i}") for i, one in enumerate(body.conversations)]


def _import_conversation(given: ImportedBody, place: str) -> dict[str, Any]:
    """Returns a conversation with new ids. place: path of `given` in the body.

    Raises `BodyError` if two messages have one id, a parent does not stand before its message, or the leaf is unknown.
    """
    ids: dict[str, str] = {}
    messages = []
    for i, one in enumerate(given.messages):
        if one.id in ids:
            raise BodyError("there are two messages with this id", f"{place}.messages.{i}.id")
        if one.parent is not None and one.parent not in ids:
            raise BodyError("the parent must stand before its message", f"{place}.messages.{i}.parent")
        ids[one.id] = new_id()
        messages.append(_import_message(one, ids))
    if given.leaf is not None and given.leaf not in ids:
        raise BodyError("there is no such message", f"{place}.leaf")
    fields = given.model_dump(exclude={"messages", "id", "leaf", "sampling"})
    leaf = None if given.leaf is None else ids[given.leaf]
    return {**fields, "id": new_id(), "leaf": leaf, "sampling": given.sampling.fields_set, "messages": messages}


def _import_message(given: MessageBody, ids: Mapping[str, str]) -> dict[str, Any]:
    """Returns a message with its new ids from `ids`; a message exported while it was running gets the state "cut"."""
    fields = given.model_dump(exclude={"tokens", "figures"})
    fields["figures"] = None if given.figures is None else given.figures.model_dump(exclude_none=True)
    tokens = None if given.tokens is None else [one.model_dump(exclude_none=True) for one in given.tokens]
    if tokens is not None and "".join(one["t"] for one in tokens) != given.text:
        tokens = None  # the page would show the tokens, whose text differs
    if given.state == "running":
        fields |= {"state": "cut", "reason": CUT}
    return {**fields, "tokens": tokens, "id": ids[given.id], "parent": given.parent and ids[given.parent]}


def conversation_markdown(conversation: Mapping[str, Any]) -> str:
    """Returns the branch of a conversation that the page shows, as Markdown."""
    title = " ".join(conversation["title"].split()) or "Conversation"
    parts = [f"# {title}"]
    if conversation["system"]:
        parts += ["## System", conversation["system"]]
    for message in _shown_branch(conversation):
        name = "You" if message["role"] == "user" else message["model"] or "Answer"
        parts += [f"## {name}", message["text"]]
        if message["state"] not in ("whole", "running"):
            parts.append(f"*({message['state']})*")
    return "\n\n".join(parts) + "\n"


def _shown_branch(conversation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    by_id = {message["id"]: message for message in conversation["messages"]}
    at = by_id.get(conversation["leaf"]) or next(reversed(by_id.values()), None)
    found = []
    while at is not None and len(found) < len(by_id):
        found.append(at)
        at = by_id.get(at["parent"])
    return found[::-1]


def download_name(title: str, end: str) -> str:
    """Returns a file name of ASCII letters, digits and hyphens for a title. end: the extension."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-")[:60].strip("-")
    return f"{words or 'conversation'}.{end}"


MOST_BYTES = 256 << 20  # per import


def routes(store: Store, core: Core) -> list[Route]:
    """Returns the routes of exports and imports."""

    async def export_one(request: Request) -> Response:
        """Exports a conversation as JSON or Markdown."""
        conversation = require(await core.run_in_thread(store.conversation, request.path_params["id"]))
        kind = request.query_params.get("format", "json")
        if kind not in ("json", "md"):
            raise RequestError(400, "format must be json or md", "invalid_request", "format")
        name = download_name(conversation["title"], kind)
        if kind == "md":
            return _download_response(
                conversation_markdown(conversation).encode(), "text/markdown; charset=utf-8", name
            )
        return _download_response(json_bytes(export_conversations([conversation])), "application/json", name)

    async def export_all(request: Request) -> Response:
        """Exports all conversations as JSON."""
        data = await core.run_in_thread(lambda: json_bytes(export_conversations(store.everything())))
        return _download_response(data, "application/json", "conversations.json")

    async def import_all(request: Request, body: ImportBody) -> Response:
        """Adds the conversations of an export."""
        made = await core.run_in_thread(import_conversations, body)
        await core.run_in_thread(store.add, made)
        return json_response({"imported": len(made), "ids": [one["id"] for one in made]})

    return [
        Route(PATH + "/{id}/export", export_one),
        Route("/app/api/export", export_all),
        BodyRoute(core, "/app/api/import", ImportBody, import_all, most=MOST_BYTES),
    ]


def _download_response(data: bytes, kind: str, name: str) -> Response:
    return Response(data, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})
