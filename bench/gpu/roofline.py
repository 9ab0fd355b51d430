"""Sums up the records of a run: as the JSON of llama.cpp's `llama-bench -o json`, and as a page with the roofline.

That JSON can be compared with records of other programs.

llama-bench times the reading of `n_prompt` ids and the writing of `n_gen` ids, after `n_depth` ids that do not count.
An engine with hypertokens is given in base tokens, as its text is. Where llama-bench has a field that means nothing
here, it has the value that llama-bench prints when it is not set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from mlx_zip.bench.engines.shape_table import SHAPES

Record = Mapping[str, Any]
TYPES = {"float32": "F32", "16": "BF16", "8": "Q8_0", "4": "Q4_0", "as stored": "as stored"}  # of weights
KV_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
UNSET: dict[str, Any] = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "n_cpu_moe": 0,
    "split_mode": "none",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": True,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "use_mmap": True,
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
}


def exported(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns llama-bench's objects: two for each record of `bench generate`, of its prompt and of its decoding."""
    return [line for record in records if record["bench"] == "generate" for line in _lines(record)]


def _lines(record: Record) -> Iterator[dict[str, Any]]:
    prompt, figures = record["workload"]["prompt_tokens"], record["figures"]
    yield _line(record, prompt, 0, 0, figures["ttft_ms"]["samples"])
    rates = figures["base_tokens_per_s"]
    if rates is None:
        return
    written = record["workload"]["tokens"] - round(figures["base_tokens_per_step"]["median"])
    yield _line(record, 0, written, prompt, [1e3 * written / rate for rate in rates["samples"]])


def _line(record: Record, prompt: int, written: int, depth: int, samples_ms: Sequence[float]) -> dict[str, Any]:
    device, model = record["device"], record["model"]
    on_gpu = "cpu" not in device["device"].lower()
    kv = KV_TYPES.get(record.get("kv_dtype", ""), "unknown")  # older records do not say
    shape = SHAPES.get(model["name"])
    backend = {"cuda": "CUDA"}.get(device["device"], "Metal" if on_gpu else "CPU")
    return {
        "build_commit": record["commit"] or "unknown",
        "build_number": 0,
        "cpu_info": record["machine"].split(", ")[1] if ", " in record["machine"] else record["machine"],
        "gpu_info": device["chip"] if on_gpu else "",
        "backends": f"{backend} ({record['engine']})",
        "model_filename": model["name"],
        "model_type": f"{model['name']} {TYPES[model['precision']]}",
        "model_size": model.get("bytes") or round(record["ceiling"]["step_bytes"]),
        "model_n_params": count_parameters(shape) if shape else 0,
        "n_batch": 2048,
        "n_ubatch": 2048,
        "n_threads": int(device["threads"].get("OMP_NUM_THREADS", 0)),
        "type_k": kv,
        "type_v": kv,
        "n_gpu_layers": 99 if on_gpu else 0,
        **UNSET,
        "n_prompt": prompt,
        "n_gen": written,
        "n_depth": depth,
        "test_time": record["time"].replace("+00:00", "Z"),
        **_times(samples_ms, prompt + written),
    }


def _times(samples_ms: Sequence[float], tokens: int) -> dict[str, Any]:
    ns = [round(1e6 * one) for one in samples_ms]
    ts = [1e9 * tokens / one for one in ns]
    spread = lambda values: stdev(values) if len(values) > 1 else 0.0
    return {
        "avg_ns": round(mean(ns)),
        "stddev_ns": round(spread(ns)),
        "avg_ts": round(mean(ts), 6),
        "stddev_ts": round(spread(ts), 6),
        "samples_ns": ns,
        "samples_ts": [float(f"{one:.6g}") for one in ts],
    }


def count_parameters(config: Mapping[str, Any]) -> int:
    """Returns the number of weights of a decoder by its config.json, without biases."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    keys = (config.get("num_key_value_heads") or heads) * size
    layer = width * (2 * heads * size + 2 * keys) + 3 * width * inner + 2 * width
    tables = config["vocab_size"] * width * (1 if config["tie_word_embeddings"] else 2)
    return config["num_hidden_layers"] * layer + tables + width


# ---- the roofline


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
