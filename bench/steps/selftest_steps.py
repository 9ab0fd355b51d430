"""The measurements of steps in `mlx_zip selftest`: the bundled model, SmolLM2 and a 1B shape, compared with mlx-lm.

After a warm-up and one timed round, a part begins no round that would exceed the part's time limit. The parts of a step
tell a stall from a slow kernel: the device starts each step's body (its decoder layers) before the host has read the
step's id, so the host has to wait only for the id (part "wait"), and longer if a kernel is slow. A wait in another part
is a stall: the host needs a value that the device has not computed yet.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from mlx_zip import named
from mlx_zip.bench.engines.interface import Run
from mlx_zip.bench.engines.mlx_engines import MlxLm, MlxZip
from mlx_zip.bench.engines.model_making import models_from_folders, models_from_shape
from mlx_zip.bench.engines.shape_table import Models, ZipOptions
from mlx_zip.bench.engines.workloads import make_conversations, read_requests, read_tokenizer
from mlx_zip.bench.machine import mlx_read_bandwidth
from mlx_zip.device import default_device_is_gpu, host_memory_bytes

from .profile import forced_run_ahead, run_as_many_ids
from .tracer import PARTS, ZIP_HOOKS, Seconds, Tracer, seconds_of_parts

TRIALS, TOKENS = 5, 96  # most timed rounds; base tokens per run
SHAPE, PROMPT = "llama-3.2-1b", 64  # shape with random weights; base ids of its prompt
NEEDED = 6 << 30  # bytes of memory below which the shape is left out
HOST_ROUNDS, HOST_TOKENS = 3, 64  # most timed rounds of the parts of a step; base tokens per run
BLOCKED_SHARE, BLOCKED_S = 0.1, 50e-6  # a stall is longer than this share of a median step and this many seconds
STALLED_SHARE = 0.05  # stalls are reported if they occur in a larger share of the steps
LEAST_MS = 0.005  # parts that take less, even in slow steps, are not shown
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
WAYS = [(rows, ahead) for ahead in (False, True) for rows in ("cold", "warm")]  # warm: repeats the cold run


def measure_bandwidth() -> dict[str, Any]:
    """Returns how many GB per second a GPU reads in matrix-vector products, as in decoding."""
    if not default_device_is_gpu():
        return {"skipped": "MLX's products on a CPU do not reach its memory's bandwidth"}
    return {"gb_per_s": mlx_read_bandwidth() / 1e9}


def measure_bundled_model(limit_s: float) -> dict[str, Any]:
    """Returns `measure_steps` of the bundled model, which answers a built-in request; mlx-lm runs its base model."""
    models = models_from_folders("stories", "stories-base")
    return measure_steps(models, first_request(models), None, limit_s)


def first_request(models: Models) -> list[int]:
    """Returns the base ids of the first built-in request, as a chat."""
    return list(make_conversations(models.tokenizer, read_requests(None), 1, 1, TOKENS)[0].turns[0].prompt)


def measure_smollm2(limit_s: float) -> dict[str, Any]:
    """Returns `measure_steps` of SmolLM2, with its base model in mlx-lm, or why this is skipped; downloads nothing."""
    if not default_device_is_gpu():
        return {"skipped": "on a CPU a step of this size takes too long"}
    if any(named.find_made_model(name) is None for name in named.MADE):
        return {"skipped": "smollm2 and smollm2-base were not used on this machine before"}
    models = models_from_folders("smollm2", "smollm2-base")
    return measure_steps(models, first_request(models), None, limit_s)


def measure_random_shape(limit_s: float) -> dict[str, Any]:
    """Returns `measure_steps` of a 1B model with random 4-bit weights, or why it is skipped."""
    if (why := reason_to_skip_shape()) is not None:
        return {"skipped": why}
    models, prompt, text = make_shape_and_text()
    return measure_steps(models, prompt, text, limit_s)


def reason_to_skip_shape() -> str | None:
    if not default_device_is_gpu():
        return "on a CPU a step of this size takes too long"
    return None if host_memory_bytes() >= NEEDED else f"it needs a machine with {NEEDED >> 30} GB of memory"


def make_shape_and_text() -> tuple[Models, list[int], list[int]]:
    models = models_from_shape(SHAPE, "4", read_tokenizer("stories"), ZipOptions(encoder_bits=8))
    ids = synthetic_ids(PROMPT + TOKENS, len(models.tokenizer))
    return models, ids[:PROMPT], ids[PROMPT:]


def synthetic_ids(count: int, vocab_size: int) -> list[int]:
    """Returns made-up base ids, Zipf-distributed; equal at each call."""
    return (3 + np.random.default_rng(0).zipf(1.3, count) % (vocab_size - 3)).tolist()


def measure_steps(models: Models, prompt: Sequence[int], text: Sequence[int] | None, limit_s: float) -> dict[str, Any]:
    """Times the steps of mlx-lm and of mlx_zip in each of `WAYS`, alternately; returns the figures by way.

    prompt: base ids. text: base ids to write; None for the model's own choice. The first round is a warm-up. mlx-lm
    reads and writes as many ids as mlx_zip.
    """
    begun, runs = time.perf_counter(), defaultdict(list)
    plain, zipped = MlxLm(models), MlxZip(models)
    rounds = 0
    while rounds <= TRIALS and (rounds < 2 or (time.perf_counter() - begun) * (rounds + 1) / rounds < limit_s):
        for rows, ahead in WAYS:
            if rows == "cold":
                zipped.forget_encoded_rows()
            with forced_run_ahead(ahead):
                runs[rows, ahead].append(zipped.run(prompt, TOKENS, text))
        like = runs[WAYS[-1]][-1]
        runs["mlx-lm"].append(run_as_many_ids(plain, like, prompt, like.base_ids))
        rounds += 1
    timed: Any = {name: found[1:] for name, found in runs.items()}
    return {
        "model": models.name,
        "trials": rounds - 1,
        "steps": len(like.ids),
        "base_tokens_per_step": len(like.base_ids) / len(like.ids),
        "mlx-lm": speed_figures(timed["mlx-lm"]),
        "ways": [way_figures(rows, ahead, timed[rows, ahead], timed["mlx-lm"]) for rows, ahead in WAYS],
    }


def speed_figures(runs: Sequence[Run]) -> dict[str, Any]:
    steps = [1e3 * float(np.median(np.diff(run.times))) for run in runs]
    rates = [(len(run.base_ids) - run.first_base) / (run.times[-1] - run.times[0]) for run in runs]
    return {"step_ms": median(steps), "samples": steps, "base_tokens_per_s": median(rates)}


def way_figures(rows: str, ahead: bool, ours: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    found = speed_figures(ours)
    ratios = [a / b for a, b in zip(found["samples"], speed_figures(plain)["samples"], strict=True)]
    second = ours[-1].second_bodies / len(ours[-1].times) if ahead else None
    return {"rows": rows, "ahead": ahead, **found, "over_mlx_lm": median(ratios), "second_bodies": second}


def report_lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the figures of `measure_steps` as (name, text) lines; one line if it was skipped."""
    if "skipped" in figures:
        return [("steps", f"skipped: {figures['skipped']}")]
    plain, found = figures["mlx-lm"], []
    found.append(("step, mlx-lm", f"{plain['step_ms']:.2f} ms, {plain['base_tokens_per_s']:.0f} base tokens/s"))
    for way in figures["ways"]:
        name = f"step, {way['rows']}, {'ahead' if way['ahead'] else 'not ahead'}"
        text = f"{way['step_ms']:.2f} ms, {way['over_mlx_lm']:.2f} x mlx-lm's, "
        text += f"{way['base_tokens_per_s']:.0f} base tokens/s"
        found.append((name, text + (f", second bodies {way['second_bodies']:.1%}" if way["ahead"] else "")))
    found.append(("base tokens per step", f"{figures['base_tokens_per_step']:.2f} in {figures['steps']} steps"))
    return found


