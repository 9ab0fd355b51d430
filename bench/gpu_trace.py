"""A profiler's trace of steps, and a table of their kernels with time, bytes and achieved bandwidth: the roofline."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from mlx_zip.cuda.kernels.dispatch import forced
from mlx_zip.cuda.launches import Launches
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.step_cost import step_costs

from .cuda_engines import TorchEngine
from .device_clock import wait

MOST_ROWS = 40


def traced(engine: TorchEngine, text: Sequence[int], context: int, folder: Path, name: str) -> dict[str, Any]:
    """Runs a request traced, after untraced runs, and writes the trace to folder/name.json.gz.

    Returns the kernels with calls and time, what a step launches, the bytes that it must move, and the time of a step
    in an untraced run, because tracing makes steps slower. The prompt is in the trace too, so `kernels` holds the whole
    request.
    """
    prompt, continuation = text[:context], text[context:]
    device = engine.model.device
    run = [engine.run(prompt, len(continuation), continuation) for _ in range(2)][-1]  # the first captures graphs
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as found:
        engine.run(prompt, len(continuation), continuation)
        wait(device)
    _write(found, folder / f"{name}.json")
    cost, bandwidth = warm_step(engine.model), engine.bandwidth()
    between = [b - a for a, b in zip(run.times, run.times[1:], strict=False)]
    step_s = sorted(between)[len(between) // 2]
    moved = engine.weight_bytes + engine.kv_bytes * (run.kv_ids - len(run.ids) / 2) + run.row_bytes
    return {
        "engine": engine.name,
        "trace": f"{name}.json.gz",
        "kernels": kernel_rows(found, device.type == "cuda"),
        "launches": cost.record(),
        "step_us": round(1e6 * step_s, 1),
        "step_bytes": round(moved),
        "weight_bytes": engine.weight_bytes,
        "layers": engine.model.folder.decoder.layers,
        "read_bytes_per_s": round(bandwidth),
        "yardstick": engine.yardstick,
        "roof_us": round(1e6 * moved / bandwidth, 1),
        "share_of_read": round(moved / step_s / bandwidth, 4),
    }


def warm_step(model: CudaModel) -> Launches:
    """Returns what a warm step launches. The kernels' references run, by whose rules bytes are counted.

    A kernel that is launched would count all of each tensor, although it reads some rows of it.
    """
    with forced("reference"):
        return step_costs(model).warm


def _write(found: Any, path: Path) -> None:
    """Writes a trace, compressed."""
    found.export_chrome_trace(str(path))
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    path.unlink()


def kernel_rows(found: Any, on_gpu: bool) -> list[dict[str, Any]]:
    """Returns name, calls and time in us of the kernels that took longest (on a CPU: operations), the longest first.

    Operations of the host have the time of the kernels that they launch too, and are left out for a GPU.
    """
    time_of = lambda one: one.self_device_time_total if on_gpu else one.self_cpu_time_total
    kept = [one for one in found.key_averages() if (one.device_type.name == "CPU") != on_gpu]
    rows = sorted(kept, key=time_of, reverse=True)[:MOST_ROWS]
    return [{"name": one.key, "calls": one.count, "us": round(time_of(one), 1)} for one in rows if time_of(one) > 0]


def roofline_page(records: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown page of the records of kernels, steps and traces."""
    out = [
        "# Roofline",
        "",
        "The roof is the time that the bytes alone would take at the read bandwidth in the same run. What is left "
        "is the time above it.",
    ]
    out += _table("Kernels alone", "kernel", records, "nvidia-kernels", _kernel_cells)
    out += _table("Steps", "step", records, "nvidia-steps", _step_cells)
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


def _table(
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


def _kernel_cells(record: dict[str, Any]) -> tuple[str, float, int]:
    return record["kernel"], record["us"], record["bytes"]


def _step_cells(record: dict[str, Any]) -> tuple[str, float, int]:
    name = f"{record['engine']}, {record['model']['precision']} bit, {record['rows']} rows"
    return name, 1e3 * record["step"]["device_ms"]["median"], sum(record["bytes"].values())
