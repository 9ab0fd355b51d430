"""Measures what refusing a prompt of megabytes costs a server, and how much it delays other requests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mlx_zip.errors import MlxZipError
from mlx_zip.progress import ProgressBar

from .dialects import CHAT
from .http_client import ask
from .record import summary
from .served import Served

HUGE_BYTES, LARGE_BYTES, AT_ONCE = 30 << 20, 4 << 20, 4  # of one prompt, and of prompts that come together
WORDS = "Once upon a time there was a boat that wanted to see the sea. "
SMALL = "Tell me a story about a frog."


def huge_prompts(server: Served, model: str, trials: int) -> dict[str, Any]:
    """Returns the time to refuse a huge prompt, the growth of memory, and the delay of a small chat by large prompts.

    refused_ms: from the first byte sent to the last byte of the answer. growth_bytes: growth of resident memory over
    all trials, None where the system has no /proc. delay_ms: time of a small chat sent together with large prompts,
    minus its time alone. The first trial is a warm-up.
    """
    refused, delays = [], []
    huge, large = _body(model, HUGE_BYTES), _body(model, LARGE_BYTES)
    before = after = server.resident_bytes()
    with ProgressBar(trials + 1, "run", "Huge prompts") as count:
        for trial in range(-1, trials):
            refused_s = asyncio.run(_refused(server.port, huge))
            alone_s = asyncio.run(_small(server.port, model, None))
            loaded_s = asyncio.run(_small(server.port, model, large))
            if trial < 0:
                before = server.resident_bytes()
            else:
                refused.append(1000 * refused_s)
                delays.append(1000 * (loaded_s - alone_s))
            after = server.resident_bytes()
            count()
    growth = None if before is None or after is None else after - before
    return {"refused_ms": summary(refused), "growth_bytes": growth, "delay_ms": summary(delays)}


def _body(model: str, size: int) -> bytes:
    """Returns the body of a request for a chat with a prompt of so many bytes."""
    text = (WORDS * (size // len(WORDS) + 1))[:size]
    return f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{text}"}}]}}'.encode()


async def _refused(port: int, body: bytes) -> float:
    """Returns the seconds until a prompt is refused. Raises `MlxZipError` if it is answered otherwise."""
    reply = await ask(port, CHAT.path, body)
    if reply.status != 400 or reply.body["error"]["code"] != "context_length_exceeded":
        raise MlxZipError(f"a prompt of {len(body)} bytes was answered with status {reply.status}, not refused")
    return reply.seconds


async def _small(port: int, model: str, load: bytes | None) -> float:
    """Returns the seconds of a small chat. load: body of large requests that begin right before it, None for none."""
    others = [asyncio.ensure_future(_refused(port, load)) for _ in range(AT_ONCE)] if load else []
    await asyncio.sleep(0)  # lets them begin
    body = CHAT.body([{"role": "user", "content": SMALL}], 16, False) | {"model": model}
    begun = time.perf_counter()
    await ask(port, CHAT.path, body)
    seconds = time.perf_counter() - begun
    await asyncio.gather(*others)
    return seconds
