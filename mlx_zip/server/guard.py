"""Who may come in: names of the host, keys, origins of browsers."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_zip.server.errors import RequestError, dialect_of, failure_of
from mlx_zip.server.options import Options


class Guard:
    """Lets a request pass to the app if its Host header, origin and key are right, and answers 403 or 401 otherwise.

    A request whose length is given in two ways is answered with 400.

    The check of the Host header keeps web pages from reaching a server on this machine through a name that they have
    pointed at it (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, options: Options) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that may not come in, or passes it on."""
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            response = failure_of(refusal).response(dialect_of(scope["path"]))
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        """Returns why a request may not come in, None if it may."""
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may see another body (smuggling)
            message = "a request has Content-Length or Transfer-Encoding, not both"
            return RequestError(400, message, "invalid_http", headers={"Connection": "close"})
        hosts = self._options.hosts
        if hosts is not None and host_name(headers.get("host", "")) not in hosts:
            message = "the Host header names another machine; this server answers to: " + ", ".join(sorted(hosts))
            return RequestError(403, message, "wrong_host")
        if not self._own_page(headers):
            message = "this server answers no page of another origin than those of --allowed-origins"
            return RequestError(403, message, "wrong_origin")
        if self._options.api_key is None or self._is_open(scope["path"]) or self._knows(headers):
            return None
        message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        return RequestError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _own_page(self, headers: Headers) -> bool:
        """Returns whether a request comes from this server's own page, from an allowed one, or from no page."""
        origin, allowed = headers.get("origin"), self._options.allowed_origins
        own = f"http://{headers.get('host', '')}"
        return origin is None or origin.lower() == own.lower() or origin in allowed or "*" in allowed

    def _is_open(self, path: str) -> bool:
        """Returns whether a path needs no key. A path is taken as it stands: `..` in it has no meaning."""
        return any(path == one or (one.endswith("*") and path.startswith(one[:-1])) for one in self._options.open_paths)

    def _knows(self, headers: Headers) -> bool:
        """Returns whether the headers have the right key; takes the same time for any wrong one."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        right = (self._options.api_key or "").encode()
        return hmac.compare_digest(given.encode("latin-1", "replace"), right)


def host_name(header: str) -> str:
    """Returns the name in a Host header, without the port and the brackets of an IPv6 address."""
    name = header.strip().lower()
    if name.startswith("["):
        inner, end, _ = name[1:].partition("]")
        return inner if end else ""
    return name.partition(":")[0]
