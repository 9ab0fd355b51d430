"""The routes that export and import conversations."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.apps.chat.exchange import ImportBody, exported, file_name, imported, markdown
from mlx_zip.apps.chat.routes import PATH, found
from mlx_zip.apps.chat.store import Store
from mlx_zip.server.core import Core
from mlx_zip.server.errors import RequestError, json_bytes
from mlx_zip.server.http import described, json_response, read_body

MOST_BYTES = 256 << 20  # of an import


def routes(store: Store, core: Core) -> list[Route]:
    """Returns the routes of exports and imports."""

    async def export_one(request: Request) -> Response:
        """Exports a conversation as JSON or Markdown."""
        conversation = found(await core.aside(store.conversation, request.path_params["id"]))
        kind = request.query_params.get("format", "json")
        if kind not in ("json", "md"):
            raise RequestError(400, "format must be json or md", "invalid_request", "format")
        name = file_name(conversation["title"], kind)
        if kind == "md":
            return _file(markdown(conversation).encode(), "text/markdown; charset=utf-8", name)
        return _file(json_bytes(exported([conversation])), "application/json", name)

    async def export_all(request: Request) -> Response:
        """Exports all conversations as JSON."""
        data = await core.aside(lambda: json_bytes(exported(store.everything())))
        return _file(data, "application/json", "conversations.json")

    async def import_all(request: Request) -> Response:
        """Adds the conversations of an export."""
        body = await read_body(request, core, ImportBody, MOST_BYTES)
        made = await core.aside(imported, body)
        await core.aside(store.add, made)
        return json_response({"imported": len(made), "ids": [one["id"] for one in made]})

    return [
        Route(PATH + "/{id}/export", export_one),
        Route("/app/api/export", export_all),
        Route("/app/api/import", described(import_all, ImportBody), methods=["POST"]),
    ]


def _file(data: bytes, kind: str, name: str) -> Response:
    """Returns an answer that a browser saves as a file."""
    return Response(data, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})
