"""The cases of a part of `bench nvidia`: their records are written as they come, and one that fails is recorded."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_zip.errors import MlxZipError, first_line

from .machine_state import card_state
from .nvidia_folder import forget, write_records
from .record import surroundings

Record = dict[str, Any]
PACKAGES = ("torch", "triton", "safetensors", "transformers")
FAILED = "nvidia-error"  # bench of the record of a case that failed
CARD = "nvidia-card"  # bench of the record of the card's state


class Cases:
    """Runs the cases of a part one after the other and keeps their records in the part's file."""

    def __init__(self, folder: Path, part: str) -> None:
        """Removes what the part wrote in an earlier run."""
        self.folder, self.part = folder, part
        self.records: list[Record] = []
        forget(folder, part)

    @property
    def status(self) -> int:
        """The part's exit status: 1 if a case failed, else 0."""
        return int(any(one["bench"] == FAILED for one in self.records))

    def add(self, record: Record) -> None:
        """Keeps a record, and writes the file."""
        self.records.append(record)
        write_records(self.folder, self.part, self.records)

    def note_card(self, when: str) -> None:
        """Keeps a record of the card's clocks, power and temperature, if they are known. when: "before" or "after"."""
        if state := card_state():
            self.add(record_of("card", part=self.part, when=when, state=state))

    def run(self, name: str, work: Callable[[], Iterable[Record]]) -> None:
        """Keeps the records that `work` yields, each at once. An error becomes a record too; the next case can run."""
        with self.group(name):
            for record in work():
                self.add(record)

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        """Inside, cases are run; what fails between them becomes a record of this name, and ends the group."""
        gc.collect()  # what a failed case held is free again
        try:
            yield
        except Exception as error:  # whatever a case raises, the others are measured; the record names it
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        """Shows an error and keeps it as a record."""
        if not isinstance(error, MlxZipError):
            traceback.print_exc()
        said = f"{type(error).__name__}: {first_line(error)}"
        print(f"error: {name}: {said}", file=sys.stderr, flush=True)
        self.add(record_of("error", what=name, error=said))


def record_of(bench: str, **fields: Any) -> Record:
    """Returns a record with what every record carries."""
    return {"bench": f"nvidia-{bench}", "schema": 1, **fields, **surroundings(*PACKAGES)}
