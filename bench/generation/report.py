"""Prints tables of records that `bench generate` printed on any machines and days.

`--table 6` prints the zip2zip paper's table 6: base tokens/s of prefill and of decoding by length of the prompt, each
engine compared with the base engine on the same machine.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_zip.bench.engines.interface import ENGINES
from mlx_zip.bench.records import libraries_cell, load_cell, table

from .generate_record import read_records, record_key, refuse_wrong_fields
from .ratios import figure_ratio

BASE = "mlx-lm"  # engine that the others are compared with; if it did not run, the first of `BASES` that did
BASES = (BASE, "torch-base", "vllm-base", "hf-compiled", "hf", "hf-float32", "hf-bfloat16")
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
RATIOS = {  # heading: figure, divided by the base engine's
    "base tokens/s, to the base": "base_tokens_per_s",
    "bytes/s, to the base": "bytes_per_s",
}
BUSY = ("load average, idle share", "preloaded; BLAS")  # headings
PAPER = {  # arXiv 2506.01084, table 6: setting -> method -> prefill and decoding speed at each of `PAPER_SIZES`
    "Apple M1, Phi-3-4B (paper)": {
        "base": (165.0, 7.3, 211.3, 7.5, 200.9, 7.1, 196.6, 6.8),
        "zip2zip": (145.5, 7.9, 231.4, 10.1, 189.6, 7.4, 233.8, 7.3),
    },
    "H100 80GB, Phi-3.5-4B (paper)": {
        "base": (700.9, 56.2, 1347.2, 54.4, 2689.4, 52.8, 4993.2, 53.1),
        "zip2zip": (936.6, 61.4, 2722.1, 79.8, 4326.7, 61.5, 9258.1, 61.9),
    },
    "H100 80GB, Phi-3-14B (paper)": {
        "base": (724.4, 44.6, 1356.3, 43.8, 2328.6, 45.1, 3849.5, 42.2),
        "zip2zip": (1024.6, 54.9, 1973.0, 61.1, 3657.0, 66.8, 7239.1, 46.3),
    },
}
PAPER_SIZES = tuple((prompt, 256) for prompt in (256, 512, 1024, 2048))

Size = tuple[int, int]
Records = Sequence[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench report`."""
    add = parser.add_argument
    add("records", nargs="+", metavar="RECORDS", help="files of records that `bench generate` printed")
    add(
        "--table",
        choices=("all", "6"),
        default="all",
        help="all: one row per record; 6: speed by prompt length, as table 6 of the zip2zip paper (default: all)",
    )
    add("--paper", action="store_true", help="add the zip2zip paper's own figures to --table 6")


def run(args: argparse.Namespace) -> int:
    """Prints the table. Raises `MlxZipError` if the files have no records of `bench generate`."""
    with refuse_wrong_fields(args.records):
        records = read_records(args.records)
        print(table6(records, args.paper) if args.table == "6" else records_table(records))
    return 0


# ---- every record


def records_table(records: Records) -> str:
    """Returns a table with a row per record: medians with minimum and maximum, and ratios to the base engine."""
    header = ["machine", "model", "text", "mode", "engine", *COLUMNS, *RATIOS, "trials", *BUSY]
    rows = [
        [
            machine_name(record),
            model_name(record),
            _workload_text(record),
            _mode_and_rows(record),
            record["engine"],
            *(figure_cell(record["figures"][name], divisor) for name, divisor in COLUMNS.values()),
            *ratios_to_base_engine(record, records),
            sample_count_cell(record),
            load_cell(record),
            libraries_cell(record),
        ]
        for record in records
    ]
    return table(header, rows)


def summary_table(records: Records) -> str:
    """Returns the table that `bench generate` prints after each text: `SHORT_COLUMNS` and ratios to the base engine."""
    heads = ["engine", "rows", *SHORT_COLUMNS, *RATIOS]
    rows = []
    for record in records:
        turn = record["workload"]["turn"]
        name = f"{record['engine']}, turn {turn + 1}" if record["workload"]["turns"] > 1 else record["engine"]
        cells = [figure_cell(record["figures"][COLUMNS[column][0]], 1) for column in SHORT_COLUMNS]
        rows.append([name, record["setting"]["rows"], *cells, *ratios_to_base_engine(record, records)])
    return (
        f"{_workload_text(records[0])}, {records[0]['mode']}, {sample_count_cell(records[0])}\n\n{table(heads, rows)}\n"
    )


