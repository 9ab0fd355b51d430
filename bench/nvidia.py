"""Runs the settings of the NVIDIA comparison part by part, and writes each part's records into a folder.

Parts: `checks` (ids, graphs), `steps` (prefill and steps apart), `generate` (whole requests in replay), `kernels` (each
alone), `others` (whole requests of other engines), `free` (the bundled model), `trace` (a profiler's trace), `summary`
(targets, llama-bench's JSON, roofline). The records of a part also hold the card's clocks, power and temperature before
and after it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from mlx_zip.errors import MlxZipError

from .engine_choice import check_engines
from .nvidia_cases import Cases
from .nvidia_folder import check_new, open_folder, read_text
from .nvidia_parts import FULL, PARTS, TINY
from .runs import ENGINES


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
    """Raises `MlxZipError` for flags that no part could use."""
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
    from mlx_zip.cuda.memory import find_device

    try:
        find_device("cuda")
    except MlxZipError as error:
        raise MlxZipError(f"{error}; --rehearse runs all parts at tiny sizes without a card") from error
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise MlxZipError("TRITON_INTERPRET is set: Triton's interpreter measures nothing; unset it")
