"""A SQLite database that several threads use, and that switches to memory while its file cannot be written.

The file is in WAL mode, and every commit is flushed. A running answer inserts a row with its new text every 0.4 s, so
no write copies a long answer; when the answer ends, or at the next start after a crash, the rows are merged into the
message. When the disk is full, the whole database continues as a copy in memory; once the disk has room again, the
conversations that changed are written to the file.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlx_zip.apps.chat.database_file import (
    PATIENCE_S,
    TAKES_NO_MORE,
    OpenedFile,
    StoreError,
    UnwritableError,
    connect,
    copy_to_memory,
    error_in_words,
    file_identity,
    open_file,
    open_in_memory,
    rebuild_indexes,
    sqlite_code,
    transaction,
)

Some = TypeVar("Some")
RETRY_S = 5.0  # while in memory, a write first tries to return to the file if the last attempt is this long ago
IDLE_RETRY_S = 5.0  # time between the timer's attempts to return to the file
RETURN_MS = 200  # longest wait of an attempt for a process that holds the write lock
_INDEXES = (sqlite3.SQLITE_CORRUPT_INDEX, sqlite3.SQLITE_CORRUPT_VTAB)  # damage that rebuilding the indexes can repair
_LOST = "changes are in memory only, and lost when the app ends"
_CONVERSATION_QUERIES = {  # table -> query of a conversation's rows, in an order that satisfies the foreign keys
    "conversations": "SELECT * FROM conversations WHERE id = ?",
    "messages": "SELECT * FROM messages WHERE conversation = ? ORDER BY n",
    "pieces": "SELECT * FROM pieces WHERE message IN (SELECT id FROM messages WHERE conversation = ?) ORDER BY n",
}


class Database:
    """A database that is used from several threads. path: the file; None keeps the database in memory.

    problem: why changes are currently stored in memory only; None if they are stored in the file or `path` is None.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problem: str | None = None
        self._lock = threading.RLock()
        self._opened: OpenedFile | None = None  # may be None while `_spare` is in use
        self._spare: sqlite3.Connection | None = None  # the copy in memory, while the file cannot be written
        self._changed: set[str] = set()  # ids of conversations that differ between `_spare` and the file
        self._tried, self._shrinks = 0.0, False
        self._timer: threading.Timer | None = None  # starts the next attempt to write to the file
        self._open()

    def _open(self) -> None:
        """Opens the file; if the disk cannot be written, opens a copy of the file in memory. Raises `StoreError`."""
        try:
            self._opened = open_in_memory() if self.path is None else open_file(self.path)
        except UnwritableError as error:
            assert self.path is not None
            self._use_spare(copy_to_memory(self.path), str(error))

    @property
    def note(self) -> str | None:
        """What happened to an unusable older file when the database was opened; None if nothing happened."""
        return self._opened.note if self._opened else None

    @property
    def _current_db(self) -> sqlite3.Connection:
        if self._spare is not None:
            return self._spare
        assert self._opened is not None
        return self._opened.db

    def read(self, work: Callable[[sqlite3.Connection], Some]) -> Some:
        """Returns `work(db)`; if indexes are damaged, rebuilds them and calls `work` again. Raises `StoreError`."""
        with self._lock:
            try:
                return work(self._current_db)
            except sqlite3.Error as error:
                if not self._rebuild_indexes(error):
                    raise StoreError(f"the conversations cannot be read: {error_in_words(error)}") from error
            try:
                return work(self._current_db)
            except sqlite3.Error as error:
                raise StoreError(f"the conversations cannot be read: {error_in_words(error)}") from error

    def _rebuild_indexes(self, error: sqlite3.Error) -> bool:
        """Rebuilds the indexes if `error` says that an index is damaged; returns whether they were rebuilt."""
        if getattr(error, "sqlite_errorcode", 0) not in _INDEXES:
            return False
        with (
            contextlib.suppress(sqlite3.Error),
            transaction(self._current_db),
        ):  # if the rebuild fails, the caller reports the first error
            rebuild_indexes(self._current_db)
            return True
        return False

    def write(self, work: Callable[[sqlite3.Connection], Some], conversation: str | None = None) -> Some:
        """Returns `work(db)`, run in one transaction. Raises `StoreError` if the database cannot be written.

        conversation: id of the conversation that `work` changes; None if `work` may change any. If the disk is full, or
        another process keeps the file locked, the database continues in memory. If the file was removed, a new file is
        written. `work` is called again after a switch to memory, or if damaged indexes had to be rebuilt.
        """
        with self._lock:
            if time.monotonic() - self._tried >= RETRY_S:
                self._return_to_file(RETURN_MS)
            self._replace_removed_file()
            try:
                return self._run_transaction(work, conversation)
            except sqlite3.Error as error:
                if not (self._rebuild_indexes(error) or self._leave_full_file(error)):
                    raise StoreError(f"the conversations cannot be written: {error_in_words(error)}") from error
            try:
                return self._run_transaction(work, conversation)
            except sqlite3.Error as error:
                raise StoreError(f"the conversations cannot be written: {error_in_words(error)}") from error

    def _run_transaction(self, work: Callable[[sqlite3.Connection], Some], conversation: str | None) -> Some:
        """Runs `work` in one transaction. In memory, adds the conversations that may have changed to `_changed`."""
        with transaction(self._current_db):
            before = self._spare_conversations()
            found = work(self._current_db)
            if self._spare is not None:
                self._changed |= {conversation} if conversation else before | self._spare_conversations()
        return found

    def _spare_conversations(self) -> set[str]:
        """Returns the ids of the conversations in `_spare`; an empty set if `_spare` is None."""
        return {row[0] for row in self._spare.execute("SELECT id FROM conversations")} if self._spare else set()

    def _leave_full_file(self, error: sqlite3.Error) -> bool:
        """If `error` says that the file cannot be written, switches to a copy in memory and returns True; else False.

        Raises `StoreError` if the file cannot be read.
        """
        if (
            self._spare is not None
            or self.path is None
            or sqlite_code(error) not in (*TAKES_NO_MORE, sqlite3.SQLITE_BUSY)
        ):
            return False
        self._copy_to_memory(error_in_words(error))
        return True

    def _copy_to_memory(self, why: str) -> None:
        """Switches to a copy of the file's content in memory. Raises `StoreError` if the file cannot be read."""
        spare = connect(":memory:")
        try:
            self._current_db.backup(spare)
        except sqlite3.Error as error:
            spare.close()
            raise StoreError(
                f"the conversations cannot be written: {why}, nor read: {error_in_words(error)}"
            ) from error
        self._use_spare(spare, f"{self.path}: {why}")

    def _replace_removed_file(self) -> None:
        """Writes all conversations to a new file if the file was removed or replaced. Raises `StoreError`."""
        if self._spare is not None or self.path is None or self._is_in_place(self.path):
            return
        self._copy_to_memory("the file has been removed")
        self._changed = self._spare_conversations()
        self._return_to_file(1000 * PATIENCE_S)

    def _is_in_place(self, path: Path) -> bool:
        return self._opened is not None and self._opened.file == file_identity(path)

    def _use_spare(self, spare: sqlite3.Connection, why: str) -> None:
        """Uses the database `spare` until the file can be written. why: the reason, stored in `problem`."""
        self._spare, self._tried, self._changed = spare, time.monotonic(), set()
        self.problem = f"{why}; {_LOST}"
        self._schedule_return()

    def _schedule_return(self) -> None:
        """Starts a timer that calls `_return_to_file` every `IDLE_RETRY_S` seconds until the file is in use again."""

        def again() -> None:
            with self._lock:
                self._return_to_file(RETURN_MS)
                if self._spare is not None:
                    self._schedule_return()

        if self._timer is not None:
            self._timer.cancel()  # left from an earlier switch to memory
        self._timer = threading.Timer(IDLE_RETRY_S, again)
        self._timer.daemon = True
        self._timer.start()

    def _return_to_file(self, patience_ms: float) -> None:
        """Tries to write the changes in memory to the file and to use the file again; waits `patience_ms` at most."""
        if self._spare is None or self.path is None:
            return
        self._tried = time.monotonic()
        try:
            opened = self._reopen_file(self.path)
            self._copy_changed(self._spare, opened.db, patience_ms)
            if self._shrinks:
                _shrink(opened.db)
        except StoreError as error:
            self.problem = f"{error}; {_LOST}"
            return
        except sqlite3.Error as error:
            self.problem = f"{self.path}: {error_in_words(error)}; {_LOST}"
            return
        self._spare.close()
        self._spare, self.problem, self._shrinks = None, None, False

    def _reopen_file(self, path: Path) -> OpenedFile:
        """Returns the opened file at `path`; opens it anew if it was removed or replaced. Raises `StoreError`."""
        if self._opened is not None and not self._is_in_place(path):
            self._opened.close()
            self._opened = None
        if self._opened is None:
            self._opened = open_file(path)
        return self._opened

    def _copy_changed(self, spare: sqlite3.Connection, db: sqlite3.Connection, patience_ms: float) -> None:
        """Copies the changed conversations to the file's database in one transaction. Raises `sqlite3.Error`."""
        db.execute(f"PRAGMA busy_timeout = {patience_ms:.0f}")
        try:
            with transaction(db):
                for conversation in sorted(self._changed):
                    _copy_conversation(spare, db, conversation)
        finally:
            db.execute(f"PRAGMA busy_timeout = {1000 * PATIENCE_S:.0f}")

    def bytes(self) -> int:
        """Returns the size of the database in bytes."""
        return self.read(
            lambda db: db.execute("PRAGMA page_count").fetchone()[0] * db.execute("PRAGMA page_size").fetchone()[0]
        )

    def shrink(self) -> None:
        """Frees the disk space of deleted rows and overwrites their content in the files. Raises `StoreError`."""
        self._shrinks = self._spare is not None  # the file is shrunk when it is in use again
        self.read(_shrink)

    def close(self) -> None:
        """Closes the database, after a last attempt to write changes that are only in memory."""
        with self._lock:
            self._return_to_file(1000 * PATIENCE_S)
            if self._timer is not None:
                self._timer.cancel()
            if self._spare is not None:
                self._spare.close()
                self._spare = None
            if self._opened is not None:
                self._opened.close()


