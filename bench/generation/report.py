"""Prints a table of records that `bench generate` printed on any machines and days, with ratios to other records.

A record is compared with the base engine's of the same command, whose trials alternated with its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlx_zip.bench.records import explain_wrong_fields, libraries_cell, load_cell, table

from .generate_record import read_records, record_key
from .ratios import figure_ratio

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

Records = Sequence[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench report`."""
    add = parser.add_argument
    add("records", nargs="+", metavar="RECORDS", help="files of records that `bench generate` printed")


def run(args: argparse.Namespace) -> int:
    """Prints the table. Raises `MlxZipError` if a file has no records of `bench generate`."""
    with explain_wrong_fields(", ".join(args.records)):
        print(records_table(read_records(args.records)))
    return 0


def records_table(records: Records) -> str:
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


def summary_table(records: Records) -> str:
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


def base_record(record: dict[str, Any], records: Records) -> dict[str, Any] | None:
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


def ratio_cells(record: dict[str, Any], other: dict[str, Any] | None) -> list[str]:
    """Returns a record's `RATIOS` to another record; "-" for an unknown figure, no other record, or `record` itself."""
    if other is None or other is record:
        return ["-"] * len(RATIOS)
    known = {name: None not in (record["figures"][name], other["figures"][name]) for name in RATIOS.values()}
    return [str(figure_ratio((other, record), name)) if known[name] else "-" for name in RATIOS.values()]


def sample_count_cell(record: dict[str, Any]) -> str:
    conversations, trials = record["workload"].get("conversations", 1), record["setting"]["trials"]
    return f"{conversations} conversations x {trials}" if conversations > 1 else str(trials)


def machine_name(record: dict[str, Any]) -> str:
    return record["machine"] if "cpu" in record["device"]["device"] else record["device"]["chip"]


def model_name(record: dict[str, Any]) -> str:
    """Returns the model's name and precision, with "random" if its weights are random."""
    model = record["model"]
    bits = {"16": "16 bit", "8": "8 bit", "4": "4 bit", "as stored": ""}.get(model["precision"], model["precision"])
    return ", ".join(filter(None, [model["name"], bits, "random" if model["weights"] == "random" else ""]))


def _mode_and_rows(record: dict[str, Any]) -> str:
    return f"{record['mode']}, rows {record['setting']['rows']}"


def _workload_text(record: dict[str, Any]) -> str:
    workload = record["workload"]
    turn = f", turn {workload['turn'] + 1}" if workload["turns"] > 1 else ""
    return f"{workload['domain']} {workload['prompt_tokens']}+{workload['tokens']}{turn}"


def figure_cell(figure: dict[str, Any] | None, divisor: float) -> str:
    if figure is None:
        return "-"
    middle, low, high = (short_number(figure[name] / divisor) for name in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low} to {high})"


def short_number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
