"""The description of all routes (OpenAPI 3.1), made from their classes of bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

import mlx_zip

_JSON = {"application/json": {"schema": {"type": "object"}}}
_TEXT = {"schema": {"type": "string"}}
_FAILED = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
_ERROR = {
    "description": "An error, in the words of the route's dialect",
    "content": {"application/json": {"schema": _FAILED}},
}
_ANSWERS = {  # by the attribute `answer` of an endpoint
    "json": {"description": "The answer", "content": _JSON},
    "stream": {
        "description": "The answer; with stream: true as server-sent events",
        "content": {**_JSON, "text/event-stream": _TEXT},
    },
    "text": {"description": "Text", "content": {"text/plain": _TEXT}},
}


def description(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Returns the description of routes. An endpoint's attribute `body` is the pydantic class of its body."""
    found = [route for route in routes if isinstance(route, Route)]
    bodies = list(dict.fromkeys(body for route in found if (body := getattr(route.endpoint, "body", None))))
    refs, schema = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    parts = schema.get("$defs", {})
    paths: dict[str, Any] = {}
    for route in found:
        body = getattr(route.endpoint, "body", None)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(route, None if body is None else refs[(body, "validation")])
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


def _operation(route: Route, body: Any) -> dict[str, Any]:
    """Returns the description of one method of a route."""
    operation: dict[str, Any] = {"summary": (route.endpoint.__doc__ or "").strip()}
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    streams = "stream" in getattr(getattr(route.endpoint, "body", None), "model_fields", {})
    answer = _ANSWERS[getattr(route.endpoint, "answer", "stream" if streams else "json")]
    stopped = {"503": {"description": "The engine has stopped", "content": _JSON}} if route.path == "/health" else {}
    return operation | {"responses": {"200": answer, **stopped, "4XX": _ERROR, "5XX": _ERROR}}
