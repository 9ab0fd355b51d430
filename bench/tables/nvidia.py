"""The tables of docs/reports/nvidia.md, from the records that the parts of `bench nvidia` wrote on one GPU."""

from __future__ import annotations

from mlx_zip.bench.gpu import targets
from mlx_zip.bench.records import Record, Records, table

STEPS, REQUESTS, KERNELS, TARGETS = "nvidia-steps", "nvidia-requests", "nvidia-kernels", "nvidia-targets"
NO_KERNEL = "memory"  # model name in the records of the copy and the sum


def lines_of_bench(records: Records, name: str, bench: str) -> list[Record]:
    return [line for line in records.lines(name) if line["bench"] == bench]


def steps_table(records: Records) -> str:
    rows = []
    for line in lines_of_bench(records, STEPS, STEPS):
        model, step = line["model"], line["step"]
        cells = [f"{step['device_ms']['median']:.3f}", f"{step['host_ms']['median']:.3f}"]
        cells += [f"{line['share_of_read']:.0%}", f"{line['prefill']['device_ms']['median']:.1f}"]
        rows.append([model["name"], model["precision"], line["engine"], line["rows"], *cells])
    heads = ["ms per step, card", "ms, host", "of the read bandwidth", "ms to read 512 base ids"]
    return table(["shape", "bits", "engine", "rows", *heads], rows)


def requests_table(records: Records) -> str:
    rows = []
    for line in lines_of_bench(records, REQUESTS, "generate"):
        found = {name: one["median"] for name, one in line["figures"].items() if one}
        size = f"{line['workload']['prompt_tokens']}+{line['workload']['tokens']}"
        cells = [f"{found['base_tokens_per_step']:.2f}", f"{found['base_tokens_per_s']:.0f}", f"{found['ttft_ms']:.1f}"]
        rows.append([line["model"]["name"], size, line["engine"], line["setting"]["rows"], *cells])
    heads = ["base tokens per step", "base tokens/s", "first id, ms"]
    return table(["shape", "base ids read + written", "engine", "rows", *heads], rows)


def kernels_table(records: Records) -> str:
    rows = []
    for line in lines_of_bench(records, KERNELS, KERNELS):
        cells = [f"{line['us']:.1f}", f"{line['gb_per_s']:,.0f}", f"{line['share_of_read']:.0%}"]
        name = "" if line["model"]["name"] == NO_KERNEL else line["model"]["name"]
        rows.append([name, line["kernel"], f"{line['bytes'] / 1e6:.1f}", *cells])
    return table(["shape", "kernel", "MB moved", "us", "GB/s", "of the read bandwidth"], rows)


def targets_table(records: Records) -> str:
    rows, named = [], {target.name for target in targets.TARGETS}
    for line in lines_of_bench(records, TARGETS, TARGETS):
        if line["target"] not in named:
            continue  # of an earlier version, and never measured
        found = "" if line["value"] is None else f"{line['value']:.4g}"
        rows.append([line["target"], f"{line['kind']} {line['bound']:g}", found, line["worst"] or "", line["verdict"]])
    return table(["target", "bound", "measured", "worst case", "verdict"], rows)


TABLES = {
    "nvidia-steps": steps_table,
    "nvidia-requests": requests_table,
    "nvidia-kernels": kernels_table,
    "nvidia-targets": targets_table,
}
PICTURES: dict[str, object] = {}