def _shrink(db: sqlite3.Connection) -> None:
    """Frees the space of deleted rows and overwrites their content. Raises `sqlite3.Error`."""
    db.execute("INSERT INTO words (words) VALUES ('rebuild')")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _copy_conversation(source: sqlite3.Connection, target: sqlite3.Connection, conversation: str) -> None:
    """Copies a conversation from `source` to `target`, or deletes it from `target` if `source` does not have it."""
    rows = {table: source.execute(query, (conversation,)).fetchall() for table, query in _CONVERSATION_QUERIES.items()}
    if not rows["conversations"]:
        target.execute("DELETE FROM messages WHERE conversation = ?", (conversation,))
        target.execute("DELETE FROM conversations WHERE id = ?", (conversation,))
    for message in rows["messages"]:
        target.execute("DELETE FROM pieces WHERE message = ?", (message["id"],))
    for table, found in rows.items():
        for row in found:
            fields = [name for name in row.keys() if name != "n"]  # noqa: SIM118 (a Row iterates over its values)
            marks, new = ", ".join("?" * len(fields)), ", ".join(f"{name} = excluded.{name}" for name in fields)
            renew = "" if table == "pieces" else f" ON CONFLICT (id) DO UPDATE SET {new}"
            query = f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({marks}){renew}"
            target.execute(query, tuple(row[name] for name in fields))