def ratios_to_base_engine(record: dict[str, Any], records: Records) -> list[str]:
    """Returns a record's `RATIOS` to the base engine of the same run, as cells.

    A cell is "-" if `record` is the base engine's, if no base engine ran, or if a figure is unknown.
    """
    same_run = [
        r
        for r in records
        if r["run"] == record["run"] and record_key(r, engine=False) == record_key(record, engine=False)
    ]
    names = (
        OWN_BASES.get(record["engine"], record["engine"] if record["engine"] in OWN_BASES.values() else BASE),
        *BASES,
    )
    base = next((r for name in names for r in same_run if r["engine"] == name), record)
    shown = []
    for name in RATIOS.values():
        figures = [one["figures"][name] for one in (base, record)]
        shown.append("-" if base is record or None in figures else str(figure_ratio((base, record), name)))
    return shown


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


# ---- table 6


def table6(records: Records, paper: bool = False) -> str:
    """Returns the paper's table 6 for these records: base tokens/s of prefill and decoding, by size.

    Each engine has a row, and a second row with its difference from the base engine. Domains and windows are pooled.
    paper: whether to add the paper's own figures.
    """
    sizes = sorted({*map(workload_size, records), *(PAPER_SIZES if paper else ())})
    header = ["setting", "method", *(f"{p}+{g} {what}" for p, g in sizes for what in ("prefill", "decode"))]
    rows = []
    for name, methods in group_by_setting(records).items():
        rates = {
            engine: {size: prefill_and_decoding_rate(found) for size, found in of.items()}
            for engine, of in methods.items()
        }
        rows += table6_rows(name, rates, sizes)
    for name, methods in PAPER.items() if paper else ():
        paper_rates = {m: {s: (v[2 * i], v[2 * i + 1]) for i, s in enumerate(PAPER_SIZES)} for m, v in methods.items()}
        rows += table6_rows(name, paper_rates, sizes)
    return table(header, rows)


def table6_rows(
    name: str, rates: Mapping[str, Mapping[Size, tuple[float | None, float | None]]], sizes: Sequence[Size]
) -> list[list[str]]:
    """Returns the rows of the setting `name`. rates: engine -> size -> (prefill, decoding), None if unknown."""
    base = next((method for method in ("base", *BASES) if method in rates), None)
    rows = []
    for method, found in rates.items():
        values = [found.get(size, (None, None)) for size in sizes]
        rows.append([name, method, *(_rate_cell(value) for pair in values for value in pair)])
        if base not in (None, method):
            base_values = [rates[base].get(size, (None, None)) for size in sizes]
            both = zip(values, base_values, strict=True)
            pairs = [(a, b) for mine, others in both for a, b in zip(mine, others, strict=True)]
            rows.append([name, f"{method}, against {base}", *(_percent(a, b) for a, b in pairs)])
    return rows


def _rate_cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(value: float | None, base: float | None) -> str:
    return "-" if value is None or base is None else f"{value / base - 1:+.1%}"


def workload_size(record: dict[str, Any]) -> Size:
    """Returns the record's (base tokens to read, base tokens to write)."""
    return record["workload"]["prompt_tokens"], record["workload"]["tokens"]


def group_by_setting(records: Records) -> dict[str, dict[str, dict[Size, list[dict[str, Any]]]]]:
    """Groups records by machine, model and mode, then by engine (in the order of `ENGINES`), then by size.

    A setting measured on several days is split by day.
    """
    days = defaultdict(set)
    for record in records:
        days[_machine_and_model(record)].add(record["time"][:10])
    found: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for record in sorted(records, key=lambda record: list(ENGINES).index(record["engine"])):
        place = _machine_and_model(record)
        name = f"{place}, {record['time'][:10]}" if len(days[place]) > 1 else place
        found[name][record["engine"]][workload_size(record)].append(record)
    return found


def _machine_and_model(record: dict[str, Any]) -> str:
    return f"{machine_name(record)}: {model_name(record)}, {_mode_and_rows(record)}"


def prefill_and_decoding_rate(records: Records) -> tuple[float | None, float | None]:
    """Returns base tokens/s of prefill and of decoding, pooled: sum of tokens divided by sum of median times."""
    return pooled_rate(records, "prefill_tokens_per_s"), pooled_rate(records, "base_tokens_per_s")


def pooled_rate(records: Records, name: str) -> float | None:
    """Returns the rate `name` of all records together: total tokens / total seconds; None if a record lacks it."""
    which = "prompt_tokens" if name.startswith("prefill") else "base_tokens"
    known = [(record["counts"][which], record["figures"][name]) for record in records]
    if any(figure is None for _, figure in known):
        return None
    return sum(tokens for tokens, _ in known) / sum(tokens / figure["median"] for tokens, figure in known)