# ---- the parts of a step, and where the host waits


def measure_host_parts(limit_s: float) -> dict[str, Any]:
    """Times the parts of a step, with cold and with warm rows; returns the figures of each.

    The 1B shape writes given ids; if it is skipped, the bundled model writes its own. After limit_s seconds no further
    round begins.
    """
    begun = time.perf_counter()
    if reason_to_skip_shape() is None:
        models, prompt, text = make_shape_and_text()
    else:
        models, text = models_from_folders("stories", "stories-base"), None
        prompt = first_request(models)
    zipped = MlxZip(models)
    marks: dict[str, list[Any]] = {"cold": [], "warm": []}
    for i in range(HOST_ROUNDS + 1):
        for rows, found in marks.items():
            if rows == "cold":
                zipped.forget_encoded_rows()
            found.append(trace_stream_generate(zipped, prompt, HOST_TOKENS, text))
        if i and time.perf_counter() - begun > limit_s:
            break
    return {"model": models.name, "ways": {name: summarize_parts(found[1:]) for name, found in marks.items()}}


def trace_stream_generate(
    zipped: MlxZip, prompt: Sequence[int], tokens: int, text: Sequence[int] | None
) -> list[Seconds]:
    """Runs a request in `stream_generate` and returns the tracer's clocks at each emitted id: seconds so far by part.

    Each step's body (its decoder layers) starts on the device before the host has read the step's id. text: base
    ids to emit instead of the model's choices, None to let the model choose.
    """
    with forced_run_ahead(True), Tracer(ZIP_HOOKS) as tracer:
        zipped.run(prompt, tokens, text)
    return tracer.marks


