"""Sends `mlx_zip serve` thousands of requests, many at a time; checks answers, memory growth, and that nothing remains.

A share of the requests is cancelled and a share is malformed. The others are greedy, and each answer must equal what
`generate` returns for the same conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.bench.engines.workloads import REQUESTS
from mlx_zip.bench.recording import load_before_bench, print_record
from mlx_zip.engine.mlx.generate import generate
from mlx_zip.errors import MlxZipError
from mlx_zip.models.loading import load
from mlx_zip.progress import ProgressBar

from .client import DIALECTS, Dialect, send_request, served_model_name
from .server_process import ServerProcess, serve_command

MALFORMED: tuple[Any, ...] = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"messages": NaN}',
    [],
    {},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": -5},
    {"messages": [{"role": "user", "content": "x"}], "unknown_field": 1},
    {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"},
)
LENGTHS = (4, 12, 24, 48)  # maximum base tokens of an answer
KINDS = ("answer", "status", "hung", "running", "waiting", "sessions", "growth")  # kinds of faults
NO_MEMORY = "memory was not compared: that takes 1,000 requests, and a system with /proc"
MEASURED_EVERY = 50  # requests between two measurements of resident memory
MOST_GROWTH = 0.05  # largest growth of resident memory from a quarter of the requests to the end
QUIET_S = 10.0  # most seconds until the server has ended all requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench soak`."""
    add = parser.add_argument
    add("--model", default="stories", help="chat model to serve: folder, hub id or bundled model (default: stories)")
    add("--requests", type=int, default=2000, metavar="N", help="number of requests (default: 2000)")
    add("--at-once", type=int, default=12, metavar="N", help="number of requests under way at a time (default: 12)")
    add("--conversations", type=int, default=24, metavar="N", help="different conversations (default: 24)")
    add("--cancelled", type=float, default=0.10, help="share of requests that are left early (default: 0.10)")
    add("--malformed", type=float, default=0.05, help="share of malformed requests (default: 0.05)")
    add("--seed", type=int, default=0, help="seed of the mixture (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Sends all requests and prints one JSON line; returns 1 on a fault. Raises `MlxZipError` if a flag is invalid."""
    check_flags_at_least(args, 1, "requests", "at_once", "conversations")
    load_before_bench()
    expected = expected_answers(args.model, args.conversations)
    with TemporaryDirectory() as folder, ServerProcess(serve_command(args.model, Path(folder) / "sessions")) as server:
        found = asyncio.run(SoakRun(server, expected, args).run())
    names = ("requests", "at_once", "conversations", "cancelled", "malformed", "seed")
    setting = {name: getattr(args, name) for name in names}
    print_record({"bench": "soak", "model": {"zip": args.model}, "setting": setting, **found})
    wrong = {name: count for name, count in found["wrong"].items() if count}
    print(f"{args.requests} requests: {wrong or 'nothing wrong'}; {found['memory'] or NO_MEMORY}", file=sys.stderr)
    return 1 if wrong else 0


def expected_answers(model: str, count: int) -> list[tuple[list[dict[str, str]], dict[int, str]]]:
    loaded, tokenizer = load(model)
    found = []
    for i, content in enumerate(REQUESTS[:count]):
        messages = [{"role": "user", "content": content}]
        if i % 2:
            first = generate(loaded, tokenizer, messages, max_tokens=24)
            messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Tell me more."}]
        texts = {n: generate(loaded, tokenizer, messages, max_tokens=n) for n in LENGTHS}
        found.append((messages, texts))
    return found


@dataclass
class SoakRun:
    """One run against a server. wrong: kind of fault -> count.

    resident: resident bytes after every `MEASURED_EVERY` requests.
    kept: the server's session metrics at the end, before sessions are purged.
    """

    server: ServerProcess
    expected: Sequence[tuple[list[dict[str, str]], Mapping[int, str]]]
    args: argparse.Namespace
    wrong: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    resident: list[int] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    kept: dict[str, float] = field(default_factory=dict)

    async def run(self) -> dict[str, Any]:
        """Sends all requests and returns counts, faults and memory growth."""
        self.model = await served_model_name(self.server.port)
        self.rng = random.Random(self.args.seed)
        kinds = self.rng.choices(
            ("malformed", "cancelled", "whole"),
            (self.args.malformed, self.args.cancelled, 1 - self.args.malformed - self.args.cancelled),
            k=self.args.requests,
        )
        left = iter(kinds)
        with ProgressBar(self.args.requests, "request", "Asking") as self.count:
            await asyncio.gather(*(self._send_requests(left) for _ in range(self.args.at_once)))
        await self._check_end()
        return {
            "done": dict(self.done),
            "wrong": {name: self.wrong[name] for name in KINDS},
            "examples": self.examples[:5],
            "memory": self._memory_growth(),
            "kept": self.kept,
        }

    async def _send_requests(self, left: Any) -> None:
        for kind in left:
            try:
                await getattr(self, f"_{kind}")()
            except MlxZipError as error:
                self._count_fault("hung", str(error))
            self.done[kind] += 1
            self.count()
            if sum(self.done.values()) % MEASURED_EVERY == 0 and (size := self.server.resident_bytes()) is not None:
                self.resident.append(size)

    def _choose_request(self, stream: bool) -> tuple[Dialect, dict[str, Any], str]:
        dialect, n = self.rng.choice(DIALECTS), self.rng.choice(LENGTHS)
        messages, texts = self.rng.choice(self.expected)
        return dialect, dialect.body(messages, n, stream) | {"model": self.model}, texts[n]

    async def _whole(self) -> None:
        dialect, body, expected = self._choose_request(self.rng.random() < 0.5)
        reply = await send_request(self.server.port, dialect.path, body)
        if reply.status != 200:
            self._count_fault("status", f"{dialect.name}: {reply.status} {reply.body}")
        elif (text := dialect.text(reply)) != expected:
            self._count_fault("answer", f"{dialect.name}: {text!r} is not {expected!r}")

    async def _cancelled(self) -> None:
        """Sends a request and disconnects: from a stream after one to three events, else after at most 0.1 s."""
        stream = self.rng.random() < 0.5
        dialect, body, _ = self._choose_request(stream)
        if stream:
            await send_request(self.server.port, dialect.path, body, leave_after=self.rng.randint(1, 3))
            return
        asking = asyncio.create_task(send_request(self.server.port, dialect.path, body))
        await asyncio.wait([asking], timeout=self.rng.random() / 10)
        asking.cancel()
        await asyncio.wait([asking])

    async def _malformed(self) -> None:
        """Sends a malformed body; the answer must be a JSON error with a status from 400 to 499."""
        dialect, body = self.rng.choice(DIALECTS), self.rng.choice(MALFORMED)
        reply = await send_request(self.server.port, dialect.path, body)
        if not 400 <= reply.status < 500 or not isinstance(reply.body, dict) or "error" not in reply.body:
            self._count_fault("status", f"{dialect.name}, malformed {str(body)[:60]}: {reply.status} {reply.body}")

    def _count_fault(self, kind: str, example: str) -> None:
        self.wrong[kind] += 1
        self.examples.append(f"{kind}: {example:.300}")

    async def _check_end(self) -> None:
        until = time.monotonic() + QUIET_S
        while (
            any((under_way := await self._server_metrics("running", "waiting")).values()) and time.monotonic() < until
        ):
            await asyncio.sleep(0.1)
        for name, count in under_way.items():
            self.wrong[name] += int(count)
        memory = self._memory_growth()
        if memory and memory["growth"] > MOST_GROWTH:
            self._count_fault("growth", f"memory grew by {memory['growth']:.1%}")
        self.kept = await self._server_metrics("sessions", "session_bytes", "disk_bytes")
        await send_request(self.server.port, "/v1/mlx_zip/sessions", method="DELETE")
        left = await self._server_metrics("sessions", "session_bytes", "disk_bytes")
        if any(left.values()):
            self._count_fault("sessions", f"after a purge: {left}")

    async def _server_metrics(self, *names: str) -> dict[str, float]:
        page = (await send_request(self.server.port, "/metrics")).body
        found = dict(re.findall(r"^mlx_zip_(\w+) ([0-9.e+]+)$", page, re.MULTILINE))
        return {name: float(found[name]) for name in names}

    def _memory_growth(self) -> dict[str, Any]:
        if len(self.resident) < 20:
            return {}
        quarter = len(self.resident) // 4
        warm, end = (sorted(part)[2] for part in (self.resident[quarter : quarter + 5], self.resident[-5:]))
        return {"warm_mb": round(warm / 1e6, 1), "end_mb": round(end / 1e6, 1), "growth": round(end / warm - 1, 4)}
