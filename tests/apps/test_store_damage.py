"""A database that is damaged in places, or that another process keeps locked: as much as there is stays readable."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mlx_zip.apps.chat import database
from mlx_zip.apps.chat.running_answers import new_message
from mlx_zip.apps.chat.store import Store
from support.chat_app import chatting
from support.fake_engine import FakeEngine, Script

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


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(database, "RETRY_S", 0.0)
    monkeypatch.setattr("mlx_zip.apps.chat.database_file.PATIENCE_S", 0.05)
    monkeypatch.setattr(database, "PATIENCE_S", 0.05)
    monkeypatch.setattr(database, "RETURN_MS", 1.0)


@pytest.mark.slow
def test_an_answer_in_a_file_that_another_process_keeps_locked_is_kept_in_memory_and_written_later(file, impatient):
    with chatting(FakeEngine(Script(text=TEXT + " there was a boat." * 20, delay_s=0.01)), file) as chat:
        one = chat.create()["id"]
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            frames = chat.answer(one, text="Tell me a story.")
            told = [frame["message"] for frame in frames if frame["type"] == "storage"]
            assert (frames[-1]["type"], len(told)) == ("done", 1)
            assert "another process is writing" in told[0]
            assert [message["state"] for message in chat.show(one)["messages"]] == ["whole", "whole"]
            other.execute("ROLLBACK")
        chat.call("PATCH", f"conversations/{one}", {"title": "A boat"})
        assert chat.call("GET", "state").json["storage"]["problem"] is None
    again = Store(file)
    found = again.conversation(one)
    again.close()
    assert found is not None
    assert (found["title"], found["messages"][1]["text"]) == ("A boat", frames[-1]["message"]["text"])


@pytest.mark.slow
def test_what_is_changed_while_the_file_is_locked_is_written_later(file, impatient):
    store = Store(file)
    one, two = (found["id"] for found in store.conversations()["conversations"])
    with closing(sqlite3.connect(file, isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        store.change(one, {"draft": "And then?"})
        store.delete(two)
        lock.execute("ROLLBACK")
    store.change(one, {"title": "A boat"})
    assert store.database.problem is None
    store.close()
    store = Store(file)
    assert store.conversation(two) is None
    found = store.conversation(one)
    assert found is not None
    assert (found["title"], found["draft"]) == ("A boat", "And then?")
    assert [message["text"] for message in found["messages"]] == ["Tell me.", TEXT]
    store.close()


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_a_file_that_is_removed_while_the_app_runs_is_written_anew(file, gone):
    file = file.rename(file.parent / "c.db") if gone == "file" else moved(file, file.parent / "data")
    store = Store(file)
    third = filled(store)
    for path in file.parent.iterdir():
        path.unlink()
    if gone == "folder":
        file.parent.rmdir()
    store.change(third, {"title": "A boat"})
    assert (store.database.problem, file.stat().st_mode & 0o777) == (None, 0o600)
    store.close()
    again = Store(file)
    assert again.conversations()["total"] == 3
    found = again.conversation(third)
    again.close()
    assert found is not None
    assert (found["title"], found["messages"][1]["text"]) == ("A boat", TEXT)


def moved(file: Path, folder: Path) -> Path:
    """The file in a new folder."""
    folder.mkdir()
    return file.rename(folder / file.name)


def test_a_file_that_is_replaced_while_the_app_runs_gets_the_conversations_of_both(file):
    other = moved(file, file.parent / "other")
    store = Store(file)
    mine = filled(store)
    for path in file.parent.glob("c.db*"):
        path.unlink()
    other.rename(file)
    store.change(mine, {"title": "Mine"})
    assert store.database.problem is None
    assert store.conversations()["total"] == 3
    store.close()


def test_a_place_that_takes_no_file_any_more_is_told_and_the_file_is_written_when_it_does(file, monkeypatch):
    monkeypatch.setattr(database, "RETRY_S", 0.0)
    store = Store(file)
    for path in file.parent.glob("c.db*"):
        path.unlink()
    file.mkdir()
    third = filled(store)
    assert "folder" in str(store.database.problem)
    assert "lost when the app ends" in str(store.database.problem)
    assert store.conversations()["total"] == 3
    file.rmdir()
    store.change(third, {"draft": "And then?"})
    assert store.database.problem is None
    store.close()
    again = Store(file)
    assert again.conversations()["total"] == 3
    again.close()


@pytest.mark.slow
def test_a_purge_while_the_file_is_locked_leaves_no_word_in_it(file, impatient):
    store = Store(file)
    with closing(sqlite3.connect(file, isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        assert store.purge() == 2
        lock.execute("ROLLBACK")
    store.create({"title": "A new one"})
    assert store.database.problem is None
    assert not any(TEXT.encode() in path.read_bytes() for path in file.parent.iterdir())
    store.close()
