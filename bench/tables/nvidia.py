"""The tables of docs/reports/nvidia.md, from the records that the parts of `bench nvidia` wrote on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mlx_zip.bench.gpu.targets import TARGETS as JUDGED
from mlx_zip.bench.records import Columns, Record, Tables, lines_with, make_column_table

# names of records and of their tables
STEPS, REQUESTS, KERNELS, TARGETS = "nvidia-steps", "nvidia-requests", "nvidia-kernels", "nvidia-targets"
NO_SHAPE = "memory"  # model name in the records of the copy and the sum


def lines_of_targets(lines: Sequence[Record]) -> list[Record]:
    """Returns the lines of today's targets; older records have some that were never measured."""
    named = {target.name for target in JUDGED}
    return [line for line in lines if line["bench"] == TARGETS and line["target"] in named]


STEP_COLUMNS: Columns = (
    ("shape", "{model[name]}"),
    ("bits", "{model[precision]}"),
    ("engine", "{engine}"),
    ("rows", "{rows}"),
    ("ms per step, card", "{step[device_ms][median]:.3f}"),
    ("ms, host", "{step[host_ms][median]:.3f}"),
    ("of the read bandwidth", "{share_of_read:.0%}"),
    ("ms to read 512 base ids", "{prefill[device_ms][median]:.1f}"),
)
REQUEST_COLUMNS: Columns = (
    ("shape", "{model[name]}"),
    ("base ids read + written", "{workload[prompt_tokens]}+{workload[tokens]}"),
    ("engine", "{engine}"),
    ("rows", "{setting[rows]}"),
    ("base tokens per step", "{figures[base_tokens_per_step][median]:.2f}"),
    ("base tokens/s", "{figures[base_tokens_per_s][median]:.0f}"),
    ("first id, ms", "{figures[ttft_ms][median]:.1f}"),
)
KERNEL_COLUMNS: Columns = (
    ("shape", lambda line: line["model"]["name"].replace(NO_SHAPE, "")),
    ("kernel", "{kernel}"),
    ("MB moved", lambda line: f"{line['bytes'] / 1e6:.1f}"),
    ("us", "{us:.1f}"),
    ("GB/s", "{gb_per_s:,.0f}"),
    ("of the read bandwidth", "{share_of_read:.0%}"),
)
TARGET_COLUMNS: Columns = (
    ("target", "{target}"),
    ("bound", "{kind} {bound:g}"),
    ("measured", lambda line: "" if line["value"] is None else f"{line['value']:.4g}"),
    ("worst case", lambda line: line["worst"] or ""),
    ("verdict", "{verdict}"),
)
TABLES: Tables = {
    STEPS: make_column_table(STEPS, STEP_COLUMNS, partial(lines_with, bench=STEPS)),
    REQUESTS: make_column_table(REQUESTS, REQUEST_COLUMNS, partial(lines_with, bench="generate")),
    KERNELS: make_column_table(KERNELS, KERNEL_COLUMNS, partial(lines_with, bench=KERNELS)),
    TARGETS: make_column_table(TARGETS, TARGET_COLUMNS, lines_of_targets),
}
