"""The records of `bench generate`, a JSON object per engine and turn: makes them, reads them, prints them in tables.

docs/bench.md explains the records. `bench report` reads those of any machines and days. A record is compared with the
base engine's of the same command, whose trials alternated with its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from mlx_zip.bench.engines.interface import Run
from mlx_zip.bench.recording import summarize_samples
from mlx_zip.bench.records import Record, explain_wrong_fields, libraries_cell, load_cell, read_lines, table
from mlx_zip.errors import MlxZipError

from .ratios import figure_ratio

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
BASE = "mlx-lm"  # engine that the others are compared with; if it did not run, the first of `BASES` that did
BASES = (BASE, "torch-base", "vllm-base", "hf", "hf-float32", "hf-bfloat16")
OWN_BASES = {"torch-zip": "torch-base", "vllm-zip": "vllm-base"}  # engine -> base to use instead of `BASE`, if it ran
COLUMNS = {  # heading: (figure, divisor)
    "first id, ms": ("ttft_ms", 1),
    "prefill, base tokens/s": ("prefill_tokens_per_s", 1),
    "steps/s": ("steps_per_s", 1),
    "base tokens/s": ("base_tokens_per_s", 1),
    "bytes/s": ("bytes_per_s", 1),
    "base tokens per step": ("base_tokens_per_step", 1),
    "% of ceiling": ("ceiling_percent", 1),
    "peak, MB": ("peak_bytes", 1e6),
    "J per base token": ("joules_per_token", 1),
}
SHORT_COLUMNS = ("base tokens per step", "base tokens/s", "bytes/s", "first id, ms")  # columns of `summary_table`
RATIOS = {"base tokens/s": "base_tokens_per_s", "bytes/s": "bytes_per_s"}  # heading: figure
TO_BASE = "to the base"  # end of the headings
BUSY = ("load average, idle share", "preloaded; BLAS")  # headings


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


# ---- tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench report`."""
    add = parser.add_argument
    add("records", nargs="+", metavar="RECORDS", help="files of records that `bench generate` printed")


def run(args: argparse.Namespace) -> int:
    """Prints the table. Raises `MlxZipError` if a file has no records of `bench generate`."""
    with explain_wrong_fields(", ".join(args.records)):
        print(records_table(read_records(args.records)))
    return 0


def records_table(records: Sequence[Record]) -> str:
    """Returns a table with a row per record: medians with minimum and maximum, and ratios to the base engine."""
    header = ["machine", "model", "text", "mode", "engine", *COLUMNS, *(f"{name}, {TO_BASE}" for name in RATIOS)]
    header += ["trials", *BUSY]
    rows = [
        [
            machine_name(record),
            model_name(record),
            _workload_text(record),
            _mode_and_rows(record),
            record["engine"],
            *(figure_cell(record["figures"][name], divisor) for name, divisor in COLUMNS.values()),
            *ratio_cells(record, base_record(record, records)),
            sample_count_cell(record),
            load_cell(record),
            libraries_cell(record),
        ]
        for record in records
    ]
    return table(header, rows)


def summary_table(records: Sequence[Record]) -> str:
    """Returns the table that `bench generate` prints after each text: `SHORT_COLUMNS` and ratios to the base engine."""
    heads = ["engine", "rows", *SHORT_COLUMNS, *(f"{name}, {TO_BASE}" for name in RATIOS)]
    rows = []
    for record in records:
        turn = record["workload"]["turn"]
        name = f"{record['engine']}, turn {turn + 1}" if record["workload"]["turns"] > 1 else record["engine"]
        cells = [figure_cell(record["figures"][COLUMNS[column][0]], 1) for column in SHORT_COLUMNS]
        rows.append([name, record["setting"]["rows"], *cells, *ratio_cells(record, base_record(record, records))])
    return (
        f"{_workload_text(records[0])}, {records[0]['mode']}, {sample_count_cell(records[0])}\n\n{table(heads, rows)}\n"
    )


def base_record(record: Record, records: Sequence[Record]) -> Record | None:
    """Returns the base engine's record of the same run, model and text; None if no base engine ran."""
    same_run = [
        r
        for r in records
        if r["run"] == record["run"] and record_key(r, engine=False) == record_key(record, engine=False)
    ]
    names = (
        OWN_BASES.get(record["engine"], record["engine"] if record["engine"] in OWN_BASES.values() else BASE),
        *BASES,
    )
    return next((r for name in names for r in same_run if r["engine"] == name), None)


def ratio_cells(record: Record, other: Record | None) -> list[str]:
    """Returns a record's `RATIOS` to another record; "-" for an unknown figure, no other record, or `record` itself."""
    if other is None or other is record:
        return ["-"] * len(RATIOS)
    known = {name: None not in (record["figures"][name], other["figures"][name]) for name in RATIOS.values()}
    return [str(figure_ratio((other, record), name)) if known[name] else "-" for name in RATIOS.values()]


def sample_count_cell(record: Record) -> str:
    conversations, trials = record["workload"].get("conversations", 1), record["setting"]["trials"]
    return f"{conversations} conversations x {trials}" if conversations > 1 else str(trials)


def machine_name(record: Record) -> str:
    return record["machine"] if "cpu" in record["device"]["device"] else record["device"]["chip"]


def model_name(record: Record) -> str:
    """Returns the model's name and precision, with "random" if its weights are random."""
    model = record["model"]
    bits = {"16": "16 bit", "8": "8 bit", "4": "4 bit", "as stored": ""}.get(model["precision"], model["precision"])
    return ", ".join(filter(None, [model["name"], bits, "random" if model["weights"] == "random" else ""]))


def _mode_and_rows(record: Record) -> str:
    return f"{record['mode']}, rows {record['setting']['rows']}"


def _workload_text(record: Record) -> str:
    workload = record["workload"]
    turn = f", turn {workload['turn'] + 1}" if workload["turns"] > 1 else ""
    return f"{workload['domain']} {workload['prompt_tokens']}+{workload['tokens']}{turn}"


def figure_cell(figure: Record | None, divisor: float) -> str:
    if figure is None:
        return "-"
    middle, low, high = (short_number(figure[name] / divisor) for name in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low} to {high})"


def short_number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
