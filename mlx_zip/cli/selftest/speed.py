"""Measures speed: rough figures to compare machines by, and step times of three models relative to mlx-lm's."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from mlx_zip.cli.selftest.checks import Check, run_check
from mlx_zip.device import TF32_VARIABLE

PLAIN = "llama_transformer_tied_lora"  # a recorded checkpoint with a plain mlx-lm model of the same size as its base
TRIALS = 7
TOTAL_S, STORIES_S, SMOLLM2_S, SHAPE_S = (
    110.0,
    30.0,
    20.0,
    40.0,
)  # limits of the whole command and of its long parts, in seconds
HOST_S = 40.0  # limit for timing the host's work in a step, on top of TOTAL_S
AT_LEAST_S = 10.0  # a long part is left out when less time is left


def measure_rough_speeds(golden: Path, folder: Path) -> list[Check]:
    """Measures rough speeds to compare machines by; each is the median of a few trials.

    golden: the recorded checkpoints. folder: the models that `check_models` converted.
    """
    plain, zipped = golden / "models" / PLAIN / "base", folder / PLAIN
    checks = [
        run_check("codec: compress 2,048 ids", _measure_compress_speed),
        run_check("codec: push one id", _measure_push_speed),
        run_check("memory: read and write 64 MB", _measure_bandwidth),
        run_check("TF32 in float32 products", lambda: (None, _describe_tf32())),
        run_check("step, plain tiny model", lambda: (None, _measure_step_time(plain))),
    ]
    return [*checks, run_check("step, same model with hypertokens", lambda: (None, _measure_step_time(zipped)))]


def _time_trials(work: Callable[[], Any]) -> list[float]:
    work()  # warm-up
    times = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return times


def _synthetic_ids(count: int) -> Any:
    import numpy as np

    return (np.random.default_rng(0).zipf(1.3, count) % 32000).astype(np.uint32)


def _measure_compress_speed() -> tuple[None, str]:
    from mlx_zip.codec import CodecParams, compress

    params, ids = CodecParams(32000, 2048, 3), _synthetic_ids(2048)
    compress_s = statistics.median(_time_trials(lambda: compress(params, ids)))
    return None, f"{len(ids) / compress_s / 1e6:.1f} M ids/s (synthetic ids)"


def _measure_push_speed() -> tuple[None, str]:
    from mlx_zip.codec import Codebook, CodecParams

    book, times = Codebook(CodecParams(32000, 2048, 3)), []
    for one in _synthetic_ids(4000).tolist():
        begun = time.perf_counter()
        book.push(one)
        times.append(time.perf_counter() - begun)
    return None, f"{statistics.median(times) * 1e6:.2f} microseconds"


def _measure_bandwidth() -> tuple[None, str]:
    """Measures the memory bandwidth: bytes read and written per second when a number is added to a 64 MB array."""
    from mlx_zip.device import make_memory_workload

    work, count = make_memory_workload()
    return None, f"{count / statistics.median(_time_trials(work)) / 1e9:.1f} GB/s"


def _measure_step_time(folder: Path) -> str:
    """Returns the median time per step when the model in `folder` continues 32 ids, as text."""
    from mlx_zip.engine.mlx.generate import load, stream_generate

    model, tokenizer = load(folder)
    times = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        last = list(stream_generate(model, tokenizer, list(range(10, 42)), max_tokens=64))[-1]
        times.append((time.perf_counter() - begun) / last.steps)
    return f"{statistics.median(times) * 1e3:.2f} ms per step, prefill of 32 ids included ({last.steps} steps)"


# ---- steps


def measure_steps(ends: float, data: dict[str, Any]) -> list[Check]:
    """Measures step times of three models relative to mlx-lm's, bandwidth, host work per step and machine state.

    ends: value of `time.monotonic()` at which the command should end. data: all figures are added to it, by part.
    """
    bench, state = (
        import_module("mlx_zip.bench.steps.selftest_steps"),
        import_module("mlx_zip.bench.machine").power_and_thermal_state,
    )
    data["state_before"] = state()
    parts = [
        _check_bandwidth(bench, data),
        *_check_steps("stories", bench.measure_bundled_model, bench.report_lines, _seconds_left(ends, STORIES_S), data),
        *_check_steps("smollm2", bench.measure_smollm2, bench.report_lines, _seconds_left(ends, SMOLLM2_S), data),
        *_check_steps("1B, 4 bit", bench.measure_random_shape, bench.report_lines, _seconds_left(ends, SHAPE_S), data),
        *_check_steps("host", bench.measure_host_parts, bench.host_report_lines, HOST_S, data),
    ]
    data["state_after"] = state()
    data["surroundings"] = import_module("mlx_zip.bench.recording").environment_fields()
    reported = "; ".join(f"{name}: {text[:200]}" for name, text in data["state_after"].items())
    return [*parts, Check("machine", None, reported)]


def _seconds_left(ends: float, most_s: float) -> float:
    return min(most_s, ends - time.monotonic())


def _check_bandwidth(bench: Any, data: dict[str, Any]) -> Check:
    def measured() -> tuple[None, str]:
        found = data["bandwidth"] = bench.measure_bandwidth()
        return None, f"skipped: {found['skipped']}" if "skipped" in found else f"{found['gb_per_s']:.1f} GB/s"

    return run_check("memory: read in matrix-vector products", measured)


def _check_steps(
    name: str,
    measure: Callable[[float], Any],
    lines: Callable[[Any], Any],
    limit_s: float,
    data: dict[str, Any],
) -> list[Check]:
    """Returns a `Check` per figure of one model's steps; a single one if the measurement is left out or fails.

    measure: called with the limit in seconds. lines: makes (name, text) pairs from what `measure` returns.
    """

    def measured() -> tuple[None, str]:
        data[name] = measure(limit_s)
        return None, ""

    if limit_s < AT_LEAST_S:
        data[name] = {"skipped": f"the limit of {TOTAL_S:.0f} seconds is nearly reached"}
    elif (tried := run_check(f"{name}: steps", measured)).passed is False:
        return [tried]
    return [Check(f"{name}: {what}", None, text) for what, text in lines(data[name])]


# ---- what TF32 changes: measured in processes of their own, because MLX reads the variable once per process

_SURELY_TF32 = 2e-5  # the error below is about 1e-6 with float32 and about 2e-4 with TF32
_PRODUCT_S = 60  # limit of one process
_PRODUCT = """
import mlx.core as mx
import numpy as np

