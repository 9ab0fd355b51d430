"""The page's files, and the response headers that forbid scripts and content from other sources."""

from __future__ import annotations

import os
import re
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_zip.server.errors import RequestError

FOLDER = Path(__file__).parent
OPEN = ("/app", "/app/", "/app/page/*", "/app/vendor/*")  # paths that need no key
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
    "": "text/plain; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def routes(folder: Path = FOLDER) -> list[Route]:
    """Returns the routes of the page's files in `folder`/page and `folder`/vendor."""

    async def index(request: Request) -> Response:
        """Shows the page of the app."""
        return _file_response(request, folder, "page", "index.html")

    async def page(request: Request) -> Response:
        """Returns one of the page's own files."""
        return _file_response(request, folder, "page", request.path_params["name"])

    async def vendor(request: Request) -> Response:
        """Returns a file of a package that the page uses."""
        return _file_response(request, folder, "vendor", request.path_params["name"])

    async def slash(request: Request) -> Response:
        """Leads to the page of the app."""
        return RedirectResponse("/app/", 308)

    return [
        Route("/app", slash),
        Route("/app/", index),
        Route("/app/page/{name:path}", page),
        Route("/app/vendor/{name:path}", vendor),
    ]


def _file_response(request: Request, folder: Path, part: str, name: str) -> Response:
    """Returns the file `folder`/`part`/`name`, or status 304 if the browser's copy of it is current.

    The browser may cache the file, but asks before each use whether it has changed. Raises `RequestError` if there is
    no such file, or files of its type are not served.
    """
    names = name.split("/")
    path = folder.joinpath(part, *names)
    plain = all(_NAME.fullmatch(one) for one in names)
    if not plain or path.suffix not in TYPES or os.path.islink(path) or not os.path.isfile(path):
        raise RequestError(404, "the page has no such file", "unknown_url")
    known = path.stat()
    headers = {"Cache-Control": "no-cache", "ETag": f'"{known.st_mtime_ns:x}-{known.st_size:x}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    # Read here, not in a thread: the page requests fifty small files at once, and a thread costs more than a read.
    return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=headers)


class PageHeaders:
    """Adds `HEADERS` to each response below /app, which forbid inline scripts, content from other hosts, and frames."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request and adds the headers to its response."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        of_app = scope["type"] == "http" and scope["path"].startswith("/app")
        await self._app(scope, receive, sent if of_app else send)
