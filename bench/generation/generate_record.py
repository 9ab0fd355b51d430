"""Writes and reads the records of `bench generate`, a JSON object per engine and turn; docs/bench.md explains them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mlx_zip.bench.engines.interface import Run
from mlx_zip.errors import MlxZipError, failure_reason

SCHEMA = 1
FIGURES = {  # name: (unit, what it is); one sample per trial
    "ttft_ms": ("ms", "from the request to the first emitted id, compression of the prompt included"),
    "prefill_tokens_per_s": ("base tokens/s", "base tokens of the prompt over the time to the first id"),
    "steps_per_s": ("steps/s", "steps after the first, over the time since the first"),
    "step_ms": ("ms", "median time between two steps"),
    "base_tokens_per_s": ("base tokens/s", "base tokens after the first step, over the time since that step"),
    "base_tokens_per_step": ("base tokens", "emitted base tokens over steps"),
    "end_to_end_tokens_per_s": ("base tokens/s", "all emitted base tokens over the time of the whole request"),
    "bytes_per_s": ("bytes/s", "UTF-8 bytes of the text over the time of the whole request"),
    "bytes_per_token": ("bytes", "UTF-8 bytes of the text over base tokens"),
    "total_s": ("s", "the whole request"),
    "peak_bytes": ("bytes", "most memory held at once, the engine's weights included"),
    "joules": ("J", "what the machine used during the request"),
    "joules_per_token": ("J", "joules per emitted base token"),
    "ceiling_percent": ("%", "steps_per_s over the ceiling's"),
}
SECTIONS: dict[str, tuple[type, ...]] = {  # fields that every record has, with their types
    "bench": (str,),
    "schema": (int,),
    "run": (str,),
    "time": (str,),
    "engine": (str,),
    "mode": (str,),
    "model": (dict,),
    "workload": (dict,),
    "setting": (dict,),
    "counts": (dict,),
    "figures": (dict,),
    "ceiling": (dict,),
    "energy_source": (str, type(None)),
    "device": (dict,),
    "machine": (str,),
    "python": (str,),
    "versions": (dict,),
    "commit": (str, type(None)),
}
SINCE = ("load_average", "idle_share", "preloaded", "blas", "kv_dtype")  # fields that older records lack
KEY = ("model", "workload")  # sections that are equal in two measurements of one thing, with mode, rows and engine


@dataclass(frozen=True)
class Ceiling:
    """The upper bound that memory bandwidth sets: bytes that a step halfway through reads, and steps/s at that."""

    bandwidth_bytes_per_s: float
    step_bytes: float
    steps_per_s: float


def bandwidth_ceiling(bandwidth: float, weight_bytes: int, kv_bytes: int, run: Run) -> Ceiling:
    """Returns the upper bound on steps/s if a step only read weights, keys and values, and output rows from memory.

    bandwidth: measured bytes/s. weight_bytes: of a step. kv_bytes: of one id; half of the emitted ids count.
    """
    emitted = sum(map(len, run.ids))
    step = weight_bytes + kv_bytes * (run.kv_ids - emitted / 2) + run.row_bytes
    return Ceiling(bandwidth, step, bandwidth / step)


def summarize_figures(
    prompts: Sequence[int], runs: Sequence[Run], joules: Sequence[float | None], tops: Sequence[Ceiling]
) -> dict[str, Any]:
    """Returns each of `FIGURES` with unit, median, min, max and one sample per trial; None if it is unknown in a trial.

    prompts: base tokens of each trial's prompt. joules: energy of each trial. tops: the ceiling of each trial.
    """
    trials = [_trial_figures(*one) for one in zip(prompts, runs, joules, tops, strict=True)]
    return {name: summarize_samples(unit, [trial[name] for trial in trials]) for name, (unit, _) in FIGURES.items()}


def _trial_figures(prompt_tokens: int, run: Run, joules: float | None, top: Ceiling) -> dict[str, float | None]:
    first, total, steps, tokens = run.times[0], run.times[-1], len(run.times), len(run.base_ids)
    later = total - first if steps > 1 else None
    between = [b - a for a, b in zip(run.times, run.times[1:], strict=False)]
    rate = (steps - 1) / later if later else None
    return {
        "ttft_ms": 1e3 * first,
        "prefill_tokens_per_s": prompt_tokens / first,
        "steps_per_s": rate,
        "step_ms": 1e3 * median(between) if between else None,
        "base_tokens_per_s": (tokens - run.first_base) / later if later else None,
        "base_tokens_per_step": tokens / steps,
        "end_to_end_tokens_per_s": tokens / total,
        "bytes_per_s": run.text_bytes / total,
        "bytes_per_token": run.text_bytes / tokens,
        "total_s": total,
        "peak_bytes": run.peak_bytes,
        "joules": joules,
        "joules_per_token": None if joules is None else joules / tokens,
        "ceiling_percent": None if rate is None else 100 * rate / top.steps_per_s,
    }


def summarize_samples(unit: str, samples: Sequence[float | None]) -> dict[str, Any] | None:
    """Returns a figure of the record: samples with median, min and max, rounded to six digits; None if one is None."""
    known = [float(f"{sample:.6g}") for sample in samples if sample is not None]
    if len(known) < len(samples):
        return None
    return {
        "unit": unit,
        "median": float(f"{median(known):.6g}"),
        "min": min(known),
        "max": max(known),
        "samples": known,
    }


def sum_counts(prompts: Sequence[int], runs: Sequence[Run]) -> dict[str, int]:
    """Returns sums over runs of what they read and wrote. prompts: base tokens of each run's prompt."""
    return {
        "prompt_tokens": sum(prompts),
        "prompt_ids": sum(run.prompt_ids for run in runs),
        "base_tokens": sum(len(run.base_ids) for run in runs),
        "emitted_ids": sum(len(ids) for run in runs for ids in run.ids),
        "steps": sum(len(run.times) for run in runs),
        "bytes": sum(run.text_bytes for run in runs),
        "kv_ids": sum(run.kv_ids for run in runs),
    }


