"""A SQLite database that several threads use, in a file that only its owner can read.

The file is in WAL mode, and every commit is flushed. A running answer inserts a row with its new text every 0.4 s, so
no write copies a long answer; when the answer ends, or at the next start after a crash, the rows are merged into the
message. When the file cannot be written, for example because the disk is full, a change fails and leaves no trace. A
file that is not a database of this app is renamed when it is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from mlx_zip.apps.chat import search
from mlx_zip.errors import DataError, MlxZipError, failure_reason
from mlx_zip.files import check_regular_file

Some = TypeVar("Some")
PATIENCE_S = 5.0  # longest wait for another process that holds the write lock
_FILE_SUFFIXES = ("", "-wal", "-shm")  # SQLite's files of one database
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_INDEXES = (sqlite3.SQLITE_CORRUPT_INDEX, sqlite3.SQLITE_CORRUPT_VTAB)  # damage that rebuilding the indexes can repair
_NO_DAMAGE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY)


class StoreError(MlxZipError):
    """A database that cannot be opened, read or written."""


class _ForeignError(Exception):
    """The file is damaged or is not a database of this app; the message says which."""


class Database:
    """A database that is used from several threads. path: the file; None keeps the database in memory.

    The file and its folder are created if they are missing. A damaged file, or a file of another program, is renamed
    and replaced by an empty database; `note` then says so, else `note` is None. Raises `StoreError` if the file cannot
    be opened or written, if another process has it open, or if another version of mlx_zip made it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.note = None if path is None else Path(os.path.realpath(path)), None
        self._lock = threading.RLock()
        if (path := self.path) is None:
            self._db = _connect(":memory:")
            make_tables(self._db)
            return
        try:
            check_regular_file(path)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file_lock = _lock_file(path)
        except (OSError, DataError) as error:
            raise _open_error(path, error) from error
        try:
            self._db, self.note = _open_or_replace(path)
            self._identity = _file_identity(path)
        except OSError as error:  # the unusable file could not be renamed
            os.close(self._file_lock)
            raise _open_error(path, error) from error
        except BaseException:
            os.close(self._file_lock)
            raise

    def read(self, work: Callable[[sqlite3.Connection], Some]) -> Some:
        """Returns `work(db)`; if indexes are damaged, rebuilds them and calls `work` again. Raises `StoreError`."""
        with self._lock:
            return self._run(lambda: work(self._db), "read")

    def write(self, work: Callable[[sqlite3.Connection], Some]) -> Some:
        """Returns `work(db)`, run in one transaction; if indexes are damaged, rebuilds them and calls `work` again.

        Raises `StoreError`, and changes nothing, if the file cannot be written or is no longer in its place.
        """

        def run() -> Some:
            with _transaction(self._db):
                return work(self._db)

        with self._lock:
            self._check_place()
            return self._run(run, "written")

    def _run(self, work: Callable[[], Some], done: str) -> Some:
        try:
            return work()
        except sqlite3.Error as error:
            if not self._mend_indexes(error):
                raise self._error(error, done) from error
        try:
            return work()
        except sqlite3.Error as error:
            raise self._error(error, done) from error

    def _error(self, error: sqlite3.Error, done: str) -> StoreError:
        return StoreError(f"{self.path or 'the conversations'} cannot be {done}: {_error_in_words(error)}")

    def _mend_indexes(self, error: sqlite3.Error) -> bool:
        """Rebuilds the indexes if `error` says that an index is damaged; returns whether they were rebuilt."""
        if getattr(error, "sqlite_errorcode", 0) not in _INDEXES:
            return False
        with (
            contextlib.suppress(sqlite3.Error),
            _transaction(self._db),
        ):  # if the rebuild fails, the caller reports the first error
            _rebuild_indexes(self._db)
            return True
        return False

    def _check_place(self) -> None:
        """Raises `StoreError` if the file was removed or replaced: what is written to it now would be lost."""
        if self.path is not None and _file_identity(self.path) != self._identity:
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
            self._run(lambda: _shrink(self._db), "cleared of deleted text")

    def close(self) -> None:
        """Closes the database and releases the lock on its file. Call it once."""
        with self._lock:
            self._db.close()
            if self.path is not None:
                os.close(self._file_lock)


