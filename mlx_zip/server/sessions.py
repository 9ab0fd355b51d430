"""Routes that list, save, load and delete the kept sessions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.errors import EngineError, EngineStoppedError, UnknownSessionError
from mlx_zip.server.core import Core
from mlx_zip.server.errors import RequestError
from mlx_zip.server.fields import Body
from mlx_zip.server.http import BodyRoute, json_response

Some = TypeVar("Some")
PATH = "/v1/mlx_zip/sessions"
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.safetensors")


class SaveBody(Body):
    """Names a kept session, and the file in the folder of --session-files to save it to."""

    session: Annotated[str, Field(min_length=1)]
    file: str


class LoadBody(Body):
    """Names a file in the folder of --session-files to load a session from."""

    file: str


def session_routes(core: Core) -> list[Route]:
    """Returns the routes of sessions."""

    async def show(request: Request) -> Response:
        """Lists the kept sessions, the last used first."""
        return json_response(
            {"object": "list", "data": [asdict(one) for one in await core.run_in_thread(core.engine.sessions)]}
        )

    async def purge(request: Request) -> Response:
        """Forgets all sessions and all stored responses, in memory and on disk."""
        responses = core.responses.clear()
        return json_response({"deleted": await core.run_in_thread(core.engine.purge_sessions), "responses": responses})

    async def drop(request: Request) -> Response:
        """Forgets one session, in memory and on disk."""
        await _call_engine_in_thread(core, core.engine.drop_session, request.path_params["name"])
        return json_response({"deleted": 1})

    async def save(request: Request, asked: SaveBody) -> Response:
        """Writes a session to a file."""
        await _call_engine_in_thread(
            core, core.engine.save_session, asked.session, _session_file_path(core, asked.file)
        )
        return json_response({"file": asked.file})

    async def load(request: Request, asked: LoadBody) -> Response:
        """Loads the session in a file."""
        return json_response(
            asdict(await _call_engine_in_thread(core, core.engine.load_session, _session_file_path(core, asked.file)))
        )

    return [
        Route(PATH, show, methods=["GET"]),
        Route(PATH, purge, methods=["DELETE"]),
        BodyRoute(core, f"{PATH}/save", SaveBody, save),
        BodyRoute(core, f"{PATH}/load", LoadBody, load),
        Route(f"{PATH}/{{name}}", drop, methods=["DELETE"]),
    ]


async def _call_engine_in_thread(core: Core, work: Callable[..., Some], *args: Any) -> Some:
    """Calls an engine's method in a thread, and returns its result.

    Raises `EngineStoppedError` unchanged, and other errors of the engine as `RequestError`: `UnknownSessionError` with
    status 404, any other `EngineError` with status 400.
    """
    try:
        return await core.run_in_thread(work, *args)
    except EngineStoppedError:
        raise
    except UnknownSessionError as error:
        raise RequestError(404, str(error), "not_found", "session") from error
    except EngineError as error:
        raise RequestError(400, str(error), "session") from error


def _session_file_path(core: Core, name: str) -> Path:
    """Returns a session file's path. Raises `RequestError` without --session-files or if the name is not allowed."""
    folder = core.options.session_files
    if folder is None:
        raise RequestError(403, "sessions are not saved to files: start the server with --session-files DIR", "session")
    if not FILE_NAME.fullmatch(name):
        raise RequestError(400, "file: this must be a plain name that ends in .safetensors", "session", "file")
    file = folder / name
    if file.is_symlink() or (file.exists() and not file.is_file()):  # a link leaves the folder, a pipe never ends
        raise RequestError(400, f"file: {name} is no ordinary file", "session", "file")
    return file