def summarize_parts(runs: Iterable[Sequence[Seconds]]) -> dict[str, Any]:
    """Returns the figures of all steps: `step_ms` and `parts_ms` (p50, p90, p99), `stalls`, and all samples.

    runs: the tracer's marks of each run. samples_us: wall time of each part in each step. cpu_us: the thread's
    processor time during that wall time; otherwise the thread waited.
    """
    steps = [step for marks in runs for step in seconds_of_parts(marks)]
    whole = [sum(wall.values()) for wall, _ in steps]
    wall, cpu = ({part: [step[i][part] for step in steps] for part in PARTS} for i in (0, 1))
    return {
        "steps": len(steps),
        "step_ms": quantiles_ms(whole),
        "parts_ms": {part: quantiles_ms(values) for part, values in wall.items()},
        "stalls": find_stalls(wall, cpu),
        "samples_us": {part: rounded_us(values) for part, values in wall.items()},
        "cpu_us": {part: rounded_us(values) for part, values in cpu.items()},
    }


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {name: float(f"{1e3 * np.quantile(seconds, share):.4g}") for name, share in QUANTILES.items()}


def rounded_us(seconds: Iterable[float]) -> list[float]:
    return [round(1e6 * value, 1) for value in seconds]


def find_stalls(wall: Mapping[str, Sequence[float]], cpu: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Returns the parts other than "wait" in which the host waits, ordered by total wait, longest first.

    wall, cpu: part -> wall seconds and processor seconds of the part in each step; their difference is the wait. share:
    share of the steps that stall in the part. ms: the median wait of these steps.
    """
    step_s = median(map(sum, zip(*wall.values(), strict=True)))
    found = []
    for part in wall:
        waits = [a - b for a, b in zip(wall[part], cpu[part], strict=True)]
        long = [wait for wait in waits if wait > max(BLOCKED_S, BLOCKED_SHARE * step_s)]
        if part != "wait" and len(long) > STALLED_SHARE * len(waits):
            found.append({"part": part, "share": len(long) / len(waits), "ms": 1e3 * median(long), "all": sum(long)})
    found.sort(key=lambda one: -one.pop("all"))
    return found


def host_report_lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the figures of `measure_host_parts` as (name, text) lines."""
    return [(f"parts of a step, {name}", way_summary(way)) for name, way in figures["ways"].items()]


def way_summary(way: Mapping[str, Any]) -> str:
    named = [f"{one['part']} ({one['share']:.0%} of steps, {one['ms']:.2f} ms)" for one in way["stalls"]]
    parts = {"step": way["step_ms"], **{part: ms for part, ms in way["parts_ms"].items() if ms["p99"] >= LEAST_MS}}
    times = ", ".join(f"{part} " + "/".join(f"{value:.2f}" for value in one.values()) for part, one in parts.items())
    return f"stalls: {', '.join(named) or 'none'}; {'/'.join(QUANTILES)} in ms: {times}"
