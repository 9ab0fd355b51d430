"""Access checks: Host header, API key, and the origin of requests from browsers."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_zip.server.errors import RequestError, dialect_of
from mlx_zip.server.options import Options

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
    if options.hosts is not None and host_name(headers.get("host", "")) not in options.hosts:
        message = "the Host header names another machine; this server answers to: " + ", ".join(sorted(options.hosts))
        return RequestError(403, message, "wrong_host")
    if not _is_allowed_origin(options, headers):
        message = "this server answers no page of another origin than those of --allowed-origins"
        return RequestError(403, message, "wrong_origin")
    return None


def key_refusal(options: Options, path: str, headers: Headers) -> RequestError | None:
    """Returns the refusal (401) of a request whose API key is missing or wrong, None if the request may pass."""
    if options.api_key is None or _is_open_path(options, path) or _has_key(options.api_key, headers):
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


def _has_key(key: str, headers: Headers) -> bool:
    """Returns whether the headers hold the key. The comparison takes the same time for any wrong key."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return hmac.compare_digest(given.encode("latin-1", "replace"), key.encode())


def host_name(header: str) -> str:
    """Returns the name in a Host header, without the port and the brackets of an IPv6 address."""
    name = header.strip().lower()
    if name.startswith("["):
        inner, end, _ = name[1:].partition("]")
        return inner if end else ""
    return name.partition(":")[0]
