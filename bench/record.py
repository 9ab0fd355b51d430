"""What every JSON record of a bench carries: samples with median and spread, machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Raw samples with their median, least and greatest."""
    return {
        "median": round(median(samples), 3),
        "min": round(min(samples), 3),
        "max": round(max(samples), 3),
        "samples": [round(sample, 3) for sample in samples],
    }


@cache
def surroundings(*packages: str) -> dict[str, Any]:
    """Machine, Python, versions of `packages` (null where one is not installed) and the commit, if known."""
    return {
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("mlx_zip", "numpy", *packages)},
        "commit": _commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        return names[0] if names else platform.processor()
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    return platform.processor()


def _commit() -> str | None:
    return _output("git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
