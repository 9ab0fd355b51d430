"""Metrics of the engine and of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_zip.engine import Engine, Figures
from mlx_zip.server.answers.turn import Done

NOW = ("running", "waiting", "sessions", "session_bytes", "disk_bytes", "memory_bytes", "peak_memory_bytes")
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """Metrics of one server: figures of the engine, requests by route and status, and durations of answers."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._requests = Counter("mlx_zip_http_requests", "HTTP requests", ["route", "status"], registry=self._registry)
        self._first_id = self._make_histogram(
            "first_id_seconds", "Seconds from a request to the first id of its answer"
        )
        self._total = self._make_histogram("answer_seconds", "Seconds from a request to the end of its answer")

    def _make_histogram(self, name: str, purpose: str) -> Histogram:
        return Histogram(f"mlx_zip_{name}", purpose, buckets=SECONDS, registry=self._registry)

    def observe_answer(self, done: Done) -> None:
        """Adds the times of an answer that has ended."""
        self._first_id.observe(done.counts.first_id_s)
        self._total.observe(done.counts.total_s)

    def metrics_route(self) -> Route:
        """Returns the route that shows the metrics."""

        async def metrics(request: Request) -> Response:
            """Shows figures in the text format of Prometheus."""
            return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

        metrics.answer = "text"  # for the OpenAPI document
        return Route("/metrics", metrics)

    def count_request(self, scope: Scope, status: int) -> None:
        """Counts a request. An unknown path counts as the route "other", so that clients cannot create labels."""
        found = scope.get("app")
        routes = [one for one in getattr(found, "routes", ()) if one.matches(scope)[0] is not Match.NONE]
        self._requests.labels(routes[0].path if routes else "other", str(status)).inc()


class RequestCounter:
    """Middleware that counts each request when its status is known."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on to the app, and counts it when its status is sent."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_request(scope, message["status"])
            await send(message)

        await self._app(scope, receive, sent if scope["type"] == "http" else send)


class _EngineCollector:
    """Reads the engine's figures whenever Prometheus asks for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        figures: Any = self._engine.figures()
        for one in fields(Figures):
            kind = GaugeMetricFamily if one.name in NOW else CounterMetricFamily
            purpose = f"{one.name.replace('_', ' ')}, {'now' if one.name in NOW else 'since the start'}"
            yield kind(f"mlx_zip_{one.name}", purpose.capitalize(), value=getattr(figures, one.name))
        yield GaugeMetricFamily("mlx_zip_alive", "1 while the engine can serve", value=float(self._engine.alive))
