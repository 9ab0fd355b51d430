"""A database that several threads use, and that goes on in memory while its file takes no more.

One SQLite file in WAL mode, and every commit is flushed. A running answer adds rows of what is new, every 0.4 s, so no
write copies a long answer; at its end, or at the next start after a crash, the rows become the message. When the disk
is full, the whole database goes on as a copy in memory, and the conversations that changed are written back when the
disk takes them.
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
    share_lock,
    sqlite_code,
)
from mlx_zip.apps.chat.schema import rebuild_indexes, transaction

Some = TypeVar("Some")
RETRY_S = 5.0  # between attempts to write to a full disk, one before the next write
IDLE_RETRY_S = 5.0  # between attempts while nothing is written
RETURN_MS = 200  # for another process that writes, in such an attempt
_INDEXES = (sqlite3.SQLITE_CORRUPT_INDEX, sqlite3.SQLITE_CORRUPT_VTAB)  # what is damaged can be built anew
_LOST = "changes are in memory only, and lost when the app ends"
_CONVERSATION_QUERIES = {  # what belongs to a conversation, in the order in which it can be added
    "conversations": "SELECT * FROM conversations WHERE id = ?",
    "messages": "SELECT * FROM messages WHERE conversation = ? ORDER BY n",
    "pieces": "SELECT * FROM pieces WHERE message IN (SELECT id FROM messages WHERE conversation = ?) ORDER BY n",
}


class Database:
    """path: the file, None for a database that stays in memory.

    problem: why what is written is in memory only at the moment, None if it is where it belongs.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problem: str | None = None
        self._lock = threading.RLock()
        self._opened: OpenedFile | None = None  # None only while there is a spare
        self._spare: sqlite3.Connection | None = None  # in memory, while the file takes nothing
        self._changed: set[str] = set()  # conversations that the spare has otherwise than the file
        self._tried, self._shrinks = 0.0, False
        self._timer: threading.Timer | None = None  # of the next attempt to write to the file
        self._open()

    def _open(self) -> None:
        """Opens the file; if its disk takes nothing, a copy in memory. Raises `StoreError`."""
        try:
            self._opened = open_in_memory() if self.path is None else open_file(self.path)
        except UnwritableError as error:
            assert self.path is not None
            self._use_spare(copy_to_memory(self.path), str(error))

    @property
    def note(self) -> str | None:
        """What happened to an older file at the opening."""
        return self._opened.note if self._opened else None

    @property
    def alone(self) -> bool:
        """Whether no other process had the database open when this one opened it."""
        return self._opened is not None and self._opened.alone

    def share(self) -> None:
        """Lets other processes use the database too."""
        if self._opened:
            share_lock(self._opened)

    @property
    def _current_db(self) -> sqlite3.Connection:
        if self._spare is not None:
            return self._spare
        assert self._opened is not None
        return self._opened.db

    def read(self, work: Callable[[sqlite3.Connection], Some]) -> Some:
        """Returns what `work` returns for the database. Raises `StoreError`."""
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
        """Builds the indexes anew if an error says that one is damaged; returns whether it did."""
        if getattr(error, "sqlite_errorcode", 0) not in _INDEXES:
            return False
        with (
            contextlib.suppress(sqlite3.Error),
            transaction(self._current_db),
        ):  # if they cannot be, the first error is reported
            rebuild_indexes(self._current_db)
            return True
        return False

    def write(self, work: Callable[[sqlite3.Connection], Some], conversation: str | None = None) -> Some:
        """Returns what `work` returns; what it changes happens whole or not at all. It may be called twice.

        conversation: the one that it changes, None for all. If the disk is full, or another process keeps the file
        locked, the database goes on in memory. A file that was removed is written anew. Raises `StoreError`.
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
        """Does the work in one transaction, and remembers what it changed if that is in memory only."""
        with transaction(self._current_db):
            before = self._spare_conversations()
            found = work(self._current_db)
            if self._spare is not None:
                self._changed |= {conversation} if conversation else before | self._spare_conversations()
        return found

    def _spare_conversations(self) -> set[str]:
        """Returns the ids of the conversations that are in memory while the file takes nothing."""
        return {row[0] for row in self._spare.execute("SELECT id FROM conversations")} if self._spare else set()

    def _leave_full_file(self, error: sqlite3.Error) -> bool:
        """Goes on in memory if the file takes no more; returns whether it did. Raises `StoreError`."""
        if (
            self._spare is not None
            or self.path is None
            or sqlite_code(error) not in (*TAKES_NO_MORE, sqlite3.SQLITE_BUSY)
        ):
            return False
        self._copy_to_memory(error_in_words(error))
        return True

    def _copy_to_memory(self, why: str) -> None:
        """Goes on in memory, with a copy of what the file holds. Raises `StoreError` if it cannot be read."""
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
        """Writes everything to a new file if somebody has removed or replaced the file. Raises `StoreError`."""
        if self._spare is not None or self.path is None or self._is_in_place(self.path):
            return
        self._copy_to_memory("the file has been removed")
        self._changed = self._spare_conversations()
        self._return_to_file(1000 * PATIENCE_S)

    def _is_in_place(self, path: Path) -> bool:
        return self._opened is not None and self._opened.file == file_identity(path)

    def _use_spare(self, spare: sqlite3.Connection, why: str) -> None:
        """Goes on in memory until the file takes what is written."""
        self._spare, self._tried, self._changed = spare, time.monotonic(), set()
        self.problem = f"{why}; {_LOST}"
        self._schedule_return()

    def _schedule_return(self) -> None:
        """Has `_return_to_file` called in a while, also if nothing is written until then."""

        def again() -> None:
            with self._lock:
                self._return_to_file(RETURN_MS)
                if self._spare is not None:
                    self._schedule_return()

        if self._timer is not None:
            self._timer.cancel()  # of an earlier time without room
        self._timer = threading.Timer(IDLE_RETRY_S, again)
        self._timer.daemon = True
        self._timer.start()

    def _return_to_file(self, patience_ms: float) -> None:
        """Writes to the file what is in memory only, if the disk takes it. patience_ms: for another process."""
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
        """Returns the open file at the path, which may be a new one. Raises `StoreError`."""
        if self._opened is not None and not self._is_in_place(path):
            self._opened.close()
            self._opened = None
        if self._opened is None:
            self._opened = open_file(path)
            share_lock(self._opened)
        return self._opened

    def _copy_changed(self, spare: sqlite3.Connection, db: sqlite3.Connection, patience_ms: float) -> None:
        """Brings the changed conversations to the file's database, all or none. Raises `sqlite3.Error`."""
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
        """Gives back the room of what was deleted, and leaves no trace of it in the files. Raises `StoreError`."""
        self._shrinks = self._spare is not None  # then the file has to be shrunk later
        self.read(_shrink)

    def close(self) -> None:
        """Closes the database, after a last attempt to write what is in memory only."""
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
    """Gives back the room of what was deleted, and overwrites it. Raises `sqlite3.Error`."""
    db.execute("INSERT INTO words (words) VALUES ('rebuild')")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _copy_conversation(source: sqlite3.Connection, target: sqlite3.Connection, conversation: str) -> None:
    """Brings what one database has of a conversation to another, or deletes it there if the first has none.

    Messages that only the other one has stay: another process has written them.
    """
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
