"""Recorded JSON lines, found by name: those of the harness, and those that each paper's folder keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from mlx_zip.errors import MlxZipError

from .tables import table

PLACES = ("bench/records", "bench/papers/*/records")  # of a checkout
Record = dict[str, Any]
_BUILD = re.compile(r"_?(-[0-9a-f]{8})?\.(so|dylib).*")  # of a library's file name


class Records:
    """The records of a checkout by file name without its ending: `Records(root).lines("packs")`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines = cache(self._lines)

    @cached_property
    def files(self) -> dict[str, Path]:
        """Record name -> its file. Raises `MlxZipError` for a name that is in two folders."""
        found: dict[str, Path] = {}
        for path in sorted(path for place in PLACES for path in self.root.glob(f"{place}/*.jsonl")):
            if path.stem in found:
                raise MlxZipError(f"two records are named {path.stem}: {found[path.stem]} and {path}")
            found[path.stem] = path
        return found

    def one(self, name: str) -> Record:
        """The only line of a file. Raises `MlxZipError` if there are more or none."""
        lines = self.lines(name)
        if len(lines) != 1:
            raise MlxZipError(f"{self.files[name]}: {len(lines)} records, not one")
        return lines[0]

    def pair(self, name: str, base: str = "mlx-lm", turn: int = 0, rows: str | None = None) -> tuple[Record, Record]:
        """(the base engine's record, mlx-zip's) of one turn. rows: "warm" or "cold"; None takes whichever there is."""
        lines = [line for line in self.lines(name) if line["workload"]["turn"] == turn]
        found = {line["engine"]: line for line in lines if rows in (None, line["setting"]["rows"])}
        return found[base], found["mlx-zip"]

    def _lines(self, name: str) -> list[Record]:
        if name not in self.files:
            raise MlxZipError(f"there is no record {name}.jsonl in {' or '.join(PLACES)} of {self.root}")
        return read_lines(self.files[name])


def read_lines(path: Path) -> list[Record]:
    """The JSON lines of a file. Raises `MlxZipError` naming the file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MlxZipError(f"{path} cannot be read: {error}") from error
    try:
        return [json.loads(line, parse_constant=_no_number) for line in lines if line]
    except (ValueError, RecursionError) as error:
        raise MlxZipError(f"{path}: not JSON lines: {error}") from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def machines(records: Records, names: Sequence[str]) -> str:
    """A table of where and how each record was measured; "-" for what a record does not say."""
    rows = []
    for name in names:
        line = records.lines(name)[0]
        rows.append(
            [
                f"`{name}`",
                line.get("machine", "-"),
                line.get("commit") or "-",
                line.get("time", "-")[:10],
                str(trials(line) or "-"),
                busy(line),
                libraries(line),
            ]
        )
    heads = ["record", "machine", "commit", "day", "trials", "load average, idle share", "preloaded; BLAS"]
    return table(heads, rows)


def trials(line: Record) -> int | None:
    """The number of trials that was fixed before the first one, if the record has it."""
    return line.get("setting", {}).get("trials", line.get("trials"))


def busy(line: Record) -> str:
    """Load average and idle share of the processors before the command, as a table shows them."""
    load, idle = stated(line, "load_average"), line.get("idle_share")
    return ", ".join(["-" if load is None else str(load), *([] if idle is None else [f"{idle:.0%} idle"])])


def libraries(line: Record) -> str:
    """Preloaded libraries and the BLAS in use, as a table shows them."""
    preloaded, blas = stated(line, "preloaded"), line.get("blas")
    shown = "-" if preloaded is None else ", ".join(preloaded) or "none"
    used = sorted({_BUILD.sub("", name) for name in blas or ()})
    return shown + ("" if blas is None else f"; {', '.join(used) or 'none'}")


def stated(line: Record, name: str) -> Any:
    """A field of the record, or of its `device`, where older records of `bench generate` have it; else None."""
    return line.get(name, line.get("device", {}).get(name) if isinstance(line.get("device"), dict) else None)
