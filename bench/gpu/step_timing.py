"""Times prefill and single steps of mlx_zip's engine on PyTorch at a fixed context, without the rest of a request.

Also traces a request with PyTorch's profiler.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from mlx_zip.bench.engines.cuda_engines import (
    ReplayedSteps,
    TorchEngine,
    installed_row_bytes,
    prefill_in_chunks,
    prompt_array,
)
from mlx_zip.bench.engines.device_clock import DeviceClock, wait_for_device
from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.codec import compress_next
from mlx_zip.cuda.kernels.dispatch import force_implementation
from mlx_zip.cuda.model import CudaModel

from .kernel_launches import LaunchCounts, count_step_costs


@dataclass(frozen=True)
class Plan:
    """What a trial times: the prefill of `context` base ids, then the steps that write `tokens` more.

    trials: number of timed trials. warmup: number of untimed trials before them.
    """

    context: int
    tokens: int
    trials: int
    warmup: int = 1


@dataclass
class TimedTrial:
    """Times of one prefill and of the steps after it. bytes: what an average step reads: weights, kv, rows."""

    prefill: DeviceClock
    steps: DeviceClock
    prompt_ids: int
    bytes: dict[str, int]


def time_steps(engine: TorchEngine, text: Sequence[int], plan: Plan, rows: str) -> dict[str, Any]:
    """Returns times of prefill (per trial) and of steps in ms, with all samples, and the bytes that a step reads.

    text: base ids to read and then to write. rows: "warm" keeps the rows of earlier trials, "cold" drops them.
    """
    trials = []
    for trial in range(-plan.warmup, plan.trials):
        if rows == "cold":
            engine.forget_encoded_rows()
        done = time_one_trial(engine, text[: plan.context], text[plan.context : plan.context + plan.tokens])
        if trial >= 0:
            trials.append(done)
    last = trials[-1]
    return {
        "prefill": {"ids": last.prompt_ids, **join_clocks([one.prefill for one in trials]).record()},
        "step": {
            "tokens_per_step": plan.tokens / len(last.steps.host_ms),
            **join_clocks([t.steps for t in trials]).record(),
        },
        "bytes": last.bytes,
    }


def time_one_trial(engine: TorchEngine, prompt: Sequence[int], continuation: Sequence[int]) -> TimedTrial:
    batch, device = engine.ready(len(prompt) + len(continuation) + 1), engine.model.device
    forced = compress_prompt_and_text(batch.book(0), prompt, continuation)[1]
    ids = compress_next(batch.book(0), prompt_array(prompt))
    prefill, steps = DeviceClock(device), DeviceClock(device)
    wait_for_device(device)
    prefill.lap()
    prefill_in_chunks(batch, 0, ids)
    wait_for_device(device)
    prefill.lap()
    steps.lap()
    for _ in ReplayedSteps(batch, len(continuation), forced):
        steps.lap()
    wait_for_device(device)
    kv = round(engine.kv_bytes * (len(ids) + len(forced) / 2))
    sizes = {"weights": engine.weight_bytes, "kv": kv, "rows": installed_row_bytes(batch)}
    return TimedTrial(prefill.stop(), steps.stop(), len(ids), sizes)


def join_clocks(clocks: Sequence[DeviceClock]) -> DeviceClock:
    device = [ms for clock in clocks for ms in clock.device_ms]
    return DeviceClock(clocks[0].device, device, [ms for clock in clocks for ms in clock.host_ms])


def trace_request(engine: TorchEngine, text: Sequence[int], context: int, folder: Path, name: str) -> dict[str, Any]:
    """Runs a request untraced, then traced, and writes the trace to folder/name.json.gz.

    Returns the counted launches and bytes of a warm step, and the engine's layers and weight bytes.
    """
    prompt, continuation = text[:context], text[context:]
    device = engine.model.device
    engine.run(prompt, len(continuation), continuation)  # captures graphs
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as found:
        engine.run(prompt, len(continuation), continuation)
        wait_for_device(device)
    write_compressed_trace(found, folder / f"{name}.json")
    return {
        "engine": engine.name,
        "launches": count_warm_step(engine.model).record(),
        "layers": engine.model.folder.decoder.layers,
        "weight_bytes": engine.weight_bytes,
    }


def count_warm_step(model: CudaModel) -> LaunchCounts:
    """Returns the launches of a warm step. Runs the kernels' references, because only for these are the bytes exact.

    Of a Triton kernel, all bytes of each tensor would count, although the kernel may read only some rows.
    """
    with force_implementation("reference"):
        return count_step_costs(model).warm


def write_compressed_trace(found: Any, path: Path) -> None:
    found.export_chrome_trace(str(path))
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    path.unlink()