def ceiling_record(tops: Sequence[Ceiling]) -> dict[str, float]:
    """Returns the record's section on the trials' ceilings, for the mean bytes of a step, rounded to six digits."""
    bandwidth, step = tops[0].bandwidth_bytes_per_s, sum(top.step_bytes for top in tops) / len(tops)
    return {name: float(f"{value:.6g}") for name, value in asdict(Ceiling(bandwidth, step, bandwidth / step)).items()}


# ---- reading


def read_records(names: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Returns every record of `bench generate` in these files, without the lines of other benches.

    Raises `MlxZipError` with file and line for a line that is not a bench's record, and if no record is found.
    """
    found = []
    for name in names:
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MlxZipError(f"{name} cannot be read: {failure_reason(error)}") from error
        for number, line in enumerate(lines, 1):
            if line.strip() and (record := parse_record(line, f"{name}, line {number}")) is not None:
                found.append(record)
    if not found:
        raise MlxZipError(f"{', '.join(map(str, names))}: no record of `bench generate` in there")
    return found


def parse_record(line: str, where: str) -> dict[str, Any] | None:
    """Parses a line to a record; None for the record of another bench. where: file and line, for the message.

    Raises `MlxZipError` for a line that is not a bench's record, or a record of `bench generate` that is not complete.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MlxZipError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("bench"), str):
        raise MlxZipError(f"{where}: not a record of a bench")
    if record["bench"] != "generate":
        return None
    if record.get("schema") != SCHEMA:
        raise MlxZipError(f"{where}: schema {record.get('schema')!r}, this version reads {SCHEMA}")
    for name, kinds in SECTIONS.items():
        if not isinstance(record.get(name), kinds) or name not in record:
            raise MlxZipError(f"{where}: {name} is missing or of a wrong kind")
    if wrong := [name for name in ("load_average", "idle_share") if not _is_number(record.get(name) or 0)]:
        raise MlxZipError(f"{where}: {wrong[0]} is not a number")
    if wrong := [name for name in ("preloaded", "blas") if not _are_names(record.get(name) or [])]:
        raise MlxZipError(f"{where}: {wrong[0]} is not a list of names")
    for name in FIGURES:
        _check_figure(record["figures"].get(name, ...), f"{where}: figure {name}")
    return record


def _check_figure(figure: Any, where: str) -> None:
    if figure is None:
        return
    numbers = isinstance(figure, dict) and [figure.get(name) for name in ("median", "min", "max")]
    samples = isinstance(figure, dict) and figure.get("samples")
    if not numbers or not isinstance(samples, list) or not samples or not all(map(_is_number, [*numbers, *samples])):
        raise MlxZipError(f"{where} is not a median with its samples")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def record_key(record: dict[str, Any], engine: bool = True) -> str:
    """Returns a text that two records share if they have equal model, workload, mode, rows and engine.

    engine: False leaves the engine out.
    """
    named = {name: record[name] for name in (*KEY, "mode")} | {"rows": record["setting"].get("rows")}
    return json.dumps({**named, "engine": record["engine"] if engine else None}, sort_keys=True)
