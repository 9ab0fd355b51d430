"""Runs the cases of a part of `bench nvidia`, and writes and reads the folder of records.

Each record is written at once, and a case that fails is recorded.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_zip.bench.machine import card_state
from mlx_zip.bench.recording import environment_fields
from mlx_zip.bench.records import Record, read_lines, write_whole
from mlx_zip.errors import MlxZipError, failure_reason, first_message_line

FAILED = "nvidia-error"  # field `bench` in the record of a failed case
CARD = "nvidia-card"  # field `bench` in the record of the GPU's state


class CaseRunner:
    """Runs the cases of a part one after the other and writes their records to the part's file."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        self.records: list[Record] = []

    @property
    def status(self) -> int:
        """The part's exit status: 1 if a case failed or a check does not hold, else 0."""
        return int(any(one["bench"] == FAILED or not one.get("holds", True) for one in self.records))

    def add(self, record: Record) -> None:
        """Adds a record and writes the file."""
        self.records.append(record)
        write_whole(records_path(self.folder, self.part), "".join(json.dumps(line) + "\n" for line in self.records))

    def record_card_state(self, when: str) -> None:
        """Adds a record of the GPU's clocks, power and temperature, if known. when: "before" or "after"."""
        if state := card_state():
            self.add(make_record("card", part=self.part, when=when, state=state))

    def run(self, name: str, work: Callable[[], Iterable[Record]]) -> None:
        """Adds each record that `work` yields, as soon as it is yielded. Records an error instead of raising it."""
        with self.group(name):
            for record in work():
                self.add(record)

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        """Context manager: runs cases inside; an error between cases ends the group and is recorded under `name`."""
        gc.collect()  # frees the memory of a failed case
        try:
            yield
        except Exception as error:  # any error is recorded, and the other cases still run
            self._record_failure(name, error)

    def _record_failure(self, name: str, error: Exception) -> None:
        if not isinstance(error, MlxZipError):
            traceback.print_exc()
        said = f"{type(error).__name__}: {first_message_line(error)}"
        print(f"error: {name}: {said}", file=sys.stderr, flush=True)
        self.add(make_record("error", what=name, error=said))


def make_record(bench: str, **fields: Any) -> Record:
    """Returns a record of `fields` and of the fields that all records have, such as machine and versions."""
    return {"bench": f"nvidia-{bench}", "schema": 1, **fields, **environment_fields()}


# ---- the folder of records


def make_writable_folder(folder: Path) -> None:
    """Makes a folder and its parents. Raises `MlxZipError` if that fails or the folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MlxZipError(f"--out {folder} cannot be written to: {failure_reason(error)}") from error


def check_folder_has_no_records(folder: Path, parts: Sequence[str]) -> None:
    """Raises `MlxZipError` if a folder already holds records of these parts, so that two runs are not mixed."""
    if found := [part for part in parts if records_path(folder, part).exists()]:
        raise MlxZipError(f"--out {folder} holds records of an earlier run ({', '.join(found)}): name another folder")


def records_path(folder: Path, part: str) -> Path:
    return folder / f"{part}.jsonl"


def read_part_records(folder: Path, parts: Sequence[str]) -> list[Record]:
    files = [records_path(folder, part) for part in parts]
    return [line for file in files if file.exists() for line in read_lines(file)]


def read_text(path: Path, what: str) -> str:
    """Returns the text of a UTF-8 file. Raises `MlxZipError` if it cannot be read. what: flag to name in the error."""
    try:
        if not path.is_file():
            raise MlxZipError(f"{what} {os.fspath(path)}: there is no such file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MlxZipError(f"{what} {path} cannot be read: {failure_reason(error)}") from error
