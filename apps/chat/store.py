"""The conversations of the app, kept in a database. Knows nothing of HTTP."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlx_zip.apps.chat import search
from mlx_zip.apps.chat.database import Database, StoreError
from mlx_zip.files import data_folder
from mlx_zip.progress import pluralize

Some = TypeVar("Some")
# Fields of a conversation that `Store.change` can change. folder: "" if the conversation is in no folder.
FIELDS = ("title", "model", "system", "packs", "sampling", "draft", "leaf", "pinned", "folder")
_LEAVE_IN_PLACE = {"draft", "leaf", "pinned", "folder"}  # changes of these fields do not set `updated`
_AS_JSON = {"packs": list, "sampling": dict, "tokens": list, "figures": dict, "learned": list}  # JSON columns
_MAY_BE_NONE = ("tokens", "figures")  # columns of `_AS_JSON` that may hold NULL
_LONGEST_TITLE = 60  # characters of a title made from the first message
CUT = "The app ended while this was being written, or could not store the rest."


def default_file() -> Path:
    """Returns the file of the conversations in the user's data folder."""
    return data_folder() / "conversations.db"


def new_id() -> str:
    """Returns an id for a conversation or a message."""
    return secrets.token_hex(10)


class Store:
    """The conversations in a file; path None keeps them in memory only. All methods may be called from any thread.

    Conversations and messages are dicts with the fields of the app's HTTP interface. Messages form a tree: `parent` is
    the id of the preceding message. Methods raise `StoreError` if the database cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self.database = Database(path)
        self._running: set[str] = set()  # ids of the messages that this process writes
        try:
            self._cut_unfinished_messages()
        except BaseException:
            self.database.close()
            raise

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def conversations(self, wanted: str = "", limit: int = 50, offset: int = 0) -> dict[str, Any]:
        """Returns at most `limit` matches, from match `offset` on, without messages, and the number of all matches.

        wanted: words that must all occur in a conversation's title or texts. The last changed comes first; if `wanted`
        is empty, pinned conversations come first, then conversations in folders, by folder name.
        """
        found = self.database.read(lambda db: search.find_conversations(db, wanted, limit, offset))
        return {**found, "conversations": [_decode_row(row) for row in found["conversations"]]}

    def create(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Adds a conversation and returns it. fields: some of `FIELDS`."""
        now, one = time.time(), new_id()
        made = {"id": one, "title": "", "created": now, "updated": now, "model": None, "system": "", "packs": []}
        made |= {"sampling": {}, "draft": "", "leaf": None, "pinned": False, "folder": ""} | dict(fields)
        self.database.write(lambda db: _insert(db, "conversations", made))
        return {**made, "messages": []}

    def conversation(self, one: str) -> dict[str, Any] | None:
        """Returns a conversation with its messages, in the order of writing; None if the id is unknown."""

        def work(db: sqlite3.Connection) -> dict[str, Any] | None:
            found = _read_conversation(db, one)
            if found is None:
                return None
            rows = db.execute("SELECT * FROM messages WHERE conversation = ? ORDER BY n", (one,)).fetchall()
            return {**found, "messages": [self._read_message(db, row) for row in rows]}

        return self.database.read(work)

    def everything(self) -> list[dict[str, Any]]:
        """Returns all conversations with their messages, the oldest first."""
        ids = self.database.read(
            lambda db: [row[0] for row in db.execute("SELECT id FROM conversations ORDER BY created")]
        )
        return [found for one in ids if (found := self.conversation(one)) is not None]

    def change(self, one: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Changes fields of a conversation; returns it without messages, or None if the id is unknown.

        Sets the field `updated` to now if any field other than draft, leaf, pinned and folder is changed.
        """
        stored = {name: _encode_value(name, fields[name]) for name in FIELDS if name in fields}
        if stored.keys() - _LEAVE_IN_PLACE:
            stored["updated"] = time.time()

        def work(db: sqlite3.Connection) -> dict[str, Any] | None:
            _update(db, "conversations", one, stored)
            return _read_conversation(db, one)

        return self.database.write(work)

    def delete(self, one: str) -> bool:
        """Deletes a conversation and returns whether there was one."""

        def work(db: sqlite3.Connection) -> bool:
            db.execute("DELETE FROM messages WHERE conversation = ?", (one,))
            return db.execute("DELETE FROM conversations WHERE id = ?", (one,)).rowcount > 0

        return self.database.write(work)

    def purge(self) -> int:
        """Deletes all conversations, overwrites their content in the database, and returns how many there were.

        Raises `StoreError`; if the content could not be overwritten, the message says that the conversations are gone.
        """

        def work(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM messages")
            return db.execute("DELETE FROM conversations").rowcount

        count = self.database.write(work)
        try:
            self.database.shrink()
        except StoreError as error:
            raise StoreError(f"deleted: {pluralize(count, 'conversation')}; but {error}") from error
        return count

    def message(self, conversation: str, one: str) -> dict[str, Any] | None:
        """Returns a message of a conversation; None if either id is unknown."""

        def work(db: sqlite3.Connection) -> dict[str, Any] | None:
            row = db.execute("SELECT * FROM messages WHERE conversation = ? AND id = ?", (conversation, one)).fetchone()
            return None if row is None else self._read_message(db, row)

        return self.database.read(work)

    def path(self, conversation: str, leaf: str | None) -> list[dict[str, Any]]:
        """Returns the messages from the first to `leaf`, in order; [] if `leaf` is None or unknown."""

        def work(db: sqlite3.Connection) -> list[dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {}
            at = leaf
            while at is not None and at not in found:  # a damaged tree may hold a cycle
                row = db.execute(
                    "SELECT * FROM messages WHERE conversation = ? AND id = ?", (conversation, at)
                ).fetchone()
                if row is None:
                    break
                found[at] = self._read_message(db, row)
                at = row["parent"]
            return list(found.values())[::-1]

        return self.database.read(work)

    def begin(self, conversation: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Adds messages; the last, a running answer, becomes the leaf. Makes a missing title from the first message."""

        def work(db: sqlite3.Connection) -> None:
            for message in messages:
                _insert(db, "messages", {**message, "conversation": conversation})
            fields = {"leaf": messages[-1]["id"], "updated": time.time()}
            _update(db, "conversations", conversation, fields)
            title = _make_title(messages[0]["text"])
            db.execute("UPDATE conversations SET title = ? WHERE id = ? AND title = ''", (title, conversation))

        self._running.add(messages[-1]["id"])  # before the message can be read
        self.database.write(work)

    def resume(self, message: Mapping[str, Any]) -> None:
        """Stores a message whose state is "running" again."""
        self._running.add(message["id"])
        self.database.write(lambda db: _write_message(db, message))

    def append(self, one: str, piece: Mapping[str, Any]) -> None:
        """Appends `piece` to a running message; does nothing if the message no longer exists.

        piece: what to append to the message's strings "text" and "reasoning" and to its lists "tokens" and "learned".
        """
        text = json.dumps(piece, ensure_ascii=False)
        query = "INSERT INTO pieces (message, piece) SELECT id, ? FROM messages WHERE id = ?"
        self.database.write(lambda db: db.execute(query, (text, one)))

    def finish(self, conversation: str, message: Mapping[str, Any]) -> None:
        """Writes a finished message. If that fails, the message ends with what was written before."""

        def work(db: sqlite3.Connection) -> None:
            _write_message(db, message)
            _update(db, "conversations", conversation, {"updated": time.time()})

        try:
            self.database.write(work)
        finally:
            self._running.discard(message["id"])

    def add(self, conversations: Sequence[Mapping[str, Any]]) -> None:
        """Adds whole conversations with their messages, in one transaction."""

        def work(db: sqlite3.Connection) -> None:
            for one in conversations:
                _insert(db, "conversations", {name: one[name] for name in ("id", "created", "updated", *FIELDS)})
                for message in one["messages"]:
                    _insert(db, "messages", {**message, "conversation": one["id"]})

        self.database.write(work)

    def _cut_unfinished_messages(self) -> None:
        query = "SELECT * FROM messages WHERE state = 'running'"
        for row in self.database.read(lambda db: db.execute(query).fetchall()):
            self.database.write(lambda db, row=row: _write_message(db, self._read_message(db, row)))

    def _read_message(self, db: sqlite3.Connection, row: sqlite3.Row) -> dict[str, Any]:
        """Returns a row as a message. A running message that nobody writes any more has the state "cut"."""
        found = _decode_row(row)
        del found["n"], found["conversation"], found["writer"]
        if found["state"] == "running":
            for (piece,) in db.execute("SELECT piece FROM pieces WHERE message = ? ORDER BY n", (found["id"],)):
                extend_message(found, _parse_value(piece, dict) or {})
            if found["id"] not in self._running:
                found |= {"state": "cut", "reason": CUT}
        return found


def _read_conversation(db: sqlite3.Connection, one: str) -> dict[str, Any] | None:
    row = db.execute("SELECT * FROM conversations WHERE id = ?", (one,)).fetchone()
    return None if row is None else _decode_row(row)


def extend_message(message: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Appends `piece`, which has the fields described in `Store.append`, to `message`."""
    before = message["text"]
    message["text"] += piece.get("text", "")
    message["reasoning"] += piece.get("reasoning", "")
    message["learned"] += piece.get("learned", [])
    if tokens := piece.get("tokens"):
        if message["tokens"] is None:
            message["tokens"] = [{"t": before}] if before else []
        message["tokens"] += tokens
    elif message["tokens"] is not None and piece.get("text"):
        message["tokens"].append({"t": piece["text"]})


def _write_message(db: sqlite3.Connection, message: Mapping[str, Any]) -> None:
    """Writes the fields of a message that an answer changes, and deletes the pieces that `Store.append` collected."""
    names = ("text", "reasoning", "state", "reason", "tokens", "figures", "learned", "model")
    _update(db, "messages", message["id"], {name: _encode_value(name, message[name]) for name in names})
    db.execute("DELETE FROM pieces WHERE message = ?", (message["id"],))


def _decode_row(row: Any) -> dict[str, Any]:
    found = dict(row)
    for name in found.keys() & _AS_JSON.keys():
        kind: type[Any] = _AS_JSON[name]
        value = None if found[name] is None else _parse_value(found[name], kind)
        found[name] = kind() if value is None and name not in _MAY_BE_NONE else value
    return found | ({"pinned": bool(found["pinned"])} if "pinned" in found else {})


def _parse_value(text: str, kind: type[Some]) -> Some | None:
    """Returns the value of the JSON `text`; None if `text` is not JSON or the value is not an instance of `kind`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kind) else None


def _encode_value(name: str, value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if name in _AS_JSON and value is not None else value


def _insert(db: sqlite3.Connection, table: str, fields: Mapping[str, Any]) -> None:
    values = [_encode_value(name, value) for name, value in fields.items()]
    db.execute(f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({', '.join('?' * len(fields))})", values)


def _update(db: sqlite3.Connection, table: str, one: str, fields: Mapping[str, Any]) -> None:
    if fields:
        names = ", ".join(f"{name} = ?" for name in fields)
        db.execute(f"UPDATE {table} SET {names} WHERE id = ?", (*fields.values(), one))


def _make_title(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST_TITLE else words[: _LONGEST_TITLE - 1].rstrip() + "…"
