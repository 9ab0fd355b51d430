"""Sends chat completions at a given rate to a server on this machine, and times the answers.

The server offers OpenAI's API: `mlx_zip serve` on any engine, `vllm serve`, `mlx_lm.server`. Requests begin at times
that are drawn beforehand and do not wait for earlier answers, so a server that is too slow builds up a queue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.bench.engines.workloads import read_requests
from mlx_zip.bench.recording import load_before_bench, print_record
from mlx_zip.errors import MlxZipError
from mlx_zip.progress import ProgressBar

from .client import CHAT, AskedServer, Reply, served_model_name, text_times

PERCENTILES = (50, 95, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench load`."""
    add = parser.add_argument
    add("--port", type=int, default=8080, help="port of this machine that the server listens on (default: 8080)")
    add("--model", help="name that the server has for its model (default: the first that it lists)")
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="R",
        help="requests per second; every rate given is measured, one after the other (default: 1)",
    )
    add("--requests", type=int, default=100, metavar="N", help="maximum number of requests per rate (default: 100)")
    add(
        "--seconds",
        type=float,
        default=300.0,
        help="time per rate after which no further request begins (default: 300)",
    )
    add(
        "--arrivals",
        choices=("poisson", "fixed"),
        default="poisson",
        help="poisson: gaps between requests are exponentially distributed; fixed: they are equal (default: poisson)",
    )
    add("--seed", type=int, default=0, help="seed of the gaps (default: 0)")
    add("--max-tokens", type=int, default=128, help="maximum number of base tokens per answer (default: 128)")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="text file with one request per line (default: 64 built-in requests for stories)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures each rate and prints one JSON line; returns 1 if a request failed, else 0.

    Raises `MlxZipError` if a flag is invalid or the server refuses the first request.
    """
    check_flags_at_least(args, 1, "requests", "max_tokens", "port")
    if not all(0 < one < math.inf for one in (*args.rates, args.seconds)):  # NaN is refused too
        raise MlxZipError("--rates and --seconds must be finite numbers above 0")
    texts = read_requests(args.prompts)
    load_before_bench()
    asked = AskedServer(args.port, args.model or asyncio.run(served_model_name(args.port)))
    warm = asyncio.run(asked.answer(f"0. {texts[0]}", args.max_tokens))
    if warm.status != 200:
        raise MlxZipError(f"the server on port {args.port} answers with status {warm.status}: {json.dumps(warm.body)}")
    rates, begun = [], 1
    for rate in args.rates:
        starts = start_times(rate, args.requests, args.seconds, args.arrivals, args.seed)
        contents = [f"{begun + i}. {text}" for i, text in enumerate(islice(cycle(texts), len(starts)))]
        begun += len(starts)
        rates.append({"rate": rate, **summarize_load(asyncio.run(send_all(asked, contents, starts, args.max_tokens)))})
        print(summary_line(rates[-1]), file=sys.stderr)
    record = {
        "bench": "load",
        "model": asked.model,
        "setting": {name: getattr(args, name) for name in ("requests", "seconds", "arrivals", "seed", "max_tokens")},
        "rates": rates,
    }
    print_record(record)
    return 1 if any(one["failed"] for one in rates) else 0


def start_times(rate: float, most: int, seconds: float, arrivals: str, seed: int) -> list[float]:
    """Returns when requests begin, in seconds after the first: at most `most` of them, all before `seconds`."""
    rng = random.Random(seed)
    gaps = (rng.expovariate(rate) if arrivals == "poisson" else 1 / rate for _ in range(most - 1))
    return [at for at in accumulate(gaps, initial=0.0) if at < seconds]


@dataclass
class Sent:
    """A sent request. late_s: seconds from the planned time to the sending. ended_s: seconds from the beginning of the
    run to the end of the request. reply: None if the answer is incomplete.
    """

    late_s: float
    ended_s: float
    reply: Reply | None


async def send_all(asked: AskedServer, contents: Sequence[str], starts: Sequence[float], max_tokens: int) -> list[Sent]:
    """Sends each of `contents` at its time in `starts` (seconds from now); returns when all requests have ended."""
    begun = time.perf_counter()

    async def send(content: str, start: float) -> Sent:
        await asyncio.sleep(start - (time.perf_counter() - begun))
        late, reply = time.perf_counter() - begun - start, None
        try:
            reply = await asked.answer(content, max_tokens)
        except MlxZipError as error:
            print(error, file=sys.stderr)
        count()
        return Sent(late, time.perf_counter() - begun, reply)

    with ProgressBar(len(contents), "request", "Asking") as count:
        return list(await asyncio.gather(*map(send, contents, starts)))


def summarize_load(sent: Sequence[Sent]) -> dict[str, Any]:
    """Returns the figures of one rate. Times are those at which pieces of streamed text reach this process.

    failed: status, or "no answer" for an incomplete answer -> number of requests. first_text_ms: from the request to
    the first piece. between_ms: between two pieces of one answer. whole_ms: from the request to the end of the answer.
    late_ms: from the planned time to the sending. base_tokens_per_s: base tokens counted by the server, divided by the
    time of the whole run.
    """
    whole = [one.reply for one in sent if one.reply is not None and one.reply.status == 200]
    failed = Counter(
        "no answer" if one.reply is None else str(one.reply.status)
        for one in sent
        if one.reply is None or one.reply.status != 200
    )
    times, seconds = [text_times(reply) for reply in whole], max(one.ended_s for one in sent)
    tokens = sum(CHAT.usage(reply)[2] for reply in whole)
    return {
        "sent": len(sent),
        "answered": len(whole),
        "failed": dict(failed),
        "seconds": round(seconds, 3),
        "answers_per_s": round(len(whole) / seconds, 4),
        "base_tokens_per_s": round(tokens / seconds, 3),
        "first_text_ms": percentiles(one[0] for one in times if one),
        "between_ms": percentiles(b - a for one in times for a, b in pairwise(one)),
        "whole_ms": percentiles(reply.seconds for reply in whole),
        "late_ms": percentiles(one.late_s for one in sent),
    }


def percentiles(seconds: Any) -> dict[str, float] | None:
    """Returns the percentiles of times in milliseconds, None if there are no times."""
    values = list(seconds)
    if not values:
        return None
    found = np.percentile(1000 * np.asarray(values), PERCENTILES)
    return {f"p{p}": round(float(value), 3) for p, value in zip(PERCENTILES, found, strict=True)}


def summary_line(figures: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        found = figures[name]
        return "none" if found is None else " / ".join(f"{value:.0f}" for value in found.values())

    failed = f", failed: {figures['failed']}" if figures["failed"] else ""
    return (
        f"{figures['rate']:g} requests/s: {figures['answered']} of {figures['sent']} answered{failed}; "
        f"{figures['answers_per_s']:.2f} answers/s, {figures['base_tokens_per_s']:.1f} base tokens/s; "
        f"first text {shown('first_text_ms')} ms, between {shown('between_ms')} ms (p50 / p95 / p99)"
    )
