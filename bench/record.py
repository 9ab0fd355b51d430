"""What every JSON record of a bench carries: samples, machine, versions, commit, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
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


IDLE_S = 2.0  # how long the processors are watched before a command measures
BLAS = re.compile(r"blas|lapack|mkl|blis|libgoto|Accelerate")


def surroundings(*packages: str) -> dict[str, Any]:
    """Machine, Python, versions of `packages` (null where one is not installed), commit if known, load, libraries."""
    return {**_installation(*packages), **load_before(), "preloaded": preloaded(), "blas": blas_libraries()}


@cache
def load_before() -> dict[str, float | None]:
    """Load average, and the share of all processors' time that was idle over `IDLE_S` seconds.

    Both are taken at the first call of a process and kept; commands call it before they measure. idle_share is null
    where the system has no /proc/stat.
    """
    load = round(os.getloadavg()[0], 2)
    before = _processor_times()
    if before is None:
        return {"load_average": load, "idle_share": None}
    time.sleep(IDLE_S)
    after = _processor_times() or before
    idle, total = (b - a for a, b in zip(before, after, strict=True))
    return {"load_average": load, "idle_share": round(idle / total, 3) if total else None}


def _processor_times() -> tuple[int, int] | None:
    """(idle, all) ticks of all processors since the start; waiting for a disk counts as idle."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except FileNotFoundError:
        return None
    return ticks[3] + ticks[4], sum(ticks)


def preloaded() -> list[str]:
    """Names of the libraries that the environment loads before all others, such as a BLAS."""
    names = os.environ.get("LD_PRELOAD", os.environ.get("DYLD_INSERT_LIBRARIES", ""))
    return [Path(name).name for name in names.replace(":", " ").split()]


def blas_libraries() -> list[str] | None:
    """Names of the BLAS and LAPACK libraries that this process has loaded; None where the system does not say."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except FileNotFoundError:
        return None
    files = {Path(words[5]).name for line in maps if len(words := line.split(maxsplit=5)) == 6}
    return sorted(name for name in files if BLAS.search(name))


@cache
def _installation(*packages: str) -> dict[str, Any]:
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
