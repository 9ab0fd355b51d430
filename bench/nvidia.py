"""Runs the settings of the NVIDIA comparison part by part, and writes each part's records into a folder.

Parts: `checks` (ids, graphs), `kernels` (each alone), `steps` (prefill and steps apart), `generate` (whole requests in
replay), `free` (the bundled model), `trace` (a profiler's trace), `summary` (targets, llama-bench's JSON, roofline).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_zip
from mlx_zip.errors import MlxZipError
from mlx_zip.text.tokenizers import load_tokenizer

from .record import surroundings
from .record_file import Copied
from .records import read_lines
from .shape_table import SHAPES, ZipOptions

PARTS = ("checks", "kernels", "steps", "generate", "free", "trace", "summary")
PACKAGES = ("torch", "triton", "safetensors", "transformers")
STEPS = (("phi-3.5-mini", "16"), ("llama-3.2-1b", "16"), ("phi-3.5-mini", "4"), ("phi-3-medium", "16"))
WHOLE = ("phi-3.5-mini", "llama-3.2-1b", "phi-3-medium")
NARROW: dict[str, dict[str, Any]] = {  # sizes of a rehearsal, by model_type
    "llama": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "phi3": {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2},
}
SMALL = {"intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 4160}


@dataclass(frozen=True)
class Sizes:
    """What is measured. context + tokens: base ids of the steps. whole: sizes of whole requests. trials: of each."""

    context: int
    tokens: int
    whole: tuple[str, ...]
    free: str
    trials: int
    slots: int
    calls: int
    greedy: int


FULL = Sizes(512, 256, ("512+256", "2048+256"), "512+256", 5, 2048, 20, 96)
TINY = Sizes(16, 4, ("16+4", "20+4"), "16+4", 1, 32, 1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench nvidia`."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the records; made if it is missing")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help=f"parts to run (default: {' '.join(PARTS)})")
    add("--rehearse", action="store_true", help="run narrow shapes, small sizes and few trials: nothing is measured")
    add("--engines", nargs="+", default=["torch-base", "torch-zip"], metavar="ENGINE", help="engines of whole requests "
        "(default: torch-base torch-zip); hf, zip2zip, mlx-cuda-base and mlx-cuda-zip may be added")  # fmt: skip
    add("--published", metavar="DIR", help="checkpoint folder that the engine zip2zip loads")
    add("--tokenizer", default="stories", help="tokenizer of the shapes: folder or hub id (default: stories, bundled)")
    add("--code", type=Path, metavar="FILE", help="text to replay (default: the sources of this package)")


def run(args: argparse.Namespace) -> int:
    """Runs the parts; exit status 1 if a check fails. Raises `MlxZipError` for what cannot be run."""
    if not args.rehearse and args.parts != ["summary"]:
        _check_card()
    args.out.mkdir(parents=True, exist_ok=True)
    plan = TINY if args.rehearse else FULL
    status = 0
    for part in args.parts:
        status = max(status, _PARTS[part](args, plan))
    return status


def _check_card() -> None:
    """Raises `MlxZipError` unless there is a card that can be used: a CPU is far too slow for full sizes."""
    from mlx_zip.cuda.memory import find_device

    try:
        find_device("cuda")
    except MlxZipError as error:
        raise MlxZipError(f"{error}; --rehearse runs all parts at tiny sizes without a card") from error


def _shapes(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Returns name -> config.json of the shapes to run: narrow ones, under names of their own, in a rehearsal."""
    if not args.rehearse:
        return {name: SHAPES[name] for name in names}
    found = {}
    for name in names:
        config = SHAPES[name]
        narrow = {**config, **SMALL, **NARROW[config["model_type"]]}
        found[f"{name}-narrow"] = SHAPES[f"{name}-narrow"] = narrow
    return found


