"""The server as an ASGI app: all routes, the responses to errors, the access checks and the OpenAPI document."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import mlx_zip
from mlx_zip.errors import MlxZipError
from mlx_zip.server import sessions
from mlx_zip.server.anthropic import messages
from mlx_zip.server.core import Core
from mlx_zip.server.errors import RequestError, as_request_error, dialect_of, json_bytes
from mlx_zip.server.http import BodyRoute, ClientGone, check_model_name, json_response
from mlx_zip.server.metrics import RequestCounter
from mlx_zip.server.openai import chat, completions, responses
from mlx_zip.server.options import Options

_CODEX_INSTRUCTIONS = (  # instructions that Codex begins its prompts with
    "You are a coding agent in a user's terminal. Use the tools to look at files, to run commands and to change files "
    "until the task is done. Then say in a few words what you did. Ask before you delete what cannot be made again."
)
DIALECTS: tuple[Callable[[Core], Sequence[Route]], ...] = (
    chat.chat_routes,
    completions.completions_routes,
    responses.responses_routes,
    messages.messages_routes,
    sessions.session_routes,
)


def make_app(core: Core, more: Sequence[Route] = ()) -> Starlette:
    """Returns the app that serves the engine of `core`. When the app shuts down, it closes `core`, not the engine.

    more: further routes, which get the access checks and are in the OpenAPI document too.
    """
    options = core.options
    routes = (
        [route for dialect in DIALECTS for route in dialect(core)]
        + _general_routes(core)
        + [core.metrics.metrics_route(), *more]
    )
    routes.append(_openapi_route(routes))
    origins = list(options.allowed_origins)
    browsers = Middleware(CORSMiddleware, allow_origins=origins, allow_headers=["*"], allow_methods=["*"])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        core.close()

    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestCounter, metrics=core.metrics),
            Middleware(Guard, options=options, refuse=host_or_origin_refusal),
            *([browsers] if origins else []),
            Middleware(Guard, options=options, refuse=key_refusal),
        ],
        exception_handlers={
            MlxZipError: _error_response,
            HTTPException: _error_response,
            ClientGone: _client_gone_response,
            Exception: _error_response,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect is not JSON, and clients that follow it drop the request's body
    return app


def _general_routes(core: Core) -> list[Route]:
    model = {"id": core.model, "object": "model", "created": core.created, "owned_by": "mlx_zip"}
    if (context := core.engine.info.context) is not None:
        model |= {"context_length": context, "max_model_len": context}

    async def models(request: Request) -> Response:
        """Lists the model that is served."""
        return json_response({"object": "list", "data": [model], "models": [_codex_model_entry(core.model, context)]})

    async def one_model(request: Request) -> Response:
        """Describes the model that is served."""
        check_model_name(core, request.path_params["name"])
        return json_response(model)

    async def health(request: Request) -> Response:
        """Says whether the server can answer."""
        alive = core.engine.alive
        return json_response({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def unwire(request: Request) -> Response:
        """Lets a Mac move the idle model out of the GPU's memory until the next request; not while requests run."""
        return json_response({"unwired": await core.run_in_thread(core.engine.unwire_idle_memory)})

    return [
        Route("/v1/models", models),
        Route("/v1/models/", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
        Route("/v1/mlx_zip/unwire", unwire, methods=["POST"]),
    ]


def _codex_model_entry(name: str, context: int | None) -> dict[str, Any]:
    """Returns the model's entry for Codex: all fields that Codex requires, and the context length in tokens."""
    nothing = ("description", "availability_nux", "upgrade", "default_verbosity", "apply_patch_tool_type")
    no = ("supports_reasoning_summaries", "support_verbosity")
    return {
        "slug": name,
        "display_name": name,
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [],
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "context_window": context,
        **dict.fromkeys(nothing),
        **dict.fromkeys(no, False),
    }


def _openapi_route(routes: Sequence[Route]) -> Route:
    text = json_bytes(_openapi_document(routes))

    async def openapi(request: Request) -> Response:
        """Describes all routes (OpenAPI)."""
        return Response(text, media_type="application/json")

    return Route("/openapi.json", openapi)


async def _error_response(request: Request, error: Exception) -> Response:
    response = as_request_error(error).response(dialect_of(request.url.path))
    if response.status_code == 405:
        response.headers["Allow"] = ", ".join(sorted(_allowed_methods(request)))
    return response


def _allowed_methods(request: Request) -> set[str]:
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in routes for method in route.methods}


async def _client_gone_response(request: Request, error: Any) -> Response:
    return Response(status_code=499)


# ---- access checks: Host header, API key, and the origin of requests from browsers

FindRefusal = Callable[[Options, str, Headers], RequestError | None]


