"""`mlx_zip selftest`: checks recorded cases of the published packages and measures speed on the user's machine.

Writes a one-page Markdown report to send to the developers, and next to it a JSON file with all figures. Both hold
facts about the machine, versions and figures, but no text or file name of the user.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx_zip
from mlx_zip.cli.actions import checked_output_path
from mlx_zip.cli.selftest.checks import PACKAGES, Check, check_codec, check_models
from mlx_zip.cli.selftest.speed import TOTAL_S, measure_rough_speeds, measure_steps
from mlx_zip.device import disable_tf32
from mlx_zip.files import atomic_file

SCHEMA = 2  # version of the JSON file's format
_MARKS = {True: "ok", False: "FAILED", None: "measured"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add(
        "--out",
        default="mlx_zip_selftest.md",
        help="Markdown report to write; a file of this name ending in .json gets the figures (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Checks, measures, writes the report and prints its path; returns 0 if every check passed, else 1."""
    disable_tf32()  # because the recorded results are float32; must come before MLX computes anything
    ends = time.monotonic() + TOTAL_S
    out = checked_output_path("--out", args.out)
    data_file = checked_output_path("--out", json_report_path(out))
    golden = Path(str(files("mlx_zip.golden")))
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        checks = [
            *check_codec(golden),
            *check_models(golden, Path(folder)),
            *measure_rough_speeds(golden, Path(folder)),
        ]
    checks += measure_steps(ends, data)
    failed = [check for check in checks if check.passed is False]
    with atomic_file(out) as partial:
        partial.write_text(markdown_report(checks), encoding="utf-8")
    with atomic_file(data_file) as partial:
        partial.write_text(json.dumps(json_report(checks, data), indent=1) + "\n", encoding="utf-8")
    for check in checks:
        print(f"{_MARKS[check.passed]:>8}  {check.name}: {check.figure}")
    passed = sum(check.passed is True for check in checks)
    print(f"{passed} checks passed, {len(failed)} failed; report: {args.out}, figures: {data_file}")
    print("Please attach both files to a report on the project's issue tracker.")
    return 1 if failed else 0


def json_report_path(out: Path) -> Path:
    """Returns the path of the JSON file that is written next to the report `out`."""
    return out.with_suffix(".figures.json" if out.suffix == ".json" else ".json")


def json_report(checks: list[Check], data: dict[str, Any]) -> dict[str, Any]:
    """Returns what the JSON file holds: the checks, the machine, and the data of the measurements."""
    found = [{"name": one.name, "passed": one.passed, "figure": one.figure} for one in checks]
    return {"selftest": SCHEMA, "machine": describe_machine(), "checks": found, **data}


def markdown_report(checks: list[Check]) -> str:
    """Returns the report in Markdown."""
    failed = sum(check.passed is False for check in checks)
    rows = [f"| {_MARKS[check.passed]} | {check.name} | {check.figure} |" for check in checks]
    about = [f"- {name}: {value}" for name, value in describe_machine().items()]
    head = ["# mlx_zip selftest", "", "All checks passed." if not failed else f"**{failed} checks failed.**", ""]
    return "\n".join([*head, *about, "", "| | check | found |", "| --- | --- | --- |", *rows, ""])


def describe_machine() -> dict[str, str]:
    """Returns facts about the machine, and the libraries' versions, by name."""
    import mlx.core as mx

    device = mx.default_device()
    return {
        "system": f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}",
        "device": ", ".join(f"{key} {value}" for key, value in mx.device_info(device).items()),
        "default device": str(device),
        "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "mlx_zip": mlx_zip.__version__,
    }