def _write(args: argparse.Namespace, part: str, lines: list[dict[str, Any]]) -> None:
    """Writes a part's records, in place of those of an earlier run."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (args.out / f"{part}.jsonl").write_text(text, encoding="utf-8")


def _record(bench: str, **fields: Any) -> dict[str, Any]:
    """Returns a record with what every record carries."""
    return {"bench": f"nvidia-{bench}", "schema": 1, **fields, **surroundings(*PACKAGES)}


def _text(args: argparse.Namespace) -> Path:
    """Returns the file to replay; without --code the sources of this package, joined."""
    if args.code is not None:
        return args.code
    files = sorted(Path(str(mlx_zip.__file__)).parent.glob("*/*.py"))
    path = args.out / "code.txt"
    path.write_text("\n\n".join(file.read_text(encoding="utf-8") for file in files), encoding="utf-8")
    return path


def _ids(args: argparse.Namespace, count: int) -> list[int]:
    """Returns the first base ids of the text to replay. Raises `MlxZipError` if there are too few."""
    tokenizer = load_tokenizer(args.tokenizer)
    ids = tokenizer.encode(_text(args).read_text(encoding="utf-8")[: 16 * count], add_special_tokens=False)[:count]
    if len(ids) < count:
        raise MlxZipError(f"--code: the text has {len(ids)} base ids, {count} are needed")
    return ids


# ---- parts


def _checks(args: argparse.Namespace, plan: Sizes) -> int:
    from .gpu_checks import check

    lines = check(None, plan.greedy)
    _write(args, "checks", [_record("checks", **line) for line in lines])
    for line in lines:
        print(f"{'ok  ' if line['holds'] else 'FAIL'} {line['check']} {line['found']}", flush=True)
    return 0 if all(line["holds"] for line in lines) else 1


def _kernels(args: argparse.Namespace, plan: Sizes) -> int:
    import torch

    from mlx_zip.cuda.memory import find_device

    from .cuda_engines import copy_bandwidth, torch_device
    from .gpu_kernels import cases, time_kernel

    device = find_device(None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth, lines = copy_bandwidth(device), []
    for name, config in _shapes(args, ("phi-3.5-mini", "llama-3.2-1b")).items():
        for kernel, work in cases(config, device, dtype, plan.context, plan.slots):
            found = time_kernel(work, device, plan.trials, bandwidth, kernel.startswith("encoder"), plan.calls)
            model = {"name": name, "dtype": str(dtype).removeprefix("torch.")}
            fields = {"kernel": kernel, "model": model, **found, "device": torch_device(device)}
            lines.append(_record("kernels", **fields, copy_bytes_per_s=round(bandwidth)))
            print(f"{name} {kernel}: {found['us']} us, {found['share_of_copy']:.0%} of copy", flush=True)
            _write(args, "kernels", lines)
    return 0


def _steps(args: argparse.Namespace, plan: Sizes) -> int:
    from .gpu_steps import Plan, time_steps

    lines: list[dict[str, Any]] = []
    timing = Plan(plan.context, plan.tokens, plan.trials)
    for shape, precision in STEPS:
        ids = _ids(args, plan.context + plan.tokens)
        for engine, rows in _step_engines(args, shape, precision):
            found = time_steps(engine, ids, timing, rows)
            moved, ms = sum(found["bytes"].values()), found["step"]["device_ms"]["median"]
            bandwidth = engine.bandwidth()
            model = {"name": next(iter(_shapes(args, (shape,)))), "precision": precision, "weights": "random"}
            setting = {"context": plan.context, "tokens": plan.tokens, "trials": plan.trials}
            share = {"share_of_copy": round(moved / (1e-3 * ms) / bandwidth, 4), "copy_bytes_per_s": round(bandwidth)}
            fields = {"engine": engine.name, "rows": rows, "model": model, "setting": setting, **found, **share}
            lines.append(_record("steps", **fields, device=engine.device))
            print(
                f"{model['name']} {precision} {engine.name} {rows}: {ms:.3f} ms, {share['share_of_copy']:.0%} of copy",
                flush=True,
            )
            _write(args, "steps", lines)
    return 0


def _step_engines(args: argparse.Namespace, shape: str, precision: str) -> Iterator[tuple[Any, str]]:
    """Yields each engine with "warm" or "cold" rows for a shape; its weights are freed when the next shape begins."""
    from .cuda_engines import TorchEngine, models_of

    name = next(iter(_shapes(args, (shape,))))
    models = models_of(name, precision, None, None, args.tokenizer, ZipOptions())
    zipped = TorchEngine("torch-zip", models)
    yield TorchEngine("torch-base", models), "warm"
    yield zipped, "warm"
    yield zipped, "cold"


def _generate(args: argparse.Namespace, plan: Sizes) -> int:
    flags = ["--engines", *args.engines, "--precision", "16", "--tokenizer", args.tokenizer, "--sizes", *plan.whole]
    flags += ["--text", f"code={_text(args)}", "--trials", str(plan.trials)]
    flags += ["--published", args.published] if args.published else []
    found = ""
    for name in _shapes(args, WHOLE):
        found += _bench_generate(["--shape", name, *flags])
        (args.out / "generate.jsonl").write_text(found, encoding="utf-8")
    return 0


def _free(args: argparse.Namespace, plan: Sizes) -> int:
    flags = ["--model", "stories", "--base", "stories-base", "--engines", "torch-base", "torch-zip", "--mode", "chat"]
    flags += ["--turns", "1", "--sizes", plan.free, "--trials", str(plan.trials)]
    flags += ["--warmup", "0"] if args.rehearse else ["--conversations", "4"]
    (args.out / "free.jsonl").write_text(_bench_generate(flags), encoding="utf-8")
    return 0


def _bench_generate(flags: list[str]) -> str:
    """Runs `bench generate` with these flags and returns the records that it prints."""
    from . import generate

    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    with redirect_stdout(Copied(sys.stdout)) as printed:
        generate.run(parser.parse_args(flags))
    return printed.getvalue()


def _trace(args: argparse.Namespace, plan: Sizes) -> int:
    from .gpu_trace import traced

    lines = []
    ids = _ids(args, plan.context + plan.tokens)
    for engine, rows in _step_engines(args, "phi-3.5-mini", "16"):
        if rows == "warm":
            found = traced(engine, ids, plan.context, args.out, f"trace-{engine.name}")
            model = {"name": next(iter(_shapes(args, ("phi-3.5-mini",)))), "precision": "16", "weights": "random"}
            lines.append(_record("trace", model=model, **found, device=engine.device))
            _write(args, "trace", lines)
    return 0


def _summary(args: argparse.Namespace, plan: Sizes) -> int:
    from .gpu_targets import judged
    from .gpu_trace import roofline_page
    from .llama_bench import exported

    records = [line for part in PARTS for line in _lines(args.out / f"{part}.jsonl") if part != "summary"]
    on_gpu = any(one.get("device", {}).get("device") == "cuda" for one in records) and not args.rehearse
    lines = judged(records, on_gpu)
    _write(args, "summary", [_record("targets", **line) for line in lines])
    (args.out / "llama-bench.json").write_text(json.dumps(exported(records), indent=2) + "\n", encoding="utf-8")
    (args.out / "roofline.md").write_text(roofline_page(records), encoding="utf-8")
    for line in lines:
        value = "" if line["value"] is None else f": {line['value']:g} ({line['kind']} {line['bound']:g})"
        print(f"{line['verdict']:>12}  {line['target']}{value}")
    return 0


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns a part's records; none if it did not run."""
    return read_lines(path) if path.exists() else []


_PARTS: dict[str, Callable[[argparse.Namespace, Sizes], int]] = {
    "checks": _checks,
    "kernels": _kernels,
    "steps": _steps,
    "generate": _generate,
    "free": _free,
    "trace": _trace,
    "summary": _summary,
}
