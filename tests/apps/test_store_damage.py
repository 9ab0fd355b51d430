"""A database that is damaged in places, or that another process keeps locked: as much as there is stays readable."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mlx_zip.apps.chat.database import StoreError
from mlx_zip.apps.chat.running_answers import new_message
from mlx_zip.apps.chat.store import Store

TEXT = "Once upon a time"


def filled(store: Store) -> str:
    """A conversation with a question and an answer."""
    one = store.create({"title": "A story"})["id"]
    user = new_message("user", None, "Tell me.")
    answer = new_message("assistant", user["id"], "")
    store.begin(one, [user, answer])
    store.finish(one, answer | {"text": TEXT, "state": "whole", "tokens": [{"t": TEXT}], "figures": {"steps": 1}})
    return one


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database of two conversations."""
    file = tmp_path / "c.db"
    store = Store(file)
    filled(store)
    filled(store)
    store.close()
    return file


def spoil(file: Path, *statements: str) -> None:
    """Changes the database from outside."""
    with closing(sqlite3.connect(file)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def test_a_text_that_is_no_utf8_is_shown_with_replacement_characters_and_hides_no_other(file):
    spoil(file, "UPDATE messages SET text = CAST(x'4f6e6365ff' AS TEXT) WHERE n = 2")
    store = Store(file)
    listed = store.conversations()["conversations"]
    assert (len(listed), store.database.note) == (2, None)
    answers = [found["messages"][1]["text"] for found in store.everything()]
    assert sorted(answers) == [TEXT, "Once\ufffd"]
    store.close()


@pytest.mark.parametrize("damaged", ["{", "7", '"text"', "[" * 100_000])
def test_a_damaged_field_counts_as_empty_and_hides_no_conversation(file, damaged):
    spoil(
        file,
        f"UPDATE conversations SET packs = '{damaged}', sampling = '{damaged}'",
        f"UPDATE messages SET tokens = '{damaged}', figures = '{damaged}', learned = '{damaged}'",
    )
    store = Store(file)
    assert [found["packs"] for found in store.conversations()["conversations"]] == [[], []]
    for found in store.everything():
        assert (found["packs"], found["sampling"]) == ([], {})
        answer = found["messages"][1]
        assert (answer["text"], answer["tokens"], answer["figures"], answer["learned"]) == (TEXT, None, None, [])
    store.close()


def test_a_conversation_whose_id_is_damaged_hides_no_other(file):
    spoil(
        file,
        "PRAGMA foreign_keys = OFF",
        "UPDATE conversations SET id = CAST(x'ff' AS TEXT) WHERE id = (SELECT min(id) FROM conversations)",
    )
    store = Store(file)
    assert len(store.conversations()["conversations"]) == len(store.everything()) == 1
    store.close()


def test_a_damaged_index_is_built_anew_when_the_database_is_opened(file):
    spoil(
        file,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = 'CREATE INDEX messages_of ON messages (n, conversation)' "
        "WHERE name = 'messages_of'",
    )
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA quick_check").fetchone()[0] == "ok"
        assert db.execute("PRAGMA integrity_check").fetchone()[0] != "ok"
    store = Store(file)
    assert store.database.note is None
    assert [len(found["messages"]) for found in store.everything()] == [2, 2]
    store.close()
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_a_damaged_index_of_texts_is_built_anew_when_it_is_needed(file):
    spoil(file, "UPDATE words_data SET block = x'00ff00ff00ff' WHERE id > 10")
    store = Store(file)
    assert store.conversations("upon")["total"] == 2
    spoil(file, "UPDATE words_data SET block = x'00ff00ff00ff' WHERE id > 10")
    third = filled(store)
    assert store.conversations("upon")["total"] == 3
    assert store.delete(third)
    store.close()


def test_an_index_of_texts_that_is_built_anew_leaves_out_running_answers(file):
    store = Store(file)
    one = filled(store)
    found = store.conversation(one)
    assert found is not None
    answer = found["messages"][-1]
    store.resume(answer | {"state": "running"})
    spoil(file, "UPDATE words_data SET block = x'00ff00ff00ff' WHERE id > 10")
    assert store.conversations("upon")["total"] == 2
    store.finish(one, answer | {"text": "Something else"})
    assert store.conversations("upon")["total"] == 2
    assert store.conversations("else")["total"] == 1
    store.close()


def test_a_schema_that_cannot_be_read_is_kept_aside(file):
    data = bytearray(file.read_bytes())
    place = data.index(b"CREATE TABLE messages")
    data[place - 12 : place + 12] = b"\xbf" * 24  # SQLite's message quotes the name before
    file.write_bytes(data)
    store = Store(file)
    assert "damaged" in store.database.note
    (kept,) = [path for path in file.parent.iterdir() if ".kept-" in path.name]
    assert kept.read_bytes() == data
    store.close()


@pytest.mark.parametrize("statement", ["DROP TABLE pieces", "PRAGMA user_version = 0", "PRAGMA user_version = -1"])
def test_a_database_without_its_tables_is_kept_aside(file, statement):
    spoil(file, statement)
    store = Store(file)
    assert "tables are missing" in store.database.note
    assert len(store.everything()) == 0
    filled(store)
    store.close()


def test_a_file_that_another_process_keeps_locked_is_not_written(file, monkeypatch):
    monkeypatch.setattr("mlx_zip.apps.chat.database.PATIENCE_S", 0.05)
    store = Store(file)
    (one, *_) = (found["id"] for found in store.conversations()["conversations"])
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"c\.db cannot be written: another process is writing"):
            store.change(one, {"title": "A boat"})
        other.execute("ROLLBACK")
    assert store.conversation(one)["title"] == "A story"
    assert store.change(one, {"title": "A boat"})["title"] == "A boat"
    store.close()


@pytest.mark.parametrize("gone", ["file", "folder", "replaced"])
def test_a_file_that_is_removed_or_replaced_while_the_app_runs_is_told_and_all_stays_readable(file, tmp_path, gone):
    file = file.rename(tmp_path / "data.db") if gone != "folder" else moved(file, tmp_path / "data")
    store = Store(file)
    third = filled(store)
    for path in file.parent.glob(f"{file.name}*"):
        path.unlink()
    if gone == "folder":
        file.parent.rmdir()
    if gone == "replaced":
        file.write_bytes(b"")
    with pytest.raises(StoreError, match=f"{file.name} has been removed or replaced.*start the app again"):
        store.change(third, {"title": "A boat"})
    assert sorted(found["title"] for found in store.everything()) == ["A story"] * 3
    store.close()


def moved(file: Path, folder: Path) -> Path:
    """The file in a new folder."""
    folder.mkdir()
    return file.rename(folder / file.name)