draw = np.random.default_rng(0)
a, b = draw.standard_normal((128, 512)), draw.standard_normal((512, 512))
a, b = a.astype(np.float32), b.astype(np.float32)
exact = a.astype(np.float64) @ b.astype(np.float64)
print(np.abs(np.array(mx.array(a) @ mx.array(b)) - exact).max() / np.abs(exact).max())
"""


def _describe_tf32() -> str:
    """Returns whether MLX uses TF32 by default on this machine, and the errors with and without it, as text."""
    default, full = _matmul_error(None), _matmul_error("0")
    state = "on" if default > _SURELY_TF32 else "off"
    return f"{state} by default; relative error of a float32 product {default:.0e}, with {TF32_VARIABLE}=0 {full:.0e}"


def _matmul_error(tf32: str | None) -> float:
    """Returns the largest error of a float32 product [128, 512] @ [512, 512], relative to its largest element.

    The product is computed on MLX's default device. tf32: value of MLX_ENABLE_TF32 in the process; None for MLX's
    default. Raises `RuntimeError` if that process fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != TF32_VARIABLE}
    if tf32 is not None:
        environment[TF32_VARIABLE] = tf32
    command = [sys.executable, "-c", _PRODUCT]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=_PRODUCT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"a float32 product could not be computed in another process: {error}") from error
    return float(done.stdout)
