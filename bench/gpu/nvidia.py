"""Runs the settings of the NVIDIA comparison part by part, and writes each part's records into a folder.

Parts: `checks` (ids, graphs), `steps` (prefill and steps apart), `generate` (whole requests in replay), `kernels` (each
alone), `others` (whole requests of other engines), `free` (the bundled model), `trace` (a profiler's trace), `summary`
(targets, llama-bench's JSON, roofline). The records of a part also hold the card's clocks, power and temperature before
and after it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx_zip
from mlx_zip.bench.engines.choice import check_engines
from mlx_zip.bench.engines.runs import ENGINES
from mlx_zip.bench.engines.shape_table import SHAPES, ZipOptions, narrow
from mlx_zip.bench.machine import held_back
from mlx_zip.bench.recording import Copied
from mlx_zip.errors import MlxZipError
from mlx_zip.text.tokenizers import load_tokenizer

from .cases import (
    CARD,
    FAILED,
    Cases,
    Record,
    all_records,
    check_new,
    float64_records,
    open_folder,
    read_text,
    record_of,
    write_text,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench nvidia`."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the records; made if it is missing")
    add("--parts", nargs="+", choices=tuple(PARTS), help="parts to run, in place of their records of an earlier run "
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
        check_new(args.out, list(PARTS))
    plan = TINY if args.rehearse else FULL
    status = 0
    for part in parts:
        cases = Cases(args.out, part)
        cases.note_card("before")
        status = max(status, PARTS[part](args, plan, cases))
        cases.note_card("after")
    return status


def _check(args: argparse.Namespace, parts: Sequence[str]) -> None:
    check_engines([name for name in args.engines if name not in ENGINES or _part_of(name) in parts])
    if ("zip2zip" in args.engines) != (args.published is not None):
        raise MlxZipError("--engines zip2zip and --published DIR are given together, or neither")
    if args.published is not None and not Path(args.published).is_dir():
        raise MlxZipError(f"--published {args.published}: there is no such folder")
    if args.code is not None:
        read_text(args.code, "--code")


def _part_of(engine: str) -> str:
    """Returns the part that runs whole requests of an engine, so that one that is not installed harms no other."""
    return "generate" if engine.startswith("torch-") else "others"


def _check_card() -> None:
    """Raises `MlxZipError` unless there is a card that can be used: a CPU is far too slow for full sizes."""
    from mlx_zip.cuda.devices import find_device

    try:
        find_device("cuda")
    except MlxZipError as error:
        raise MlxZipError(f"{error}; --rehearse runs all parts at tiny sizes without a card") from error
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise MlxZipError("TRITON_INTERPRET is set: Triton's interpreter measures nothing; unset it")


# ---- what is measured

STEPS = (("phi-3.5-mini", "16"), ("llama-3.2-1b", "16"), ("phi-3.5-mini", "4"), ("phi-3-medium", "16"))
WHOLE = (("phi-3.5-mini", "16"), ("phi-3.5-mini", "4"), ("llama-3.2-1b", "16"), ("phi-3-medium", "16"))
OTHERS = "phi-3.5-mini"  # shape at which other engines are compared
LARGE, MOST = ("phi-3-medium",), 3  # shapes whose trials take long, and the most trials that they get


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


def _shapes(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Returns name -> config.json of the shapes to run: narrow ones, under names of their own, in a rehearsal."""
    if not args.rehearse:
        return {name: SHAPES[name] for name in names}
    found = {f"{name}-narrow": narrow(SHAPES[name]) for name in names}
    SHAPES.update(found)
    return found


def _name(args: argparse.Namespace, shape: str) -> str:
    return next(iter(_shapes(args, (shape,))))


def _trials(plan: Sizes, shape: str) -> int:
    return min(plan.trials, MOST) if shape in LARGE else plan.trials


def _text(args: argparse.Namespace) -> Path:
    """Returns the file to replay; without --code the sources of this package, joined."""
    if args.code is not None:
        return args.code
    files = sorted(Path(str(mlx_zip.__file__)).parent.rglob("*.py"))
    path = args.out / "code.txt"
    if not path.exists():
        write_text(path, "\n\n".join(file.read_text(encoding="utf-8") for file in files))
    return path


def _ids(args: argparse.Namespace, count: int) -> list[int]:
    tokenizer = load_tokenizer(args.tokenizer)
    text = _text(args)
    ids = tokenizer.encode(read_text(text, "--code")[: 16 * count], add_special_tokens=False)[:count]
    if len(ids) < count:
        raise MlxZipError(f"--code {text}: the text has {len(ids)} base ids, {count} are needed")
    return ids


