"""A SQLite database that several threads use.

The file is in WAL mode, and every commit is flushed. A running answer inserts a row with its new text every 0.4 s, so
no write copies a long answer; when the answer ends, or at the next start after a crash, the rows are merged into the
message. When the file cannot be written, for example because the disk is full, a change fails and leaves no trace.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlx_zip.apps.chat.database_file import (
    StoreError,
    error_in_words,
    file_identity,
    open_file,
    open_in_memory,
    rebuild_indexes,
    transaction,
)

Some = TypeVar("Some")
_INDEXES = (sqlite3.SQLITE_CORRUPT_INDEX, sqlite3.SQLITE_CORRUPT_VTAB)  # damage that rebuilding the indexes can repair


class Database:
    """A database that is used from several threads. path: the file; None keeps the database in memory.

    Raises `StoreError` if the file cannot be opened or written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._opened = open_in_memory() if path is None else open_file(path)
        self.note = self._opened.note  # what happened to an unusable older file; None if nothing happened

    def read(self, work: Callable[[sqlite3.Connection], Some]) -> Some:
        """Returns `work(db)`; if indexes are damaged, rebuilds them and calls `work` again. Raises `StoreError`."""
        with self._lock:
            return self._run(lambda: work(self._opened.db), "read")

    def write(self, work: Callable[[sqlite3.Connection], Some]) -> Some:
        """Returns `work(db)`, run in one transaction; if indexes are damaged, rebuilds them and calls `work` again.

        Raises `StoreError`, and changes nothing, if the file cannot be written or is no longer in its place.
        """

        def run() -> Some:
            with transaction(self._opened.db):
                return work(self._opened.db)

        with self._lock:
            self._check_place()
            return self._run(run, "written")

    def _run(self, work: Callable[[], Some], done: str) -> Some:
        try:
            return work()
        except sqlite3.Error as error:
            if not self._rebuild_indexes(error):
                raise self._error(error, done) from error
        try:
            return work()
        except sqlite3.Error as error:
            raise self._error(error, done) from error

    def _error(self, error: sqlite3.Error, done: str) -> StoreError:
        return StoreError(f"{self.path or 'the conversations'} cannot be {done}: {error_in_words(error)}")

    def _rebuild_indexes(self, error: sqlite3.Error) -> bool:
        """Rebuilds the indexes if `error` says that an index is damaged; returns whether they were rebuilt."""
        if getattr(error, "sqlite_errorcode", 0) not in _INDEXES:
            return False
        with (
            contextlib.suppress(sqlite3.Error),
            transaction(self._opened.db),
        ):  # if the rebuild fails, the caller reports the first error
            rebuild_indexes(self._opened.db)
            return True
        return False

    def _check_place(self) -> None:
        """Raises `StoreError` if the file was removed or replaced: what is written to it now would be lost."""
        if self.path is not None and file_identity(self.path) != self._opened.file:
            raise StoreError(
                f"{self.path} has been removed or replaced, so nothing can be stored; export what you need, then start "
                "the app again"
            )

    def bytes(self) -> int:
        """Returns the size of the database in bytes."""
        return self.read(
            lambda db: db.execute("PRAGMA page_count").fetchone()[0] * db.execute("PRAGMA page_size").fetchone()[0]
        )

    def shrink(self) -> None:
        """Frees the disk space of deleted rows and overwrites their content in the files. Raises `StoreError`."""
        with self._lock:
            self._run(lambda: _shrink(self._opened.db), "cleared of deleted text")

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._opened.close()


def _shrink(db: sqlite3.Connection) -> None:
    """Frees the space of deleted rows and overwrites their content. Raises `sqlite3.Error`."""
    db.execute("INSERT INTO words (words) VALUES ('rebuild')")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
