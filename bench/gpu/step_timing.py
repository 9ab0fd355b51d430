"""Times prefill and single steps of mlx_zip's engine on PyTorch at a fixed context, without the rest of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_zip.bench.engines.cuda_engines import (
    ReplayedSteps,
    TorchEngine,
    installed_row_bytes,
    prefill_in_chunks,
)
from mlx_zip.bench.engines.device_clock import DeviceClock, wait_for_device
from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.codec import compress_next
from mlx_zip.codec.ids import as_ids


def time_steps(
    engine: TorchEngine, text: Sequence[int], context: int, tokens: int, trials: int, rows: str
) -> dict[str, Any]:
    """Returns times of prefill (per trial) and of steps in ms, with all samples, and the bytes that a step reads.

    text: base ids, of which a trial reads `context` and writes `tokens` more. The first trial is a warm-up. rows:
    "warm" keeps the rows of earlier trials, "cold" drops them.
    """
    prompt, continuation = text[:context], text[context : context + tokens]
    for trial in range(-1, trials):
        if rows == "cold":
            engine.forget_encoded_rows()
        if trial <= 0:  # the clocks of the warm-up are dropped
            prefill, steps = DeviceClock(engine.model.device), DeviceClock(engine.model.device)
        prompt_ids, sizes = time_one_trial(engine, prompt, continuation, prefill, steps)
    return {
        "prefill": {"ids": prompt_ids, **prefill.record()},
        "step": {"tokens_per_step": tokens * trials / len(steps.host_ms), **steps.record()},
        "bytes": sizes,
    }


def time_one_trial(
    engine: TorchEngine,
    prompt: Sequence[int],
    continuation: Sequence[int],
    prefill: DeviceClock,
    steps: DeviceClock,
) -> tuple[int, dict[str, int]]:
    """Adds the times of a prefill and of its steps to the clocks.

    Returns the number of the prompt's ids, and the bytes that an average step reads: weights, kv, rows.
    """
    batch, device = engine.ready(len(prompt) + len(continuation) + 1), engine.model.device
    forced = compress_prompt_and_text(batch.book(0), prompt, continuation)[1]
    ids = compress_next(batch.book(0), as_ids(prompt))
    wait_for_device(device)
    prefill.lap()
    prefill_in_chunks(batch, 0, ids)
    wait_for_device(device)
    prefill.lap()
    steps.lap()
    for _ in ReplayedSteps(batch, len(continuation), forced):
        steps.lap()
    prefill.stop()
    steps.stop()
    kv = round(engine.kv_bytes * (len(ids) + len(forced) / 2))
    return len(ids), {"weights": engine.weight_bytes, "kv": kv, "rows": installed_row_bytes(batch)}
