"""Runs the parts of the NVIDIA comparison, and writes each part's records into a folder.

Parts: `checks` (ids, CUDA graphs), `steps` (prefill and single steps), `generate` (whole requests in replay), `kernels`
(each alone), `others` (whole requests of other engines), `summary` (targets). A part's
records include the GPU's clocks, power and temperature before and after the part.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx_zip
from mlx_zip.bench.engines.choice import ENGINES, check_engine_names
from mlx_zip.bench.engines.shape_table import SHAPES, ZipOptions, narrow_shape_config
from mlx_zip.bench.engines.workloads import cut_text
from mlx_zip.bench.machine import active_clock_limits
from mlx_zip.bench.recording import environment_fields
from mlx_zip.bench.records import Record, write_whole
from mlx_zip.errors import MlxZipError
from mlx_zip.text.tokenizers import load_tokenizer

from .case_runner import (
    CARD,
    FAILED,
    CaseRunner,
    check_folder_has_no_records,
    make_record,
    make_writable_folder,
    read_part_records,
    read_text,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench nvidia`."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the records; made if it is missing")
    add("--parts", nargs="+", choices=tuple(PARTS), help=f"parts to run (default: {' '.join(PARTS)})")
    add("--rehearse", action="store_true", help="run narrow shapes, small sizes and few trials: nothing is measured")
    add("--engines", nargs="+", default=["torch-base", "torch-zip"], metavar="ENGINE", help="engines of whole requests "
        "(default: torch-base torch-zip); hf and zip2zip may be added")  # fmt: skip
    add("--published", metavar="DIR", help="checkpoint folder that the engine zip2zip loads")
    add("--tokenizer", default="stories", help="tokenizer of the shapes: folder or hub id (default: stories, bundled)")
    add("--code", type=Path, metavar="FILE", help="text to replay (default: the sources of this package)")


def run(args: argparse.Namespace) -> int:
    """Runs the parts; returns 1 if a check or case fails, else 0. Raises `MlxZipError` if the flags cannot be used."""
    parts = args.parts or list(PARTS)
    check_flags(args, parts)
    if not args.rehearse and list(parts) != ["summary"]:
        check_usable_card()
    make_writable_folder(args.out)
    check_folder_has_no_records(args.out, parts)
    plan = TINY if args.rehearse else FULL
    status = 0
    for part in parts:
        cases = CaseRunner(args.out, part)
        cases.record_card_state("before")
        PARTS[part](args, plan, cases)
        cases.record_card_state("after")
        status = max(status, cases.status)
    return status


def check_flags(args: argparse.Namespace, parts: Sequence[str]) -> None:
    check_engine_names([name for name in args.engines if name not in ENGINES or part_of_engine(name) in parts])
    if ("zip2zip" in args.engines) != (args.published is not None):
        raise MlxZipError("--engines zip2zip and --published DIR are given together, or neither")
    if args.published is not None and not Path(args.published).is_dir():
        raise MlxZipError(f"--published {args.published}: there is no such folder")
    if args.code is not None:
        read_text(args.code, "--code")


def part_of_engine(engine: str) -> str:
    """Returns the part that runs an engine's whole requests; engines that need other libraries have their own part."""
    return "generate" if engine.startswith("torch-") else "others"


