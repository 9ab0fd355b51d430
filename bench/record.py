"""What every JSON record of a bench carries: samples, machine, versions, commit, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Returns samples with their median, min and max, rounded to three decimals."""
    return {
        "median": round(median(samples), 3),
        "min": round(min(samples), 3),
        "max": round(max(samples), 3),
        "samples": [round(sample, 3) for sample in samples],
    }


IDLE_S = 2.0  # seconds for which the idle share of the processors is measured before a command measures
BLAS = re.compile(r"blas|lapack|mkl|blis|libgoto|Accelerate")  # in names of libraries


def surroundings(*packages: str) -> dict[str, Any]:
    """Returns what every record carries: time (UTC), machine, Python, versions, commit, load and libraries.

    packages: whose versions are given, besides mlx_zip's and numpy's; None for one that is not installed.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **_installation(*packages),
        **load_before(),
        "preloaded": preloaded(),
        "blas": blas_libraries(),
    }


@cache
def load_before() -> dict[str, float | None]:
    """Returns the load average, and the share of all processors' time that is idle during the next `IDLE_S` seconds.

    Later calls return the values of the first one, so commands call this before they measure. idle_share is None
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


def header(bench: str, model: str, device: dict[str, Any], plan: str) -> None:
    """Prints one line: the bench, model and device, how busy the machine was before, and `plan`: what will be run."""
    load = load_before()
    idle = "" if load["idle_share"] is None else f", processors {load['idle_share']:.0%} idle"
    where = f"{device['chip']} ({device['device']})"
    print(f"bench {bench}: {model} on {where}; {plan}; load average {load['load_average']}{idle}", file=sys.stderr)


def _processor_times() -> tuple[int, int] | None:
    """Returns (idle ticks, all ticks) of all processors since the system started; None without /proc/stat.

    Waiting for a disk counts as idle.
    """
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except FileNotFoundError:
        return None
    return ticks[3] + ticks[4], sum(ticks)


def preloaded() -> list[str]:
    """Returns the names of the libraries that LD_PRELOAD or its Mac counterpart loads first, such as a BLAS."""
    names = os.environ.get("LD_PRELOAD", os.environ.get("DYLD_INSERT_LIBRARIES", ""))
    return [Path(name).name for name in names.replace(":", " ").split()]


def blas_libraries() -> list[str] | None:
    """Returns the names of the BLAS and LAPACK libraries that this process has loaded; None without /proc."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except FileNotFoundError:
        return None
    files = {Path(words[5]).name for line in maps if len(words := line.split(maxsplit=5)) == 6}
    return sorted(name for name in files if BLAS.search(name))


@cache
def _installation(*packages: str) -> dict[str, Any]:
    """Returns machine, Python, versions of mlx_zip, numpy and `packages`, and commit."""
    return {
        "machine": f"{platform.system()} {platform.machine()}, {processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("mlx_zip", "numpy", *packages)},
        "commit": _commit(),
    }


def _version(name: str) -> str | None:
    """Returns the version of an installed package, else None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        return names[0] if names else platform.processor()
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    return platform.processor()


def _commit() -> str | None:
    """Returns the short hash of the checkout's commit; None outside a checkout."""
    return _output("git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD")


def _output(*command: str) -> str | None:
    """Runs a command and returns what it prints, stripped; None if it fails, takes over 10 s or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
