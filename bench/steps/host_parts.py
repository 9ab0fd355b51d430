"""Times what the host does during a step, part by part, and finds where it waits, to tell a stall from a slow kernel.

The device starts each step's body (its decoder layers) before the host has read the step's id. So the host has to wait
only for the id (part "wait"). The device works meanwhile, and a slow kernel makes this wait longer. A wait in another
part is a stall: the host needs a value that the device has not computed yet. Parts are timed in whole requests; copies
of buffers are counted in a separate pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from queue import SimpleQueue
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.bench.engines.mlx_engines import ForcedIdSampler, MlxZip, wait_and_free_memory
from mlx_zip.bench.engines.shape_table import Models
from mlx_zip.bench.recording import run_in_turns
from mlx_zip.device import time_fastest_call
from mlx_zip.engine.interface import Failed, Finished, Submission
from mlx_zip.engine.mlx.generate import stream_ids
from mlx_zip.engine.mlx.mlx_engine import MlxEngine
from mlx_zip.engine.options import RunOptions, ServeOptions

from .profile import forced_run_ahead
from .tracer import PARTS, ZIP_HOOKS, Hook, Seconds, Tracer, seconds_of_parts

DELIVERED = Hook("loop", "mlx_zip.engine.request:Request", "send_emitted")
BLOCKED_SHARE, BLOCKED_S = 0.1, 50e-6  # a stall is longer than this share of a median step and this many seconds
STALLED_SHARE = 0.05  # stalls are reported if they occur in a larger share of the steps
LEAST_MS = 0.005  # parts that take less, even in slow steps, are not shown
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
WINDOWS = (1, 2, 3)  # steps between two checks; different numbers also detect copies that alternate between buffers
CHAIN = 1000  # number of tiny kernels in a chain
ROUNDS, TOKENS = 3, 64  # most timed runs of each way; base tokens per run


# ---- parts


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


def trace_engine(
    make: Callable[[], Any], models: Models, prompt: Sequence[int], tokens: int, **sampling: Any
) -> list[Seconds]:
    """Runs a request in a new engine with its scheduler; returns the tracer's clocks at each delivered id.

    make: returns the model with evaluated weights; called in the engine's thread, because streams belong to threads.
    """
    ids: SimpleQueue[Any] = SimpleQueue()
    options = ServeOptions(run=RunOptions(ahead=True))
    with MlxEngine(lambda: (make(), models.tokenizer), models.name, options) as engine:
        for _ in range(2):  # the first run is a warm-up
            with Tracer(ZIP_HOOKS, mark=DELIVERED) as tracer:
                engine.submit(Submission(prompt, tokens, sampling=sampling, keep=False), ids.put)
                while not isinstance(event := ids.get(), Finished):
                    if isinstance(event, Failed):
                        raise event.error
    return tracer.marks


# ---- a plain model


def measure_plain_model(models: Models, prompt: Sequence[int], steps: int, rounds: int) -> dict[str, Any]:
    """Times steps of the plain model in three ways, which alternate, after a warm-up round.

    The ways: mlx-lm's `generate_step`, mlx_zip's `stream_generate`, and an engine with one request ("engine"). Returns
    `step_ms`, the median step of each of `rounds` runs, and `over`, the median ratio to `generate_step`.
    """
    from mlx_lm.generate import generate_step

    from mlx_zip.engine.mlx.generate import stream_generate

    model, ids = models.plain(), list(prompt)

    def times_of(steps_of_one: Iterable[Any]) -> list[float]:
        wait_and_free_memory()
        return [time.perf_counter() for _ in steps_of_one]

    ways: dict[str, Callable[[int], list[float]]] = {
        "generate_step": lambda trial: times_of(generate_step(mx.array(ids), model, max_tokens=steps)),
        "stream_generate": lambda trial: times_of(stream_generate(model, models.tokenizer, ids, max_tokens=steps)),
        "engine": lambda trial: [mark["at"] for mark in trace_engine(models.plain, models, prompt, steps)],
    }
    runs = run_in_turns(ways, rounds)
    ms = {name: [1e3 * float(np.median(np.diff(times))) for times in found] for name, found in runs.items()}
    ratios = {name: np.divide(values, ms["generate_step"]) for name, values in ms.items() if name != "generate_step"}
    return {"step_ms": ms, "over": {name: float(np.median(values)) for name, values in ratios.items()}}


# ---- copies


def count_buffer_copies(model: Any, prompt: Sequence[int], text: Sequence[int], steps: int) -> dict[str, Any]:
    """Returns how often a request's buffers (KV caches and row tables) moved, which means that they were copied.

    prompt, text: base ids to read and to write. The buffers' addresses are compared every few steps (`WINDOWS`). A
    check waits for the device, so nothing is timed. A buffer that has grown since the last check does not count.
    windows: number of checks. moved: group of buffers -> number of checks that found a moved buffer, and moved bytes.
    """
    cache = model.make_cache()
    prompt_ids, ids = compress_prompt_and_text(cache[-1].books[0], prompt, text)
    sampler: Any = ForcedIdSampler(ids.tolist())
    count = min(steps, len(ids))
    run = RunOptions(ahead=True)
    made = islice(stream_ids(model, prompt_ids, cache, sampler=sampler, run=run), count)
    next(made)
    before, lengths, windows = buffer_places(cache), cycle(WINDOWS), 0
    found = {name: {"windows": 0, "bytes": 0} for name in before}
    left = next(lengths)
    for _ in made:
        left -= 1
        if left == 0:
            after = buffer_places(cache)
            for name, group in found.items():
                pairs = zip(before[name], after[name], strict=False)  # a table may have been added since
                moved = [now.bytes for then, now in pairs if now.shape == then.shape and now.address != then.address]
                group["windows"] += bool(moved)
                group["bytes"] += sum(moved)
            windows, before, left = windows + 1, after, next(lengths)
    return {"windows": windows, "moved": found}


class BufferPlace(NamedTuple):
    """Shape, size and address of a buffer."""

    shape: tuple[int, ...]
    bytes: int
    address: int


def buffer_places(cache: Sequence[Any]) -> dict[str, list[BufferPlace]]:
    """Returns the places of the arrays that steps write to, by group; waits until the arrays are computed."""
    state = cache[-1]
    groups = {
        "KV cache": [array for entry in cache[:-1] for array in (entry.keys, entry.values)],
        "input rows": [state.inputs.array],
        "output rows": [state.outputs.array],
    }
    return {name: [place_of_array(array) for array in arrays if array is not None] for name, arrays in groups.items()}


def place_of_array(array: mx.array) -> BufferPlace:
    """Returns an array's place. Keeps no reference: MLX would copy an array that is referenced elsewhere."""
    view: Any = memoryview(array.view(mx.uint8))  # type: ignore[arg-type]
    return BufferPlace(tuple(array.shape), array.nbytes, np.asarray(view).__array_interface__["data"][0])