def check_usable_card() -> None:
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
LARGE, MOST = ("phi-3-medium",), 3  # shapes whose trials take long; most trials for them


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements. context, tokens: base ids that steps read and write. whole: sizes of whole requests.

    trials: trials per measurement. slots: number of hyper rows. calls: kernel calls per trial. greedy: number of base
    ids that the checks compare.
    """

    context: int
    tokens: int
    whole: tuple[str, ...]
    trials: int
    slots: int
    calls: int
    greedy: int


FULL = Sizes(512, 256, ("512+256", "2048+256"), 5, 2048, 20, 96)
TINY = Sizes(16, 4, ("16+4", "20+4"), 1, 32, 1, 2)


def shape_configs(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    if not args.rehearse:
        return {name: SHAPES[name] for name in names}
    found = {f"{name}-narrow": narrow_shape_config(SHAPES[name]) for name in names}
    SHAPES.update(found)
    return found


def shape_name(args: argparse.Namespace, shape: str) -> str:
    return next(iter(shape_configs(args, (shape,))))


def trials_for_shape(plan: Sizes, shape: str) -> int:
    return min(plan.trials, MOST) if shape in LARGE else plan.trials


def replayed_text_file(args: argparse.Namespace) -> Path:
    if args.code is not None:
        return args.code
    files = sorted(Path(str(mlx_zip.__file__)).parent.rglob("*.py"))
    path = args.out / "code.txt"
    if not path.exists():
        write_whole(path, "\n\n".join(file.read_text(encoding="utf-8") for file in files))
    return path


# ---- parts


def run_checks(args: argparse.Namespace, plan: Sizes, cases: CaseRunner) -> None:
    from .card_checks import all_card_checks

    for name, check in all_card_checks(None, plan.greedy):
        cases.run(name, partial(check_records, check))


def check_records(check: Callable[[], Iterator[Record]]) -> Iterator[Record]:
    for line in check():
        print(f"{'ok  ' if line['holds'] else 'FAIL'} {line['check']} {line['found']}", flush=True)
        yield make_record("checks", **line)


def run_kernels(args: argparse.Namespace, plan: Sizes, cases: CaseRunner) -> None:
    import torch

    from mlx_zip.bench.engines.device_clock import bandwidth_matrix_side, measure_read_bandwidth
    from mlx_zip.cuda.devices import find_device

    from . import kernel_timing as kernels

    device = find_device(None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth = measure_read_bandwidth(device)
    for name, config in shape_configs(args, ("phi-3.5-mini", "llama-3.2-1b")).items():
        with cases.group(name):
            for case in kernels.kernel_cases(config, device, dtype, plan.context, plan.slots):
                model = {"name": name, "dtype": str(dtype).removeprefix("torch.")}
                cases.run(f"{name} {case.name}", partial(kernel_record, plan, case, model, device, bandwidth))
    with cases.group("memory"):
        for case in kernels.memory_control_cases(device, bandwidth_matrix_side(device)):
            model = {"name": "memory"}
            cases.run(f"memory {case.name}", partial(kernel_record, plan, case, model, device, bandwidth))


def kernel_record(plan: Sizes, case: Any, model: dict[str, str], device: Any, bandwidth: float) -> list[Record]:
    from mlx_zip.bench.engines.device_clock import describe_torch_device, torch_yardstick

    from .kernel_timing import time_kernel

    found = time_kernel(case, device, plan.trials, bandwidth, case.name.startswith("encoder"), plan.calls)
    print(f"{model['name']} {case.name}: {found['us']} us, {found['share_of_read']:.0%} of reading", flush=True)
    fields = {"kernel": case.name, "model": model, **found, "device": describe_torch_device(device)}
    return [make_record("kernels", **fields, read_bytes_per_s=round(bandwidth), yardstick=torch_yardstick(device))]


def run_steps(args: argparse.Namespace, plan: Sizes, cases: CaseRunner) -> None:
    text, tokenizer = [replayed_text_file(args)], load_tokenizer(args.tokenizer)
    turn = cut_text("code", text, tokenizer, plan.context, plan.tokens, "replay").turns[0]
    ids = [*turn.prompt, *(turn.text or ())]
    for shape, precision in STEPS:
        cases.run(f"steps of {shape}, {precision} bit", partial(step_records, args, plan, shape, precision, ids))


def step_records(args: argparse.Namespace, plan: Sizes, shape: str, precision: str, ids: list[int]) -> Iterator[Record]:
    from .step_timing import time_steps

    setting = {"context": plan.context, "tokens": plan.tokens, "trials": trials_for_shape(plan, shape)}
    for engine, rows in engines_with_rows(args, shape, precision):
        found = time_steps(engine, ids, **setting, rows=rows)
        moved, ms = sum(found["bytes"].values()), found["step"]["device_ms"]["median"]
        bandwidth = engine.bandwidth()
        model = {"name": shape_name(args, shape), "precision": precision, "weights": "random"}
        share = round(moved / (1e-3 * ms) / bandwidth, 4)
        print(f"{model['name']} {precision} {engine.name} {rows}: {ms:.3f} ms, {share:.0%} of reading", flush=True)
        fields = {"engine": engine.name, "rows": rows, "model": model, "setting": setting, **found}
        read = {"share_of_read": share, "read_bytes_per_s": round(bandwidth), "yardstick": engine.yardstick}
        yield make_record("steps", **fields, **read, device=engine.device)


def engines_with_rows(args: argparse.Namespace, shape: str, precision: str) -> Iterator[tuple[Any, str]]:
    from mlx_zip.bench.engines.cuda_engines import TorchEngine, torch_models_from_flags

    models = torch_models_from_flags(shape_name(args, shape), precision, None, None, args.tokenizer, ZipOptions())
    zipped = TorchEngine("torch-zip", models)
    yield TorchEngine("torch-base", models), "warm"
    yield zipped, "warm"
    yield zipped, "cold"


def run_generate(args: argparse.Namespace, plan: Sizes, cases: CaseRunner) -> None:
    if own := [name for name in args.engines if name.startswith("torch-")]:
        for shape, precision in WHOLE:
            run_whole_requests(args, plan, cases, own, shape, precision, trials_for_shape(plan, shape))


def run_other_engines(args: argparse.Namespace, plan: Sizes, cases: CaseRunner) -> None:
    """Runs each engine of another library as a case of its own, so that a failing engine stops no other."""
    for name in args.engines:
        if not name.startswith("torch-"):
            run_whole_requests(args, plan, cases, [name], OTHERS, "16", min(plan.trials, 2))


def run_whole_requests(
    args: argparse.Namespace,
    plan: Sizes,
    cases: CaseRunner,
    engines: Sequence[str],
    shape: str,
    precision: str,
    trials: int,
) -> None:
    name = shape_name(args, shape)
    flags = ["--shape", name, "--engines", *engines, "--precision", precision, "--tokenizer", args.tokenizer]
    flags += ["--text", f"code={replayed_text_file(args)}", "--trials", str(trials), "--sizes", *plan.whole]
    flags += ["--published", args.published] if "zip2zip" in engines else []
    cases.run(f"{' '.join(engines)} at {name}, {precision} bit", partial(whole_request_records, flags))


def whole_request_records(flags: list[str]) -> Iterator[Record]:
    """Runs `bench generate` with these flags; prints and yields its records, with the fields of every record."""
    from mlx_zip.bench.generation import generate

    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    for found in generate.run(parser.parse_args(flags)):
        record = {**found, **environment_fields()}
        print(json.dumps(record), flush=True)
        yield record


def write_summary(args: argparse.Namespace, plan: Sizes, cases: CaseRunner) -> None:
    from .targets import judge_targets

    records = read_part_records(args.out, [part for part in PARTS if part != "summary"])
    on_gpu = any(one.get("device", {}).get("device") == "cuda" for one in records) and not args.rehearse
    lines = judge_targets(records, on_gpu)
    for line in lines:
        cases.add(make_record("targets", **line))
    for line in lines:
        value = "" if line["value"] is None else f": {line['value']:g} ({line['kind']} {line['bound']:g})"
        print(f"{line['verdict']:>12}  {line['target']}{value}")
    for one in (record for record in records if record["bench"] == FAILED):
        print(f"      failed  {one['what']}: {one['error']}")
    for one in (record for record in records if record["bench"] == CARD):
        if found := active_clock_limits(one["state"]):
            print(f"   held back  {one['when']} {one['part']}: {', '.join(found)}, at {one['state']['clocks.sm']}")


PARTS: dict[str, Callable[[argparse.Namespace, Sizes, CaseRunner], None]] = {  # in the order in which they run
    "checks": run_checks,
    "steps": run_steps,
    "generate": run_generate,
    "kernels": run_kernels,
    "others": run_other_engines,
    "summary": write_summary,
}
