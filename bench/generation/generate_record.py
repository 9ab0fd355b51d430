"""Writes and reads the records of `bench generate`, a JSON object per engine and turn; docs/bench.md explains them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from mlx_zip.bench.engines.interface import Run
from mlx_zip.bench.recording import summarize_samples
from mlx_zip.bench.records import Record, read_lines
from mlx_zip.errors import MlxZipError

SCHEMA = 1
FIGURES = {  # name: (unit, definition); one sample per trial
    "ttft_ms": ("ms", "from the request to the first emitted id, compression of the prompt included"),
    "prefill_tokens_per_s": ("base tokens/s", "base tokens of the prompt divided by the time to the first id"),
    "steps_per_s": ("steps/s", "number of steps after the first step, divided by the time since the first step"),
    "step_ms": ("ms", "median time between two steps"),
    "base_tokens_per_s": ("base tokens/s", "base tokens after the first step divided by the time since that step"),
    "base_tokens_per_step": ("base tokens", "emitted base tokens divided by steps"),
    "end_to_end_tokens_per_s": ("base tokens/s", "all emitted base tokens divided by the time of the whole request"),
    "bytes_per_s": ("bytes/s", "UTF-8 bytes of the text divided by the time of the whole request"),
    "bytes_per_token": ("bytes", "UTF-8 bytes of the text divided by base tokens"),
    "total_s": ("s", "duration of the whole request"),
    "peak_bytes": ("bytes", "most memory held at once, the engine's weights included"),
    "joules": ("J", "energy that the CPU package or the GPU used during the request"),
    "joules_per_token": ("J", "joules per emitted base token"),
    "ceiling_percent": ("%", "the figure `steps_per_s` divided by the `steps_per_s` of `ceiling`"),
}
SECTIONS = {  # fields of every record, older records included
    *("bench", "schema", "run", "time", "engine", "mode", "model", "workload", "setting", "counts", "figures"),
    *("ceiling", "energy_source", "device", "machine", "python", "versions", "commit"),
}
KEY = ("model", "workload")  # sections that identify what was measured, with mode, rows and engine


def average_step_bytes(weight_bytes: int, kv_bytes: int, run: Run) -> float:
    """Returns the bytes that an average step of a run reads: weights, keys and values, and output rows.

    weight_bytes: bytes of weights per step. kv_bytes: bytes per id in the KV cache, which holds half of the emitted ids
    on average.
    """
    return weight_bytes + kv_bytes * (run.kv_ids - sum(map(len, run.ids)) / 2) + run.row_bytes


def summarize_figures(runs: Sequence[Run], step_bytes: Sequence[float], bandwidth: float) -> dict[str, Any]:
    """Returns each of `FIGURES` with unit, median, min, max and a sample per run; None if a run lacks the figure.

    step_bytes: bytes that an average step of each run reads. bandwidth: measured bytes/s.
    """
    trials = [_trial_figures(run, bandwidth / size) for run, size in zip(runs, step_bytes, strict=True)]
    samples = {name: [trial[name] for trial in trials] for name in FIGURES}
    known = {
        name: {"unit": FIGURES[name][0], **summarize_samples(of)} for name, of in samples.items() if None not in of
    }
    return {name: known.get(name) for name in FIGURES}


def _trial_figures(run: Run, most_steps_per_s: float) -> dict[str, Any]:
    """Returns each of `FIGURES` of one run. most_steps_per_s: the upper bound that the memory bandwidth sets."""
    first, total, steps, tokens = run.times[0], run.times[-1], len(run.times), len(run.base_ids)
    later = total - first if steps > 1 else None
    between = [b - a for a, b in zip(run.times, run.times[1:], strict=False)]
    rate = (steps - 1) / later if later else None
    return {
        "ttft_ms": 1e3 * first,
        "prefill_tokens_per_s": run.prompt_tokens / first,
        "steps_per_s": rate,
        "step_ms": 1e3 * median(between) if between else None,
        "base_tokens_per_s": (tokens - run.first_base) / later if later else None,
        "base_tokens_per_step": tokens / steps,
        "end_to_end_tokens_per_s": tokens / total,
        "bytes_per_s": run.text_bytes / total,
        "bytes_per_token": run.text_bytes / tokens,
        "total_s": total,
        "peak_bytes": run.peak_bytes,
        "joules": run.joules,
        "joules_per_token": None if run.joules is None else run.joules / tokens,
        "ceiling_percent": None if rate is None else 100 * rate / most_steps_per_s,
    }


def sum_counts(runs: Sequence[Run]) -> dict[str, int]:
    """Returns counts of ids, tokens, steps and bytes, summed over runs."""
    return {
        "prompt_tokens": sum(run.prompt_tokens for run in runs),
        "prompt_ids": sum(run.prompt_ids for run in runs),
        "base_tokens": sum(len(run.base_ids) for run in runs),
        "emitted_ids": sum(len(ids) for run in runs for ids in run.ids),
        "steps": sum(len(run.times) for run in runs),
        "bytes": sum(run.text_bytes for run in runs),
        "kv_ids": sum(run.kv_ids for run in runs),
    }


def ceiling_record(step_bytes: Sequence[float], bandwidth: float) -> dict[str, float]:
    """Returns the record's section `ceiling`, to six significant digits: steps/s if a step only read its bytes.

    step_bytes, bandwidth: as in `summarize_figures`; the mean of the bytes counts.
    """
    step = mean(step_bytes)
    found = {"bandwidth_bytes_per_s": bandwidth, "step_bytes": step, "steps_per_s": bandwidth / step}
    return {name: float(f"{value:.6g}") for name, value in found.items()}


# ---- reading


def read_records(names: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Returns every record of `bench generate` in these files; records of other benches are skipped.

    Raises `MlxZipError` if there is no such record, a record is incomplete, or a line is not a record.
    """
    found = [line for name in names for line in read_lines(Path(name)) if _is_record(line, name)]
    if not found:
        raise MlxZipError(f"{', '.join(map(str, names))}: no record of `bench generate` in there")
    return found


def _is_record(line: Record, name: str | Path) -> bool:
    """Returns whether a line is a record of `bench generate`.

    Raises `MlxZipError` if the record is incomplete, or the line is not a record of any bench.
    """
    if "bench" not in line:
        raise MlxZipError(f"{name}: a line is not a record of a bench")
    if line["bench"] != "generate":
        return False
    if line.get("schema") != SCHEMA:
        raise MlxZipError(f"{name}: schema {line.get('schema')!r}, this version reads {SCHEMA}")
    if missing := [*(SECTIONS - line.keys()), *(FIGURES.keys() - line["figures"].keys())]:
        raise MlxZipError(f"{name}: a record lacks {min(missing)}")
    return True


def record_key(record: dict[str, Any], engine: bool = True) -> str:
    """Returns a text that is equal for two records of equal model, workload, mode, rows and engine.

    engine: False leaves the engine out.
    """
    named = {name: record[name] for name in (*KEY, "mode")} | {"rows": record["setting"].get("rows")}
    return json.dumps({**named, "engine": record["engine"] if engine else None}, sort_keys=True)
