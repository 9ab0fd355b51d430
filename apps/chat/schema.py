"""The database's tables."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Some = TypeVar("Some")

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


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager: runs the statements inside as one transaction; rolls all of them back if an error is raised."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def parse_value(text: str, kind: type[Some]) -> Some | None:
    """Returns the value of the JSON `text`; None if `text` is not JSON or the value is not an instance of `kind`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kind) else None


def schema_version(db: sqlite3.Connection) -> int:
    """Returns the version of a database's tables, 0 for an empty database."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def make_tables(db: sqlite3.Connection) -> None:
    """Makes the tables of an empty database in one transaction; changes no other. Raises `sqlite3.Error`."""
    if schema_version(db):
        return
    with transaction(db):
        if schema_version(db):  # another process has made them
            return
        for statement in _STATEMENTS:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")


def rebuild_indexes(db: sqlite3.Connection) -> None:
    """Rebuilds all indexes. The caller must have begun a transaction. Raises `sqlite3.Error`."""
    db.execute("REINDEX")
    db.execute("INSERT INTO words (words) VALUES ('rebuild')")
