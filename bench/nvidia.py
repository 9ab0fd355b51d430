"""Runs the settings of the NVIDIA comparison part by part, and writes each part's records into a folder.

Parts: `checks` (ids, graphs), `kernels` (each alone), `steps` (prefill and steps apart), `generate` (whole requests in
replay), `free` (the bundled model), `trace` (a profiler's trace), `summary` (targets, llama-bench's JSON, roofline).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_zip
from mlx_zip.errors import MlxZipError, first_line
from mlx_zip.text.tokenizers import load_tokenizer

from .engine_choice import check_engines
from .nvidia_folder import (
    all_records,
    check_new,
    float64_records,
    forget,
    open_folder,
    read_text,
    write_records,
    write_text,
)
from .record import surroundings
from .record_file import Copied
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
    traced: int  # base ids of the trace: of all steps it would be large


FULL = Sizes(512, 256, ("512+256", "2048+256"), "512+256", 5, 2048, 20, 96, 48)
TINY = Sizes(16, 4, ("16+4", "20+4"), "16+4", 1, 32, 1, 2, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench nvidia`."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the records; made if it is missing")
    add("--parts", nargs="+", choices=PARTS, help="parts to run, in place of their records of an earlier run "
        f"(default, for a new folder: {' '.join(PARTS)})")  # fmt: skip
    add("--rehearse", action="store_true", help="run narrow shapes, small sizes and few trials: nothing is measured")
    add("--engines", nargs="+", default=["torch-base", "torch-zip"], metavar="ENGINE", help="engines of whole requests "
        "(default: torch-base torch-zip); hf, zip2zip, mlx-cuda-base and mlx-cuda-zip may be added")  # fmt: skip
    add("--published", metavar="DIR", help="checkpoint folder that the engine zip2zip loads")
    add("--tokenizer", default="stories", help="tokenizer of the shapes: folder or hub id (default: stories, bundled)")
    add("--code", type=Path, metavar="FILE", help="text to replay (default: the sources of this package)")


def run(args: argparse.Namespace) -> int:
    """Runs the parts; exit status 1 if a check or an engine fails. Raises `MlxZipError` for what cannot be run."""
    parts = args.parts or list(PARTS)
    _check(args, parts)
    if not args.rehearse and list(parts) != ["summary"]:
        _check_card()
    open_folder(args.out)
    if args.parts is None:
        check_new(args.out, PARTS)
    plan = TINY if args.rehearse else FULL
    status = 0
    for part in parts:
        forget(args.out, part)
        status = max(status, _PARTS[part](args, plan))
    return status


def _check(args: argparse.Namespace, parts: Sequence[str]) -> None:
    """Raises `MlxZipError` for flags that no part could use."""
    if "generate" in parts:
        check_engines(args.engines)
    if ("zip2zip" in args.engines) != (args.published is not None):
        raise MlxZipError("--engines zip2zip and --published DIR are given together, or neither")
    if args.published is not None and not Path(args.published).is_dir():
        raise MlxZipError(f"--published {args.published}: there is no such folder")
    if args.code is not None:
        read_text(args.code, "--code")


def _check_card() -> None:
    """Raises `MlxZipError` unless there is a card that can be used: a CPU is far too slow for full sizes."""
    from mlx_zip.cuda.memory import find_device

    try:
        find_device("cuda")
    except MlxZipError as error:
        raise MlxZipError(f"{error}; --rehearse runs all parts at tiny sizes without a card") from error
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise MlxZipError("TRITON_INTERPRET is set: Triton's interpreter measures nothing; unset it")


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
    write_records(args.out, part, lines)


@contextmanager
def _going_on(what: str, failed: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, an error is shown and added to `failed` as a record, so that what comes next is still measured."""
    try:
        yield
    except Exception as error:  # whatever an engine raises, the others are measured; the record names it
        if not isinstance(error, MlxZipError):
            traceback.print_exc()
        said = f"{type(error).__name__}: {first_line(error)}"
        print(f"error: {what}: {said}", file=sys.stderr, flush=True)
        failed.append(_record("error", what=what, error=said))


def _record(bench: str, **fields: Any) -> dict[str, Any]:
    """Returns a record with what every record carries."""
    return {"bench": f"nvidia-{bench}", "schema": 1, **fields, **surroundings(*PACKAGES)}


def _text(args: argparse.Namespace) -> Path:
    """Returns the file to replay; without --code the sources of this package, joined."""
    if args.code is not None:
        return args.code
    files = sorted(Path(str(mlx_zip.__file__)).parent.glob("*/*.py"))
    path = args.out / "code.txt"
    if not path.exists():
        write_text(path, "\n\n".join(file.read_text(encoding="utf-8") for file in files))
    return path