# ---- parts


def _checks(args: argparse.Namespace, plan: Sizes, cases: Cases) -> int:
    from .card_checks import checks

    for name, check in checks(None, plan.greedy):
        cases.run(name, partial(_checked, check))
    return 0 if cases.status == 0 and all(one.get("holds", True) for one in cases.records) else 1


def _checked(check: Callable[[], Iterator[Record]]) -> Iterator[Record]:
    for line in check():
        print(f"{'ok  ' if line['holds'] else 'FAIL'} {line['check']} {line['found']}", flush=True)
        yield record_of("checks", **line)


def _kernels(args: argparse.Namespace, plan: Sizes, cases: Cases) -> int:
    import torch

    from mlx_zip.bench.engines.device_clock import read_bandwidth, read_side
    from mlx_zip.cuda.devices import find_device

    from . import kernels

    device = find_device(None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth = read_bandwidth(device)
    for name, config in _shapes(args, ("phi-3.5-mini", "llama-3.2-1b")).items():
        with cases.group(name):
            for case in kernels.cases(config, device, dtype, plan.context, plan.slots):
                model = {"name": name, "dtype": str(dtype).removeprefix("torch.")}
                cases.run(f"{name} {case.name}", partial(_timed_kernel, plan, case, model, device, bandwidth))
    with cases.group("memory"):
        for case in kernels.memory_controls(device, read_side(device)):
            model = {"name": "memory"}
            cases.run(f"memory {case.name}", partial(_timed_kernel, plan, case, model, device, bandwidth))
    return cases.status


def _timed_kernel(plan: Sizes, case: Any, model: dict[str, str], device: Any, bandwidth: float) -> list[Record]:
    from mlx_zip.bench.engines.device_clock import torch_device, yardstick

    from .kernels import time_kernel

    found = time_kernel(case, device, plan.trials, bandwidth, case.name.startswith("encoder"), plan.calls)
    print(f"{model['name']} {case.name}: {found['us']} us, {found['share_of_read']:.0%} of reading", flush=True)
    fields = {"kernel": case.name, "model": model, **found, "device": torch_device(device)}
    return [record_of("kernels", **fields, read_bytes_per_s=round(bandwidth), yardstick=yardstick(device))]


def _steps(args: argparse.Namespace, plan: Sizes, cases: Cases) -> int:
    ids = _ids(args, plan.context + plan.tokens)
    for shape, precision in STEPS:
        cases.run(f"steps of {shape}, {precision} bit", partial(_timed_steps, args, plan, shape, precision, ids))
    return cases.status


def _timed_steps(args: argparse.Namespace, plan: Sizes, shape: str, precision: str, ids: list[int]) -> Iterator[Record]:
    """Times prefill and steps of each engine at a shape; yields a record of each and prints a line."""
    from .steps import Plan, time_steps

    timing = Plan(plan.context, plan.tokens, _trials(plan, shape))
    for engine, rows in _step_engines(args, shape, precision):
        found = time_steps(engine, ids, timing, rows)
        moved, ms = sum(found["bytes"].values()), found["step"]["device_ms"]["median"]
        bandwidth = engine.bandwidth()
        model = {"name": _name(args, shape), "precision": precision, "weights": "random"}
        setting = {"context": timing.context, "tokens": timing.tokens, "trials": timing.trials}
        share = round(moved / (1e-3 * ms) / bandwidth, 4)
        print(f"{model['name']} {precision} {engine.name} {rows}: {ms:.3f} ms, {share:.0%} of reading", flush=True)
        fields = {"engine": engine.name, "rows": rows, "model": model, "setting": setting, **found}
        read = {"share_of_read": share, "read_bytes_per_s": round(bandwidth), "yardstick": engine.yardstick}
        yield record_of("steps", **fields, **read, device=engine.device)


def _step_engines(args: argparse.Namespace, shape: str, precision: str) -> Iterator[tuple[Any, str]]:
    """Yields each engine with "warm" or "cold" rows for a shape; its weights are freed when the next shape begins."""
    from mlx_zip.bench.engines.cuda_engines import TorchEngine, models_of

    models = models_of(_name(args, shape), precision, None, None, args.tokenizer, ZipOptions())
    zipped = TorchEngine("torch-zip", models)
    yield TorchEngine("torch-base", models), "warm"
    yield zipped, "warm"
    yield zipped, "cold"


def _generate(args: argparse.Namespace, plan: Sizes, cases: Cases) -> int:
    if own := [name for name in args.engines if name.startswith("torch-")]:
        for shape, precision in WHOLE:
            _whole(args, plan, cases, own, shape, precision, _trials(plan, shape))
    return cases.status


def _others(args: argparse.Namespace, plan: Sizes, cases: Cases) -> int:
    """Runs each of the other engines alone, so that one that fails harms no other."""
    for name in args.engines:
        if not name.startswith("torch-"):
            _whole(args, plan, cases, [name], OTHERS, "16", min(plan.trials, 2))
    return cases.status


def _whole(
    args: argparse.Namespace,
    plan: Sizes,
    cases: Cases,
    engines: Sequence[str],
    shape: str,
    precision: str,
    trials: int,
) -> None:
    name = _name(args, shape)
    flags = ["--shape", name, "--engines", *engines, "--precision", precision, "--tokenizer", args.tokenizer]
    flags += ["--text", f"code={_text(args)}", "--trials", str(trials), "--sizes", *plan.whole]
    flags += ["--published", args.published] if "zip2zip" in engines else []
    cases.run(f"{' '.join(engines)} at {name}, {precision} bit", partial(_bench_generate, cases, flags))


def _free(args: argparse.Namespace, plan: Sizes, cases: Cases) -> int:
    flags = ["--model", "stories", "--base", "stories-base", "--engines", "torch-base", "torch-zip", "--mode", "chat"]
    flags += ["--turns", "1", "--sizes", plan.free, "--trials", str(plan.trials)]
    flags += ["--warmup", "0"] if args.rehearse else ["--conversations", "4"]
    cases.run("the bundled models", partial(_bench_generate, cases, flags))
    return cases.status


def _bench_generate(cases: Cases, flags: list[str]) -> Sequence[Record]:
    """Runs `bench generate` with these flags; `cases` keeps the records as they are printed. Returns none."""
    from mlx_zip.bench.generation import generate

    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    with redirect_stdout(_Kept(cases)):
        generate.run(parser.parse_args(flags))
    return ()


class _Kept(Copied):
    """Shows what is printed, and keeps each line of it as a record."""

    def __init__(self, cases: Cases) -> None:
        super().__init__(sys.stdout)
        self.cases, self.line = cases, ""

    def write(self, text: str) -> int:
        *lines, self.line = (self.line + text).split("\n")
        for line in filter(None, lines):
            self.cases.add(json.loads(line))
        return super().write(text)


def _trace(args: argparse.Namespace, plan: Sizes, cases: Cases) -> int:
    ids = _ids(args, plan.context + plan.traced)
    cases.run("traces", partial(_traces, args, plan, ids))
    return cases.status


def _traces(args: argparse.Namespace, plan: Sizes, ids: list[int]) -> Iterator[Record]:
    from .steps import traced

    model = {"name": _name(args, "phi-3.5-mini"), "precision": "16", "weights": "random"}
    for engine, rows in _step_engines(args, "phi-3.5-mini", "16"):
        if rows == "warm":
            found = traced(engine, ids, plan.context, args.out, f"trace-{engine.name}")
            yield record_of("trace", model=model, **found, device=engine.device)


def _summary(args: argparse.Namespace, plan: Sizes, cases: Cases) -> int:
    from .run_summary import exported, roofline_page
    from .targets import judged

    records = all_records(args.out, [part for part in PARTS if part != "summary"]) + float64_records(args.out)
    on_gpu = any(one.get("device", {}).get("device") == "cuda" for one in records) and not args.rehearse
    lines = judged(records, on_gpu)
    for line in lines:
        cases.add(record_of("targets", **line))
    write_text(args.out / "llama-bench.json", json.dumps(exported(records), indent=2) + "\n")
    write_text(args.out / "roofline.md", roofline_page(records))
    for line in lines:
        value = "" if line["value"] is None else f": {line['value']:g} ({line['kind']} {line['bound']:g})"
        print(f"{line['verdict']:>12}  {line['target']}{value}")
    for one in (record for record in records if record["bench"] == FAILED):
        print(f"      failed  {one['what']}: {one['error']}")
    for one in (record for record in records if record["bench"] == CARD):
        if found := held_back(one["state"]):
            print(f"   held back  {one['when']} {one['part']}: {', '.join(found)}, at {one['state']['clocks.sm']}")
    return 0


PARTS: dict[str, Callable[[argparse.Namespace, Sizes, Cases], int]] = {  # in the order in which they run
    "checks": _checks,
    "steps": _steps,
    "generate": _generate,
    "kernels": _kernels,
    "others": _others,
    "free": _free,
    "trace": _trace,
    "summary": _summary,
}
