"""A page with the roofline of a run: bytes moved by kernels and steps, achieved bandwidth, and time that is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def roofline_page(records: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown page of the records of kernels, steps and traces."""
    out = [
        "# Roofline",
        "",
        "The roof is the time that the bytes alone would take at the read bandwidth in the same run. What is left "
        "is the time above it.",
    ]
    out += roofline_table("Kernels alone", "kernel", records, "nvidia-kernels", kernel_cells)
    out += roofline_table("Steps", "step", records, "nvidia-steps", step_cells)
    for one in (record for record in records if record["bench"] == "nvidia-trace"):
        out += ["", f"## A request of {one['engine']}, {one['model']['name']}", ""]
        out += [
            f"A step took {one['step_us']:.0f} us and moves {one['step_bytes'] / 1e6:.0f} MB, which take "
            f"{one['roof_us']:.0f} us at the read bandwidth: {one['share_of_read']:.0%} is reached, "
            f"{one['step_us'] - one['roof_us']:.0f} us are left. "
            f"Launches: {one['launches']['launches']}, in {one['layers']} layers.",
            "",
            "| kernel | calls | us | us per call |",
            "| --- | --- | --- | --- |",
            *(
                f"| `{row['name'][:90]}` | {row['calls']} | {row['us']:.0f} | {row['us'] / row['calls']:.1f} |"
                for row in one["kernels"][:15]
            ),
        ]
    return "\n".join(out) + "\n"


def roofline_table(
    title: str, what: str, records: Sequence[dict[str, Any]], bench: str, cells: Callable[[Any], tuple[str, float, int]]
) -> list[str]:
    """Returns the lines of a table of bytes, achieved bandwidth and what is left; none without such records.

    cells: returns the name, the time in us and the bytes of a record.
    """
    lines = []
    for one in (record for record in records if record["bench"] == bench):
        name, us, moved = cells(one)
        roof = 1e6 * moved / one["read_bytes_per_s"]
        rate = moved / us / 1e3
        lines.append(
            f"| {one['model']['name']} | {name} | {moved / 1e6:.2f} | {us:.1f} | {rate:.0f} "
            f"| {roof / us:.0%} | {roof:.1f} | {max(0.0, us - roof):.1f} |"
        )
    heads = f"| shape | {what} | MB moved | us | GB/s | of roof | roof, us | left, us |"
    return ["", f"## {title}", "", heads, "| --- | --- | --- | --- | --- | --- | --- | --- |", *lines] if lines else []


def kernel_cells(record: dict[str, Any]) -> tuple[str, float, int]:
    return record["kernel"], record["us"], record["bytes"]


def step_cells(record: dict[str, Any]) -> tuple[str, float, int]:
    name = f"{record['engine']}, {record['model']['precision']} bit, {record['rows']} rows"
    return name, 1e3 * record["step"]["device_ms"]["median"], sum(record["bytes"].values())