class Guard:
    """Middleware that answers refused requests itself, and passes all others on to the app.

    refuse: `host_or_origin_refusal` or `key_refusal`; called with the options, a request's path and its headers.
    """

    def __init__(self, app: ASGIApp, options: Options, refuse: FindRefusal) -> None:
        self._app, self._options, self._refuse = app, options, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refused request, or passes the request on."""
        if scope["type"] == "http":
            refusal = self._refuse(self._options, scope["path"], Headers(scope=scope))
            if refusal is not None:
                response = refusal.response(dialect_of(scope["path"]))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_or_origin_refusal(options: Options, path: str, headers: Headers) -> RequestError | None:
    """Returns the refusal of a request, None if the request may pass.

    The status is 400 if the request has both Content-Length and Transfer-Encoding, 403 if its Host header or its origin
    is not allowed.

    The check of the Host header keeps web pages from reaching a server on this machine through a host name that
    resolves to it (DNS rebinding).
    """
    if "content-length" in headers and "transfer-encoding" in headers:  # request smuggling past a proxy
        message = "a request has Content-Length or Transfer-Encoding, not both"
        return RequestError(400, message, "invalid_http", headers={"Connection": "close"})
    if options.hosts is not None and _host_name(headers.get("host", "")) not in options.hosts:
        message = "the Host header names another machine; this server answers to: " + ", ".join(sorted(options.hosts))
        return RequestError(403, message, "wrong_host")
    if not _is_allowed_origin(options, headers):
        message = "this server answers no page of another origin than those of --allowed-origins"
        return RequestError(403, message, "wrong_origin")
    return None


def key_refusal(options: Options, path: str, headers: Headers) -> RequestError | None:
    """Returns the refusal (401) of a request whose API key is missing or wrong, None if the request may pass."""
    if options.api_key is None or _is_open_path(options, path) or _has_api_key(options.api_key, headers):
        return None
    message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
    return RequestError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _is_allowed_origin(options: Options, headers: Headers) -> bool:
    origin, allowed = headers.get("origin"), options.allowed_origins
    own = f"http://{headers.get('host', '')}"
    return origin is None or origin.lower() == own.lower() or origin in allowed or "*" in allowed


def _is_open_path(options: Options, path: str) -> bool:
    """Returns whether a path needs no key. `..` in the path is not resolved."""
    return any(path == one or (one.endswith("*") and path.startswith(one[:-1])) for one in options.open_paths)


def _has_api_key(key: str, headers: Headers) -> bool:
    """Returns whether the headers hold the key. The comparison takes the same time for any wrong key."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return hmac.compare_digest(given.encode("latin-1", "replace"), key.encode())


def _host_name(header: str) -> str:
    """Returns the name in a Host header, without the port and the brackets of an IPv6 address."""
    name = header.strip().lower()
    if name.startswith("["):
        inner, end, _ = name[1:].partition("]")
        return inner if end else ""
    return name.partition(":")[0]


# ---- the OpenAPI 3.1 document of all routes; its schemas come from the pydantic classes of request bodies

_JSON = {"application/json": {"schema": {"type": "object"}}}
_TEXT = {"schema": {"type": "string"}}
_ERROR_SCHEMA = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
_ERROR = {
    "description": "An error, in the words of the route's dialect",
    "content": {"application/json": {"schema": _ERROR_SCHEMA}},
}
_ANSWERS = {  # endpoint's attribute `answer` -> OpenAPI response
    "json": {"description": "The answer", "content": _JSON},
    "stream": {
        "description": "The answer; with stream: true as server-sent events",
        "content": {**_JSON, "text/event-stream": _TEXT},
    },
    "text": {"description": "Text", "content": {"text/plain": _TEXT}},
}


def _openapi_document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Returns the OpenAPI document of routes."""
    found = [route for route in routes if isinstance(route, Route)]
    bodies = list(dict.fromkeys(route.body for route in found if isinstance(route, BodyRoute)))
    refs, schema = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    parts = schema.get("$defs", {})
    paths: dict[str, Any] = {}
    for route in found:
        body = refs[(route.body, "validation")] if isinstance(route, BodyRoute) else None
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _openapi_operation(route, body)
            paths.setdefault(route.path.replace(":path}", "}"), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx_zip serve", "version": mlx_zip.__version__},
        "paths": paths,
        "components": {
            "schemas": parts,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _openapi_operation(route: Route, body: Any) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": (route.endpoint.__doc__ or "").strip()}
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    streams = isinstance(route, BodyRoute) and "stream" in route.body.model_fields
    answer = _ANSWERS[getattr(route.endpoint, "answer", "stream" if streams else "json")]
    stopped = {"503": {"description": "The engine has stopped", "content": _JSON}} if route.path == "/health" else {}
    return operation | {"responses": {"200": answer, **stopped, "4XX": _ERROR, "5XX": _ERROR}}
