"""Errors as HTTP responses: the status, the message, and the JSON body in the dialect of OpenAI or Anthropic."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlx_zip.errors import (
    EngineBusyError,
    EngineStoppedError,
    GenerationError,
    MlxZipError,
    PromptTooLongError,
    failure_reason,
)

log = logging.getLogger("mlx_zip.server")

OPENAI, ANTHROPIC = "openai", "anthropic"
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


MOST_QUOTED = 1000  # maximum characters of an error's message and of its field, which may quote the request


class RequestError(MlxZipError):
    """An error to send as an HTTP response. status: HTTP status. code: short name of the error.

    param: the field at fault. headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers

    def body(self, dialect: str = OPENAI) -> dict[str, Any]:
        """Returns the error as a JSON object for a response or a stream's event. dialect: `OPENAI` or `ANTHROPIC`."""
        server, message, param = self.status >= 500, str(self)[:MOST_QUOTED], (self.param or "")[:MOST_QUOTED]
        if dialect == ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if server else "invalid_request_error")
            error = {"type": kind, "message": message}
            return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}
        kind = _OPENAI_TYPES.get(self.status, "server_error" if server else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param or None, "code": self.code}}

    def response(self, dialect: str = OPENAI) -> Response:
        """Returns the error as an HTTP response. dialect: `OPENAI` or `ANTHROPIC`."""
        body, headers = self.body(dialect), dict(self.headers)
        if dialect == ANTHROPIC:
            headers["request-id"] = body["request_id"]
        return Response(json_bytes(body), self.status, media_type="application/json", headers=headers)


def as_request_error(error: BaseException) -> RequestError:
    """Returns the error to send to a client for an exception. Logs an unexpected one, and does not send its message."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException):
        return _route_request_error(error)
    if isinstance(error, EngineBusyError):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return RequestError(429, str(error), "rate_limit_exceeded", headers=wait)
    if isinstance(error, EngineStoppedError):
        return RequestError(503, str(error), "stopped", headers={"Retry-After": "5"})
    if isinstance(error, PromptTooLongError):
        return RequestError(400, str(error), "context_length_exceeded")
    if isinstance(error, GenerationError):
        return RequestError(400, str(error), "invalid_request")
    if isinstance(error, MlxZipError):
        log.error("a request failed: %s", failure_reason(error))
        return RequestError(500, str(error), "failed")
    log.error("a request failed", exc_info=error)
    return RequestError(500, "the server made a mistake; its log says more", "internal_error")


def _route_request_error(error: HTTPException) -> RequestError:
    words = {404: "there is no such route; GET /openapi.json lists the routes", 405: "this route has another method"}
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = words.get(error.status_code, str(error.detail))
    return RequestError(error.status_code, message, codes.get(error.status_code), headers=error.headers or {})


def dialect_of(path: str) -> str:
    """Returns the dialect of errors for requests to `path`: `OPENAI` or `ANTHROPIC`."""
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI


def json_bytes(value: Any) -> bytes:
    """Returns a value as JSON in UTF-8. A lone surrogate, which UTF-8 cannot hold, becomes a JSON escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")
