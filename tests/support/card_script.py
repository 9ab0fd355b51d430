"""The card's script on the CPU: with the Python that runs the tests, or with one that spares what few tests look at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .places import REPO

# It imports nothing to see whether that can be imported, and does not describe the machine. `$more` are further cases.
QUICK = """#!/bin/bash
case "$*" in
    *torch.utils.collect_env | "-c import torch, triton,"*) ;;
    {more}
    *) exec {python} "$@" ;;
esac
"""


def quick_python(folder: Path, more: str = "") -> str:
    """Writes a Python that does at once what a test does not look at; more: a case of its own, as in bash's `case`."""
    program = folder / "python"
    program.write_text(QUICK.format(python=sys.executable, more=more))
    program.chmod(0o755)
    return str(program)


def start_script(folder: Path, *flags: Any, **variables: str) -> subprocess.Popen[str]:
    """Starts bench/h100.sh, whose records go to folder/"an out folder"."""
    command = ["bash", str(REPO / "bench" / "h100.sh"), *map(str, flags)]
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder / "an out folder"), **variables}
    return subprocess.Popen(command, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run_script(folder: Path, *flags: Any, **variables: str) -> tuple[int, str, str]:
    """Runs bench/h100.sh -> (exit status, standard output, standard error)."""
    return wait_for_script(start_script(folder, *flags, **variables))


def wait_for_script(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits for a script that was started -> (exit status, standard output, standard error)."""
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err
