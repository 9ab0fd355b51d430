"""`--record FILE`: the records of a bench are also appended to a file, if the machine is quiet enough.

What a bench prints on standard output, one JSON record per line, is kept and written when the bench has ended well.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TextIO

from mlx_zip.errors import MlxZipError, reason
from mlx_zip.files import whole_file

from .record import IDLE_S, load_before
from .records import read_lines

QUIET = 0.9  # least share of the processors that must be idle before a bench whose records are kept


def add_record_flag(parser: argparse.ArgumentParser) -> None:
    """Declares --record FILE, for benches that measure time."""
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help=f"also append the records to FILE, when all are measured; refused unless {QUIET:.0%}% of the processors' "
        f"time is idle in the {IDLE_S:.0f} seconds before (default: only print them)",
    )


def run_recorded(file: Path, run: Callable[[], int]) -> int:
    """Runs a bench and appends the lines that it prints to the file, whole; returns the bench's exit status.

    Nothing is written if the bench fails. Raises `MlxZipError` before the bench begins if the machine is busy or the
    file cannot be written.
    """
    check_file(file)
    check_quiet()
    with redirect_stdout(Copied(sys.stdout)) as printed:
        status = run()
    if status == 0:
        append(file, printed.getvalue())
    return status


def check_quiet() -> None:
    """Raises `MlxZipError` if fewer than `QUIET` of the processors are idle now; the bench's records have this share.

    Where the system gives no idle share, the load average of the last minute over the number of processors counts as
    busy.
    """
    load_before.cache_clear()
    load = load_before()
    idle, measured = load["idle_share"], f"in the last {IDLE_S:.0f} seconds"
    if idle is None:
        idle, measured = 1 - (load["load_average"] or 0) / (os.cpu_count() or 1), "by the load average"
    if idle < QUIET:
        raise MlxZipError(
            f"--record: the processors were {max(idle, 0):.1%} idle {measured}, a record needs {QUIET:.0%}; "
            "without --record the bench always runs and prints to the screen"
        )


def check_file(file: Path) -> None:
    """Raises `MlxZipError` for a file in no folder, and for one that exists and does not hold JSON lines."""
    if not file.parent.is_dir():
        raise MlxZipError(f"--record {file}: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise MlxZipError(f"--record {file}: the folder {file.parent} cannot be written to")
    if file.exists():
        read_lines(file)


def append(file: Path, lines: str) -> None:
    """Writes the file's lines and these after them, whole or not at all. Raises `MlxZipError` if that fails."""
    try:
        old = file.read_text(encoding="utf-8") if file.exists() else ""
        with whole_file(file) as partial:
            partial.write_text(old + ("\n" if old and not old.endswith("\n") else "") + lines, encoding="utf-8")
    except OSError as error:
        raise MlxZipError(f"--record {file} cannot be written: {reason(error)}") from error


class Copied(StringIO):
    """Keeps the text that is written to it, and writes it to another stream too."""

    def __init__(self, shown: TextIO) -> None:
        super().__init__()
        self.shown = shown

    def write(self, text: str) -> int:
        """Writes the text to both and returns its length."""
        self.shown.write(text)
        return super().write(text)

    def flush(self) -> None:
        """Flushes the other stream."""
        self.shown.flush()
