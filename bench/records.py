"""Reads recorded JSON lines of the harness and the papers by name, and writes rows of cells as Markdown tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, MlxZipError, failure_reason
from mlx_zip.files import atomic_file, check_regular_file, refuse_json_constant

PLACES = ("bench/records", "bench/papers/*/records")  # folders of a checkout
Record = dict[str, Any]
# build and version in a library's file name; tables omit them
_BUILD = re.compile(r"_?(-[0-9a-f]{8})?\.(so|dylib).*")


def lines_with(lines: Iterable[Record], **wanted: Any) -> list[Record]:
    """Returns the lines that have these values in these fields."""
    return [line for line in lines if all(line[name] == value for name, value in wanted.items())]


class Records:
    """The records of a checkout, by file name without `.jsonl`: `Records(root).lines("packs")` reads packs.jsonl."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines = cache(self._lines)

    @cached_property
    def files(self) -> dict[str, Path]:
        """Record name -> file. Raises `MlxZipError` if two folders have a file of the same name."""
        found: dict[str, Path] = {}
        for path in sorted(path for place in PLACES for path in self.root.glob(f"{place}/*.jsonl")):
            if path.stem in found:
                raise MlxZipError(f"two records are named {path.stem}: {found[path.stem]} and {path}")
            found[path.stem] = path
        return found

    def only_record(self, name: str) -> Record:
        """Returns the only line of a file. Raises `MlxZipError` if the file has more lines or none."""
        lines = self.lines(name)
        if len(lines) != 1:
            raise MlxZipError(f"{self.files[name]}: {len(lines)} records, not one")
        return lines[0]

    def engine_pair(
        self, name: str, base: str = "mlx-lm", turn: int = 0, rows: str | None = None
    ) -> tuple[Record, Record]:
        """Returns (record of the engine `base`, record of mlx-zip) for one turn, counted from 0.

        rows: "warm" or "cold"; None if the file has only one kind.
        """
        lines = [line for line in self.lines(name) if line["workload"]["turn"] == turn]
        found = {line["engine"]: line for line in lines if rows in (None, line["setting"]["rows"])}
        return found[base], found["mlx-zip"]

    def _lines(self, name: str) -> list[Record]:
        if name not in self.files:
            raise MlxZipError(f"there is no record {name}.jsonl in {' or '.join(PLACES)} of {self.root}")
        return read_lines(self.files[name])


def read_lines(path: Path) -> list[Record]:
    """Returns the JSON lines of a file. Raises `MlxZipError`, with the file's name, if a line is not a JSON object."""
    try:
        check_regular_file(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except DataError as error:
        raise MlxZipError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise MlxZipError(f"{path} cannot be read: {failure_reason(error)}") from error
    try:
        found = [json.loads(line, parse_constant=refuse_json_constant) for line in lines if line]
    except (ValueError, RecursionError) as error:
        raise MlxZipError(f"{path}: not JSON lines: {failure_reason(error)}") from error
    if not all(isinstance(line, dict) for line in found):
        raise MlxZipError(f"{path}: not JSON lines: each must be an object")
    return found


@contextmanager
def explain_wrong_fields(name: str) -> Iterator[None]:
    """Context manager: turns errors in reading fields of records into a `MlxZipError`. name: of the table or files."""
    try:
        yield
    except KeyError as missing:
        raise MlxZipError(f"{name}: its records have no {missing}") from missing
    except MlxZipError:  # some are a ValueError too
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise MlxZipError(f"{name}: its records do not hold what they should: {error}") from error


def write_whole(path: Path, data: str | bytes, what: str = "") -> None:
    """Writes a file atomically. Raises `MlxZipError` on failure. what: flag to name in the error message."""
    try:
        with atomic_file(path) as partial:
            partial.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise MlxZipError(f"{what} {path} cannot be written: {failure_reason(error)}".strip()) from error


def machines_table(records: Records, names: Sequence[str]) -> str:
    """Returns a table of the machine and conditions of each record; "-" for a missing field.

    A record that was measured at several commits, or with several numbers of trials, has a row for each.
    """
    rows = []
    for name in names:
        runs = dict[tuple[str, str], Record]()
        for line in records.lines(name):
            runs.setdefault((line.get("commit") or "-", trials_cell(line)), line)
        rows += [
            [
                f"`{name}`",
                line.get("machine", "-"),
                commit,
                line.get("time", "-")[:10],
                trials,
                load_cell(line),
                libraries_cell(line),
            ]
            for (commit, trials), line in runs.items()
        ]
    heads = ["record", "machine", "commit", "day", "trials", "load average, idle share", "preloaded; BLAS"]
    return table(heads, rows)


def trial_count(line: Record) -> int | None:
    return line.get("setting", {}).get("trials", line.get("trials"))


def trials_cell(line: Record) -> str:
    found, conversations = trial_count(line), line.get("workload", {}).get("conversations")
    if found is None:
        return "-"
    return str(found) if conversations is None else f"{found} of each of {conversations} conversations"


def load_cell(line: Record) -> str:
    """Returns a table cell with the load average and idle share before the bench."""
    load, idle = field_of_record_or_device(line, "load_average"), line.get("idle_share")
    return ", ".join(["-" if load is None else str(load), *([] if idle is None else [f"{idle:.0%} idle"])])


def libraries_cell(line: Record) -> str:
    """Returns a table cell with the preloaded libraries and the BLAS in use."""
    preloaded, blas = field_of_record_or_device(line, "preloaded"), line.get("blas")
    shown = "-" if preloaded is None else ", ".join(preloaded) or "none"
    used = sorted({_BUILD.sub("", name) for name in blas or ()})
    return shown + ("" if blas is None else f"; {', '.join(used) or 'none'}")


def field_of_record_or_device(line: Record, name: str) -> Any:
    """Returns a field of a record, or of its section `device` (older records of `bench generate`); None if missing."""
    return line.get(name, line.get("device", {}).get(name) if isinstance(line.get("device"), dict) else None)


# ---- rows of cells as Markdown

Cell = str | Callable[[Record], str]  # a format string such as "{times[median]:.2f}", or a function of the line
Columns = Sequence[tuple[str, Cell]]  # (head, cell) of each column
Tables = dict[str, Callable[[Records], str]]  # name on a page -> function that makes the table


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns header and rows as Markdown; every row must have as many cells as the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(escape_cell(cell) for cell in line)} |" for line in lines)


def column_table(lines: Iterable[Record], columns: Columns) -> str:
    """Returns a Markdown table with a row per line. columns: (head, cell) of each column; see `Cell`."""
    rows = [[c.format_map(line) if isinstance(c, str) else c(line) for _, c in columns] for line in lines]
    return table([head for head, _ in columns], rows)


def make_column_table(
    record: str, columns: Columns, rows: Callable[[Sequence[Record]], Iterable[Record]] = iter
) -> Callable[[Records], str]:
    """Returns a function that makes the table of `record`. rows: turns lines into rows (default: a row per line)."""
    return lambda records: column_table(rows(records.lines(record)), columns)


def median_and_range(figure: Record | None, digits: int = 2, between: str = "-", divisor: float = 1) -> str:
    """Returns a summary as "median (minimum-maximum)", each divided by `divisor`; "" for None."""
    if figure is None:
        return ""
    middle, low, high = (f"{figure[name] / divisor:.{digits}f}" for name in ("median", "min", "max"))
    return f"{middle} ({low}{between}{high})"


def escape_cell(cell: str) -> str:
    return cell.replace("|", "\\|")