# ---- the device


def time_first_id_after_rests(zipped: MlxZip, prompt: Sequence[int], rests: Sequence[float]) -> dict[str, float]:
    """Returns seconds of rest before a request -> ms to its first id. A device is slower after a rest."""
    zipped.run(prompt, 2)
    found = {}
    with forced_run_ahead(True):
        for rest in rests:
            time.sleep(rest)
            found[f"{rest:g}"] = 1e3 * zipped.run(prompt, 2).times[0]
    return found


def time_tiny_kernels() -> dict[str, float]:
    """Returns the cost in us of a tiny kernel in a chain, the host's work included.

    launch_us: cost if the whole chain is submitted at once. buffer_us: additional cost if each kernel is submitted
    alone, on Metal in its own command buffer.
    """

    def chain(length: int, alone: bool = False) -> None:
        y = mx.zeros((1,))
        for _ in range(length):
            y = y + 1
            if alone:
                mx.async_eval(y)
        mx.eval(y)

    short, long, alone = (
        time_fastest_call(partial(chain, *args)) for args in ((CHAIN // 10,), (CHAIN,), (CHAIN, True))
    )
    launch_us = 1e6 * max(0.0, long - short) / (CHAIN - CHAIN // 10)
    return {"launch_us": launch_us, "buffer_us": max(0.0, 1e6 * alone / CHAIN - launch_us)}


# ---- all measurements


def measure_host_parts(
    models: Models, prompt: Sequence[int], text: Sequence[int], forced: bool, rests: Sequence[float], limit_s: float
) -> dict[str, Any]:
    """Takes all measurements of this file, with steps as in `trace_stream_generate`; returns the figures by name.

    prompt, text: base ids to read and to write. forced: whether the text is forced while parts are timed; if not, the
    model chooses. rests: seconds of rest before first ids are timed. After limit_s / 2 seconds no further round begins.
    """
    begun, zipped = time.perf_counter(), MlxZip(models)
    marks: dict[str, list[Any]] = {"cold": [], "warm": []}
    for i in range(ROUNDS + 1):
        for rows, found in marks.items():
            if rows == "cold":
                zipped.forget_encoded_rows()
            found.append(trace_stream_generate(zipped, prompt, TOKENS, text if forced else None))
        if i and time.perf_counter() - begun > limit_s / 2:
            break
    ways = {name: summarize_parts(found[1:]) for name, found in marks.items()}
    drawn = {"temp": 1.0, "seed": 0} if forced else {}  # greedy, random weights would repeat one id
    ways["engine"] = summarize_parts([trace_engine(models.zipped or models.plain, models, prompt, TOKENS, **drawn)])
    rounds = ROUNDS if time.perf_counter() - begun < limit_s / 2 else 1
    return {
        "model": models.name,
        "ways": ways,
        "plain": measure_plain_model(models, prompt, TOKENS // 2, rounds),
        "copies": count_buffer_copies(zipped.model, prompt, text, TOKENS),
        "first_id_ms": time_first_id_after_rests(zipped, prompt, rests),
        "kernels": time_tiny_kernels(),
    }


# ---- the report


def report_lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the figures of `measure_host_parts` as (name, text) lines."""
    found = [(f"parts of a step, {name}", way_summary(way)) for name, way in figures["ways"].items()]
    plain, copied, cost = figures["plain"], figures["copies"], figures["kernels"]
    over = ", ".join(f"{name} {ratio:.2f} x" for name, ratio in plain["over"].items())
    found.append(("plain model", f"generate_step {median(plain['step_ms']['generate_step']):.2f} ms, {over}"))
    moved = ", ".join(f"{name} {one['windows']}" for name, one in copied["moved"].items())
    found.append(("buffers copied", f"{moved} times in {copied['windows']} looks"))
    rests = ", ".join(f"{seconds} s {ms:.1f} ms" for seconds, ms in figures["first_id_ms"].items())
    kernel = f"{cost['launch_us']:.1f} us, {cost['buffer_us']:.1f} us more if handed over alone"
    return [*found, ("device", f"first id after a rest of {rests}; a tiny kernel {kernel}")]


def way_summary(way: Mapping[str, Any]) -> str:
    named = [f"{one['part']} ({one['share']:.0%} of steps, {one['ms']:.2f} ms)" for one in way["stalls"]]
    parts = {"step": way["step_ms"], **{part: ms for part, ms in way["parts_ms"].items() if ms["p99"] >= LEAST_MS}}
    times = ", ".join(f"{part} " + "/".join(f"{value:.2f}" for value in one.values()) for part, one in parts.items())
    return f"stalls: {', '.join(named) or 'none'}; {'/'.join(QUANTILES)} in ms: {times}"