def _shrink(db: sqlite3.Connection) -> None:
    """Frees the space of deleted rows and overwrites their content. Raises `sqlite3.Error`."""
    _rebuild_text_index(db)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


# ---- opening a file


def _connect(name: str) -> sqlite3.Connection:
    """Returns a connection to an existing database file, or to a new database in memory (":memory:")."""
    db = sqlite3.connect(name, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.text_factory = lambda text: text.decode("utf-8", "replace")  # a damaged text must not make the others unreadable
    search.add_search_functions(db)
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA secure_delete = ON")  # overwrites deleted data
    return db


def _lock_file(path: Path) -> int:
    """Locks the database at `path` for this process; returns the lock file's descriptor.

    The system releases the lock when the process and any forked children have ended, however they end. Raises
    `StoreError` if the lock is held.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StoreError(f"{path}: another mlx_zip app has these conversations open; end that app first") from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Returns device and inode number of the file at a path, None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open_error(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path}: {_error_in_words(error).removeprefix(f'{path}: ')}")


def _open_or_replace(path: Path) -> tuple[sqlite3.Connection, str | None]:
    """Returns a connection to the file's database, and a note if an unusable file was renamed."""
    try:
        return _open_sound(path), None
    except (_ForeignError, sqlite3.DatabaseError) as error:
        if not (isinstance(error, _ForeignError) or _sqlite_code(error) in _DAMAGED):
            raise _open_error(path, error) from error
        kept = _move_aside(path)
        why = _error_in_words(error)
        note = f"{path} could not be used ({why}). It was kept as {kept.name}, and a new database was begun."
    try:
        return _open_sound(path), note
    except (_ForeignError, sqlite3.DatabaseError) as error:
        raise _open_error(path, error) from error


def _open_sound(path: Path) -> sqlite3.Connection:
    """Opens or creates the database file, calls `_check_database`, and makes the tables if there are none.

    Raises `_ForeignError` if the file is not the app's database, and `sqlite3.Error`.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.fchmod(handle, 0o600)  # SQLite gives its other files the mode of this one
        os.close(handle)
    except OSError as error:
        raise _open_error(path, error) from error
    db = _connect(str(path))
    try:
        _check_database(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        make_tables(db)
    except BaseException:
        db.close()
        raise
    return db


def _check_database(db: sqlite3.Connection, path: Path) -> None:
    """Rebuilds damaged indexes; raises an error if the database at `path` still cannot be used.

    The error is `StoreError` if another version of mlx_zip made the database, else `_ForeignError`.
    """
    try:
        _check_kind(db, path)
        if damage := _find_damage(db):
            _repair_damage(db, damage)
    except UnicodeDecodeError as error:  # from SQLite's message, which quotes the damaged bytes
        raise _ForeignError("it is damaged") from error


def _check_kind(db: sqlite3.Connection, path: Path) -> None:
    """Raises `_ForeignError` if the database is another program's or lacks tables, `StoreError` if another version."""
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
    if tables and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise _ForeignError("it is the database of another program")
    version = schema_version(db)
    if version > 0 and version != VERSION:
        cure = "update mlx_zip" if version > VERSION else "move the file away, and a new one is made"
        raise StoreError(f"{path}: its tables have version {version}, this mlx_zip reads {VERSION}: {cure}")
    if tables and (version < 1 or not tables >= TABLES):
        raise _ForeignError("it is damaged: tables are missing")


def _repair_damage(db: sqlite3.Connection, damage: str) -> None:
    """Rebuilds the indexes of a damaged database. Raises `_ForeignError`, and changes nothing, if damage remains."""
    try:
        with _transaction(db):
            _rebuild_indexes(db)
            if _find_damage(db):
                raise _ForeignError(f"it is damaged: {damage}")
    except sqlite3.Error as error:
        if _sqlite_code(error) in _NO_DAMAGE:
            raise
        raise _ForeignError(f"it is damaged: {damage}") from error


def _find_damage(db: sqlite3.Connection) -> str | None:
    """Returns the first damage that SQLite's integrity check finds, None if there is none. Raises `sqlite3.Error`."""
    found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    return None if found == "ok" else found


def _move_aside(path: Path) -> Path:
    """Renames the files of a database; returns the new path of the main file."""
    kept = path.with_name(f"{path.name}.kept-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    for end in _FILE_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{end}", f"{kept}{end}")
    return kept


def _sqlite_code(error: BaseException) -> int:
    """Returns SQLite's primary result code of an error; 255 if the error has none."""
    return getattr(error, "sqlite_errorcode", -1) & 0xFF


def _error_in_words(error: BaseException) -> str:
    """Returns a message for the user that says why the database could not be used."""
    words = {
        sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
        sqlite3.SQLITE_READONLY: "it cannot be written",
        sqlite3.SQLITE_FULL: "the disk is full; make room and try again",
        sqlite3.SQLITE_BUSY: "another process is writing",
        sqlite3.SQLITE_NOTADB: "it is no database",
        sqlite3.SQLITE_CORRUPT: "it is damaged",
        sqlite3.SQLITE_IOERR: "the disk is full, or cannot be read or written; make room and try again",
    }
    return words.get(_sqlite_code(error), failure_reason(error))


# ---- the tables

APPLICATION_ID = 0x6D7A6368  # stored in the file's header: identifies the file as a database of this app

VERSION = 2  # of the tables; stored in the file's header
_STATEMENTS = (
    """CREATE TABLE conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL, model TEXT,
    system TEXT NOT NULL, packs TEXT NOT NULL, sampling TEXT NOT NULL, draft TEXT NOT NULL, leaf TEXT,
    pinned INTEGER NOT NULL DEFAULT 0, folder TEXT NOT NULL DEFAULT '')""",
    """CREATE TABLE messages (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    parent TEXT, role TEXT NOT NULL, text TEXT NOT NULL, reasoning TEXT NOT NULL, created REAL NOT NULL,
    state TEXT NOT NULL, reason TEXT, tokens TEXT, figures TEXT, learned TEXT NOT NULL, model TEXT, writer INTEGER)""",
    # `writer` is no longer used.
    "CREATE INDEX messages_of ON messages (conversation, n)",
    "CREATE INDEX running_messages ON messages (state) WHERE state = 'running'",
    # The parts of a running answer: each write adds a row, so that no write copies a long answer.
    """CREATE TABLE pieces (
    n INTEGER PRIMARY KEY, message TEXT NOT NULL REFERENCES messages(id) ON DELETE CASCADE, piece TEXT NOT NULL)""",
    "CREATE INDEX pieces_of ON pieces (message, n)",
    # The text index: messages with the state "running" are left out.
    "CREATE VIRTUAL TABLE words USING fts5(text, content='messages', content_rowid='n', tokenize='trigram')",
    """CREATE TRIGGER message_added AFTER INSERT ON messages WHEN new.state <> 'running' BEGIN
    INSERT INTO words (rowid, text) VALUES (new.n, new.text); END""",
    """CREATE TRIGGER message_deleted AFTER DELETE ON messages WHEN old.state <> 'running' BEGIN
    INSERT INTO words (words, rowid, text) VALUES ('delete', old.n, old.text); END""",
    """CREATE TRIGGER message_changed AFTER UPDATE OF text, state ON messages BEGIN
    INSERT INTO words (words, rowid, text) SELECT 'delete', old.n, old.text WHERE old.state <> 'running';
    INSERT INTO words (rowid, text) SELECT new.n, new.text WHERE new.state <> 'running'; END""",
)
TABLES = frozenset({"conversations", "messages", "pieces", "words"})


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager: runs the statements inside as one transaction; rolls all of them back if an error is raised."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def schema_version(db: sqlite3.Connection) -> int:
    """Returns the version of a database's tables, 0 for an empty database."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def make_tables(db: sqlite3.Connection) -> None:
    """Makes the tables of an empty database in one transaction; changes no other. Raises `sqlite3.Error`."""
    if schema_version(db):
        return
    with _transaction(db):
        for statement in _STATEMENTS:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")


def _rebuild_indexes(db: sqlite3.Connection) -> None:
    """Rebuilds all indexes. The caller must have begun a transaction. Raises `sqlite3.Error`."""
    db.execute("REINDEX")
    _rebuild_text_index(db)


def _rebuild_text_index(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO words (words) VALUES ('rebuild')")
    db.execute("INSERT INTO words (words, rowid, text) SELECT 'delete', n, text FROM messages WHERE state = 'running'")
