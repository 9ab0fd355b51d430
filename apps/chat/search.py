"""Finds conversations by words in their titles and messages.

A trigram index (FTS5) finds words of three or more characters, in Chinese and Japanese too; for shorter words every
text is scanned. With 10,000 messages in 1,000 conversations a search took 5 to 63 ms (medians on a busy two-core
machine), so short words have no index.
"""

from __future__ import annotations

import sqlite3
from typing import Any

MOST_WORDS = 10
SHORTEST = 3  # fewest characters of a word that the index finds
_AROUND = 40  # characters of a snippet before the word that was found
_SNIPPET = 120


def add_search_functions(db: sqlite3.Connection) -> None:
    """Adds the SQL function `holds(text, word)`, which the search queries call, to a connection."""
    db.create_function("holds", 2, _contains, deterministic=True)


def find_conversations(db: sqlite3.Connection, wanted: str, limit: int, offset: int) -> dict[str, Any]:
    """Returns at most `limit` conversations that hold all words of `wanted`, from hit `offset` on, and the hit count.

    The conversations are rows of the database, as dicts, with a snippet. The last changed comes first. If `wanted` is
    empty, pinned conversations come first, then conversations in folders.
    """
    words = wanted.lower().split()[:MOST_WORDS]
    where, values = _search_condition(words)
    order = ("" if words else "pinned DESC, folder = '', lower(folder), folder, ") + "updated DESC, id"
    ids = [row[0] for row in db.execute(f"SELECT id FROM conversations WHERE {where} ORDER BY {order}", values)]
    rows = [(one, _conversation_row(db, one)) for one in ids[offset : offset + limit]]
    listed = [{**dict(row), "snippet": _snippet(db, one, words)} for one, row in rows if row is not None]
    return {"conversations": listed, "total": len(ids)}


def _conversation_row(db: sqlite3.Connection, one: str) -> sqlite3.Row | None:
    """Returns a conversation for the list, None if its id is damaged."""
    return db.execute(
        "SELECT id, title, created, updated, model, packs, pinned, folder, "
        "(SELECT count(*) FROM messages WHERE conversation = conversations.id) AS messages "
        "FROM conversations WHERE id = ?",
        (one,),
    ).fetchone()


def _search_condition(words: list[str]) -> tuple[str, list[str]]:
    conditions, values = ["1"], []
    for word in words:
        condition, value = _word_condition(word)
        texts = f"SELECT conversation FROM messages WHERE {condition}"
        conditions.append(f"(holds(title, ?) OR id IN ({texts}))")
        values += [word, value]
    return " AND ".join(conditions), values


def _word_condition(word: str) -> tuple[str, str]:
    """Returns the fastest exact SQL condition for a message's text to hold `word`, and the condition's parameter."""
    if len(word) >= SHORTEST:
        return "n IN (SELECT rowid FROM words WHERE words MATCH ?)", '"' + word.replace("\0", "").replace(
            '"', '""'
        ) + '"'
    if word == word.upper():  # `word` has no letter with upper and lower case
        return "instr(text, ?)", word
    if word.isascii() and word.isalnum():
        return "text LIKE ?", f"%{word}%"
    return "holds(text, ?)", word


def _contains(text: str, word: str) -> bool:
    return word in text.lower()


def _snippet(db: sqlite3.Connection, conversation: str, words: list[str]) -> str:
    """Returns a snippet of a conversation: around the first hit of a word, else the beginning of the last message."""
    for word in words:
        row = db.execute(
            "SELECT text FROM messages WHERE conversation = ? AND holds(text, ?) ORDER BY n LIMIT 1",
            (conversation, word),
        ).fetchone()
        if row is not None:
            return cut_around(row["text"], word)
    row = db.execute(
        "SELECT substr(text, 1, ?) AS text FROM messages WHERE conversation = ? AND text <> '' ORDER BY n DESC LIMIT 1",
        (2 * _SNIPPET, conversation),
    ).fetchone()
    return "" if row is None else cut_around(row["text"], "")


def cut_around(text: str, word: str) -> str:
    """Returns at most `_SNIPPET` characters of a text, on one line, around the first hit of a lower-case word."""
    at = max(0, text.lower().find(word))  # approximate: lower-casing seldom changes the length
    begin = max(0, at - _AROUND)
    piece = " ".join(text[begin : begin + _SNIPPET].split())
    return ("…" if begin else "") + piece + ("…" if begin + _SNIPPET < len(text) else "")
