"""Times prefill and single steps of mlx_zip's engine on PyTorch at a fixed context, apart from whole requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_zip.codec import compress_next
from mlx_zip.cuda.generate import read_prompt

from .cuda_engines import CHUNK, Replay, TorchEngine, installed_bytes, prompt_array
from .device_clock import Clock, wait
from .runs import zip_ids


@dataclass(frozen=True)
class Plan:
    """What is timed: `trials` times the prefill of `context` base ids and then the steps of `tokens` more.

    warmup: trials before, which do not count.
    """

    context: int
    tokens: int
    trials: int
    warmup: int = 1


@dataclass
class Trial:
    """Times of one prefill and of its steps, and what a step reads, in bytes, halfway through."""

    prefill: Clock
    steps: Clock
    prompt_ids: int
    bytes: dict[str, int]


def time_steps(engine: TorchEngine, text: Sequence[int], plan: Plan, rows: str) -> dict[str, Any]:
    """Returns times of prefill and of steps in ms, one sample per trial and per step, and the bytes of a step.

    text: base ids to read and then to emit. rows: "warm" keeps the rows of earlier trials, "cold" begins without any.
    """
    trials = []
    for trial in range(-plan.warmup, plan.trials):
        if rows == "cold":
            engine.fresh()
        done = _trial(engine, text[: plan.context], text[plan.context : plan.context + plan.tokens])
        if trial >= 0:
            trials.append(done)
    last = trials[-1]
    return {
        "prefill": {"ids": last.prompt_ids, **joined([one.prefill for one in trials]).record()},
        "step": {
            "tokens_per_step": plan.tokens / len(last.steps.host_ms),
            **joined([t.steps for t in trials]).record(),
        },
        "bytes": last.bytes,
    }


def _trial(engine: TorchEngine, prompt: Sequence[int], continuation: Sequence[int]) -> Trial:
    """Reads a prompt and emits its continuation."""
    batch, device = engine.ready(len(prompt) + len(continuation) + 1), engine.model.device
    forced = zip_ids(batch.book(0), prompt, continuation)[1]
    ids = compress_next(batch.book(0), prompt_array(prompt))
    prefill, steps = Clock(device), Clock(device)
    wait(device)
    prefill.lap()
    read_prompt(batch, 0, ids, CHUNK)
    wait(device)
    prefill.lap()
    steps.lap()
    for _ in Replay(batch, len(continuation), forced):
        steps.lap()
    wait(device)
    kv = round(engine.kv_bytes * (len(ids) + len(forced) / 2))
    sizes = {"weights": engine.weight_bytes, "kv": kv, "rows": installed_bytes(batch)}
    return Trial(prefill.stop(), steps.stop(), len(ids), sizes)


def joined(clocks: Sequence[Clock]) -> Clock:
    """Returns the times of all clocks as those of one."""
    device = [ms for clock in clocks for ms in clock.device_ms]
    return Clock(clocks[0].device, device, [ms for clock in clocks for ms in clock.host_ms])