def _ids(args: argparse.Namespace, count: int) -> list[int]:
    """Returns the first base ids of the text to replay. Raises `MlxZipError` if there are too few."""
    tokenizer = load_tokenizer(args.tokenizer)
    text = _text(args)
    ids = tokenizer.encode(read_text(text, "--code")[: 16 * count], add_special_tokens=False)[:count]
    if len(ids) < count:
        raise MlxZipError(f"--code {text}: the text has {len(ids)} base ids, {count} are needed")
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

    from .cuda_engines import copy_bandwidth
    from .device_clock import torch_device
    from .gpu_kernels import cases, time_kernel

    device = find_device(None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth, lines, failed = copy_bandwidth(device), [], []
    for name, config in _shapes(args, ("phi-3.5-mini", "llama-3.2-1b")).items():
        for kernel, work in cases(config, device, dtype, plan.context, plan.slots):
            with _going_on(f"{name} {kernel}", failed):
                found = time_kernel(work, device, plan.trials, bandwidth, kernel.startswith("encoder"), plan.calls)
                model = {"name": name, "dtype": str(dtype).removeprefix("torch.")}
                fields = {"kernel": kernel, "model": model, **found, "device": torch_device(device)}
                lines.append(_record("kernels", **fields, copy_bytes_per_s=round(bandwidth)))
                print(f"{name} {kernel}: {found['us']} us, {found['share_of_copy']:.0%} of copy", flush=True)
            _write(args, "kernels", [*lines, *failed])
    return 1 if failed else 0


def _steps(args: argparse.Namespace, plan: Sizes) -> int:
    from .gpu_steps import Plan

    lines: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    timing = Plan(plan.context, plan.tokens, plan.trials)
    ids = _ids(args, plan.context + plan.tokens)
    for shape, precision in STEPS:
        with _going_on(f"steps of {shape}, {precision} bit", failed):
            for engine, rows in _step_engines(args, shape, precision):
                lines.append(_step_record(args, engine, shape, precision, rows, ids, timing))
                _write(args, "steps", [*lines, *failed])
        _write(args, "steps", [*lines, *failed])
    return 1 if failed else 0


def _step_record(
    args: argparse.Namespace, engine: Any, shape: str, precision: str, rows: str, ids: list[int], timing: Any
) -> dict[str, Any]:
    """Times an engine's prefill and steps, prints a line and returns the record."""
    from .gpu_steps import time_steps

    found = time_steps(engine, ids, timing, rows)
    moved, ms = sum(found["bytes"].values()), found["step"]["device_ms"]["median"]
    bandwidth = engine.bandwidth()
    model = {"name": next(iter(_shapes(args, (shape,)))), "precision": precision, "weights": "random"}
    setting = {"context": timing.context, "tokens": timing.tokens, "trials": timing.trials}
    share = round(moved / (1e-3 * ms) / bandwidth, 4)
    print(f"{model['name']} {precision} {engine.name} {rows}: {ms:.3f} ms, {share:.0%} of copy", flush=True)
    fields = {"engine": engine.name, "rows": rows, "model": model, "setting": setting, **found}
    copy = {"share_of_copy": share, "copy_bytes_per_s": round(bandwidth)}
    return _record("steps", **fields, **copy, device=engine.device)


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
    """Runs the engines on PyTorch in turns, and each other one alone, so that one that fails harms no other."""
    own = [name for name in args.engines if name.startswith("torch-")]
    groups = [*([own] if own else []), *([name] for name in args.engines if name not in own)]
    flags = ["--precision", "16", "--tokenizer", args.tokenizer, "--sizes", *plan.whole]
    flags += ["--text", f"code={_text(args)}", "--trials", str(plan.trials)]
    flags += ["--published", args.published] if args.published else []
    found, failed = "", []
    for group in groups:
        for name in _shapes(args, WHOLE):
            with _going_on(f"{' '.join(group)} at {name}", failed):
                found += _bench_generate(["--shape", name, "--engines", *group, *flags])
            write_text(args.out / "generate.jsonl", found + "".join(json.dumps(one) + "\n" for one in failed))
    return 1 if failed else 0


def _free(args: argparse.Namespace, plan: Sizes) -> int:
    flags = ["--model", "stories", "--base", "stories-base", "--engines", "torch-base", "torch-zip", "--mode", "chat"]
    flags += ["--turns", "1", "--sizes", plan.free, "--trials", str(plan.trials)]
    flags += ["--warmup", "0"] if args.rehearse else ["--conversations", "4"]
    write_text(args.out / "free.jsonl", _bench_generate(flags))
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
    ids = _ids(args, plan.context + plan.traced)
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

    records = all_records(args.out, [part for part in PARTS if part != "summary"]) + float64_records(args.out)
    on_gpu = any(one.get("device", {}).get("device") == "cuda" for one in records) and not args.rehearse
    lines = judged(records, on_gpu)
    _write(args, "summary", [_record("targets", **line) for line in lines])
    write_text(args.out / "llama-bench.json", json.dumps(exported(records), indent=2) + "\n")
    write_text(args.out / "roofline.md", roofline_page(records))
    for line in lines:
        value = "" if line["value"] is None else f": {line['value']:g} ({line['kind']} {line['bound']:g})"
        print(f"{line['verdict']:>12}  {line['target']}{value}")
    for one in (record for record in records if record["bench"] == "nvidia-error"):
        print(f"      failed  {one['what']}: {one['error']}")
    return 0


_PARTS: dict[str, Callable[[argparse.Namespace, Sizes], int]] = {
    "checks": _checks,
    "kernels": _kernels,
    "steps": _steps,
    "generate": _generate,
    "free": _free,
    "trace": _trace,
    "summary": _summary,
}
