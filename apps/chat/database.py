"""A database that several threads use, and that goes on in memory while its file takes no more."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlx_zip.apps.chat.opening import (
    PATIENCE_S,
    TAKES_NO_MORE,
    Opened,
    StoreError,
    UnwritableError,
    code_of,
    connect,
    copied,
    file_at,
    in_memory,
    open_file,
    share,
    told,
)
from mlx_zip.apps.chat.schema import index_anew, transaction

Some = TypeVar("Some")
RETRY_S = 5.0  # between attempts to write to a full disk
RETURN_MS = 200  # for another process that writes, in such an attempt
_INDEXES = (sqlite3.SQLITE_CORRUPT_INDEX, sqlite3.SQLITE_CORRUPT_VTAB)  # what is damaged can be built anew
_LOST = "what is written now is lost when the app ends"
_OF = {  # what belongs to a conversation, in the order in which it can be added
    "conversations": "SELECT * FROM conversations WHERE id = ?",
    "messages": "SELECT * FROM messages WHERE conversation = ? ORDER BY n",
    "pieces": "SELECT * FROM pieces WHERE message IN (SELECT id FROM messages WHERE conversation = ?) ORDER BY n",
}


class Database:
    """path: the file, None for a database that stays in memory. note: what happened to an older file at the opening.

    problem: why what is written is in memory only at the moment, None if it is where it belongs.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problem: str | None = None
        self._opened = in_memory() if path is None else self._open(path)
        self.note = self._opened.note
        self._lock = threading.RLock()
        self._spare: sqlite3.Connection | None = None  # in memory, while the file takes no more
        self._changed: set[str] = set()  # conversations that the spare has otherwise than the file
        self._tried, self._shrinks = 0.0, False

    def _open(self, path: Path) -> Opened:
        """Opens the file; if its disk takes nothing, a copy in memory, which stays there. Raises `StoreError`."""
        try:
            return open_file(path)
        except UnwritableError as error:
            self.path, self.problem = None, f"{error}; {_LOST}"
            return copied(path)

    @property
    def alone(self) -> bool:
        """Whether no other process had the database open when this one opened it."""
        return self._opened.alone

    def share(self) -> None:
        """Lets other processes use the database too."""
        share(self._opened)

    def read(self, work: Callable[[sqlite3.Connection], Some]) -> Some:
        """Returns what `work` returns for the database. Raises `StoreError`."""
        with self._lock:
            self._return(RETRY_S)
            try:
                return work(self._spare or self._opened.db)
            except sqlite3.Error as error:
                if not self._reindexed(error):
                    raise StoreError(f"the conversations cannot be read: {told(error)}") from error
            try:
                return work(self._spare or self._opened.db)
            except sqlite3.Error as error:
                raise StoreError(f"the conversations cannot be read: {told(error)}") from error

    def _reindexed(self, error: sqlite3.Error) -> bool:
        """Builds the indexes anew if an error says that one is damaged; returns whether it did."""
        if getattr(error, "sqlite_errorcode", 0) not in _INDEXES:
            return False
        db = self._spare or self._opened.db
        with contextlib.suppress(sqlite3.Error), transaction(db):  # if they cannot be built, the first error is told
            index_anew(db)
            return True
        return False

    def write(self, work: Callable[[sqlite3.Connection], Some], conversation: str | None = None) -> Some:
        """Returns what `work` returns; what it changes happens whole or not at all. It may be called twice.

        conversation: the one that it changes, None for all. If the disk is full, or another process keeps the file
        locked, the database goes on in memory. If the file was removed, it is written anew.
        Raises `StoreError`.
        """
        with self._lock:
            self._return(RETRY_S)
            self._replace()
            try:
                return self._change(work, conversation)
            except sqlite3.Error as error:
                if not (self._reindexed(error) or self._left(error)):
                    raise StoreError(f"the conversations cannot be written: {told(error)}") from error
            try:
                return self._change(work, conversation)
            except sqlite3.Error as error:
                raise StoreError(f"the conversations cannot be written: {told(error)}") from error

    def _change(self, work: Callable[[sqlite3.Connection], Some], conversation: str | None) -> Some:
        """Does the work in one transaction, and remembers what it changed if that is in memory only."""
        db = self._spare or self._opened.db
        with transaction(db):
            found = work(db)
            if self._spare is not None:
                named = (
                    [conversation] if conversation else [row[0] for row in self._both("SELECT id FROM conversations")]
                )
                self._changed.update(named)
        return found

    def _both(self, query: str) -> list[sqlite3.Row]:
        """Returns the rows of a query in the file and in memory."""
        spare = self._spare.execute(query).fetchall() if self._spare else []
        return [*self._opened.db.execute(query).fetchall(), *spare]

    def _left(self, error: sqlite3.Error) -> bool:
        """Goes on in memory if the file takes no more; returns whether it did. Raises `StoreError`."""
        if self._spare is not None or self.path is None or code_of(error) not in (*TAKES_NO_MORE, sqlite3.SQLITE_BUSY):
            return False
        self._leave(told(error))
        return True

    def _leave(self, why: str) -> None:
        """Goes on in memory, with a copy of what the file holds. Raises `StoreError` if it cannot be read."""
        spare = connect(":memory:")
        try:
            self._opened.db.backup(spare)
        except sqlite3.Error as error:
            spare.close()
            raise StoreError(f"the conversations cannot be written: {why}, nor read: {told(error)}") from error
        self._spare, self._tried, self._changed = spare, time.monotonic(), set()
        self.problem = f"{self.path}: {why}; {_LOST}"

    def _replace(self) -> None:
        """Writes all to a new file if somebody has removed or replaced the file. Raises `StoreError`."""
        if self._spare is not None or self._in_place():
            return
        self._leave("the file has been removed")
        assert self._spare is not None
        self._changed = {row[0] for row in self._spare.execute("SELECT id FROM conversations")}
        self._return()

    def _in_place(self) -> bool:
        """Returns whether the file that is open is still the one at its path."""
        return self.path is None or (self._opened.file is not None and self._opened.file == file_at(self.path))

    def _return(self, after_s: float = 0.0) -> None:
        """Writes to the file what is in memory only, if the disk takes it; tries once in `after_s` seconds."""
        if self._spare is None or time.monotonic() - self._tried < after_s:
            return
        self._tried = time.monotonic()
        try:
            self._reopen()
            self._opened.db.execute(f"PRAGMA busy_timeout = {1000 * PATIENCE_S if not after_s else RETURN_MS:.0f}")
            with transaction(self._opened.db):
                for conversation in sorted(self._changed):
                    _copy(self._spare, self._opened.db, conversation)
            if self._shrinks:
                _shrink(self._opened.db)
        except sqlite3.Error as error:
            self.problem = f"{self.path}: {told(error)}; {_LOST}"
            return
        except StoreError as error:
            self.problem = f"{error}; {_LOST}"
            return
        finally:
            self._opened.db.execute(f"PRAGMA busy_timeout = {1000 * PATIENCE_S:.0f}")
        self._spare.close()
        self._spare, self.problem, self._shrinks = None, None, False

    def _reopen(self) -> None:
        """Opens the file at the path, if it is another one than before or none. Raises `StoreError`."""
        if self.path is None or self._in_place():
            return
        self._opened.close()
        self._opened = in_memory()  # until the file is open
        self._opened = open_file(self.path)
        self.note = self._opened.note or self.note
        share(self._opened)

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
            self._return()
            if self._spare is not None:
                self._spare.close()
            self._opened.close()


def _shrink(db: sqlite3.Connection) -> None:
    """Gives back the room of what was deleted, and overwrites it. Raises `sqlite3.Error`."""
    db.execute("INSERT INTO words (words) VALUES ('rebuild')")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, conversation: str) -> None:
    """Brings what one database has of a conversation to another, or deletes it there if the first has none.

    Messages that only the other one has stay: another process has written them.
    """
    rows = {table: source.execute(query, (conversation,)).fetchall() for table, query in _OF.items()}
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
