"""What is kept of conversations: over crashes, full disks, damaged and foreign files, other versions."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlx_zip.apps.chat import database, running_answers
from mlx_zip.apps.chat.database import StoreError
from mlx_zip.apps.chat.running_answers import new_message
from mlx_zip.apps.chat.store import CUT, Store
from support.chat_app import chatting
from support.chat_stream import writing
from support.fake_engine import FakeEngine, Script


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "c.db"


def filled(store: Store, text: str = "Once upon a time", title: str = "A story") -> str:
    """A conversation with a question and an answer."""
    one = store.create({"title": title})["id"]
    user = new_message("user", None, "Tell me.")
    answer = new_message("assistant", user["id"], "")
    store.begin(one, [user, answer])
    store.finish(one, answer | {"text": text, "state": "whole"})
    return one


def texts(store: Store, one: str) -> list[tuple[str, str]]:
    found = store.conversation(one)
    assert found is not None
    return [(message["state"], message["text"]) for message in found["messages"]]


def closed(file: Path) -> str:
    """Fills a database, closes it, and returns the conversation's id."""
    store = Store(file)
    one = filled(store)
    store.close()
    return one


def test_only_its_owner_can_read_what_is_kept(file):
    store = Store(file)
    filled(store)
    modes = {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()}
    store.close()
    assert {"c.db", "c.db-wal", "c.db-shm"} <= modes.keys()
    assert set(modes.values()) == {0o600}
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_others_could_read_is_closed_to_them(file):
    one = closed(file)
    file.chmod(0o644)
    store = Store(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert texts(store, one)
    store.close()


def test_nothing_is_on_disk_without_history(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store(None)
    one = filled(store)
    assert len(texts(store, one)) == 2
    assert store.database.path is None
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_answer_whose_process_was_killed_is_cut_and_nothing_else_is_lost(file):
    before = closed(file)
    with writing(file) as one:
        time.sleep(1.2)
    store = Store(file)
    assert store.database.note is None
    found = store.conversation(one)
    assert found is not None
    question, answer = found["messages"]
    assert (found["title"], question["state"], question["text"]) == ("A boat", "whole", "Tell me a story.")
    assert (answer["state"], answer["reason"]) == ("cut", CUT)
    assert len(answer["text"]) > 60
    assert "".join(token["t"] for token in answer["tokens"]) == answer["text"]
    assert texts(store, before) == [("whole", "Tell me."), ("whole", "Once upon a time")]
    assert [one["id"] for one in store.conversations("boat")["conversations"]] == [one]
    store.close()


def test_a_file_that_another_app_has_open_is_refused_until_that_app_is_killed(file):
    link = file.parent.parent / "link.db"
    link.symlink_to(file)
    with writing(file) as one:
        for path in (file, link):
            with pytest.raises(StoreError, match=f"{file.name}: another mlx_zip app has these conversations open"):
                Store(path)
    store = Store(file)
    assert texts(store, one)[1][0] == "cut"
    store.close()


def damaged(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096:40960] = b"\x5a" * (40960 - 4096)
    file.write_bytes(data)


def no_database(file: Path) -> None:
    file.write_bytes(b"These are my notes, and no database. " * 200)


def foreign(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as db:
        db.execute("CREATE TABLE recipes (name)")
        db.execute("INSERT INTO recipes VALUES ('cake')")
    db.close()


@pytest.mark.parametrize(
    ("spoil", "reason"), [(damaged, "damaged"), (no_database, "no database"), (foreign, "another program")]
)
def test_what_is_no_sound_database_is_kept_aside_and_a_new_one_begun(file, spoil, reason):
    closed(file)
    spoil(file)
    before = file.read_bytes()
    store = Store(file)
    assert reason in store.database.note
    (kept,) = [path for path in file.parent.iterdir() if ".kept-" in path.name]
    assert kept.name in store.database.note
    assert kept.read_bytes() == before
    assert len(texts(store, filled(store))) == 2
    store.close()
    again = Store(file)
    assert (again.database.note, again.conversations()["total"]) == (None, 1)
    again.close()


def test_the_page_is_told_what_was_kept_aside(file):
    closed(file)
    no_database(file)
    with chatting(file=file) as chat:
        assert "no database" in chat.call("GET", "state").json["storage"]["note"]


def test_a_damaged_file_that_another_app_has_open_is_refused_and_not_moved(file):
    closed(file)
    user = Store(file)
    damaged(file)
    with pytest.raises(StoreError, match="another mlx_zip app"):
        Store(file)
    assert not [path for path in file.parent.iterdir() if ".kept-" in path.name]
    user.close()


def test_a_database_of_another_version_is_refused_and_stays_as_it_is(file):
    closed(file)
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="version 99"):
        Store(file)
    with sqlite3.connect(file) as db:
        assert db.execute("SELECT count(*) FROM conversations").fetchone() == (1,)
    db.close()


def test_pinned_conversations_come_first_then_folders_by_name_then_the_others(file):
    store = Store(file)
    ids = {title: store.create({"title": title})["id"] for title in ("zoo", "ape", "old", "pin", "new")}
    times = {one: store.conversation(one)["updated"] for one in ids.values()}
    store.change(ids["zoo"], {"folder": "Zoo"})
    store.change(ids["ape"], {"folder": "animals"})
    store.change(ids["pin"], {"pinned": True})
    found = store.conversations()["conversations"]
    assert [one["title"] for one in found] == ["pin", "ape", "zoo", "new", "old"]
    assert [(one["pinned"], one["folder"]) for one in found[:3]] == [(True, ""), (False, "animals"), (False, "Zoo")]
    assert {one["id"]: one["updated"] for one in found} == times
    assert [one["title"] for one in store.conversations("o")["conversations"]] == ["old", "zoo"]
    store.close()


def test_the_tables_are_made_whole_or_not_at_all(monkeypatch):
    whole = database._STATEMENTS
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        monkeypatch.setattr(database, "_STATEMENTS", (*whole, "nonsense"))
        with pytest.raises(sqlite3.OperationalError):
            database.make_tables(db)
        assert database.schema_version(db) == db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        monkeypatch.setattr(database, "_STATEMENTS", whole)
        database.make_tables(db)
        assert database.schema_version(db) == database.VERSION


def test_messages_that_are_each_other_s_parents_end_a_path_and_not_the_program(file):
    store = Store(file)
    one = filled(store)
    first, second = [found["id"] for found in store.conversation(one)["messages"]]
    store.database.write(lambda db: db.execute("UPDATE messages SET parent = ? WHERE id = ?", (second, first)))
    assert [found["id"] for found in store.path(one, second)] == [first, second]
    store.close()


def grow(store: Store, pages: int | None) -> None:
    """Lets the file have some more pages, None for no bound."""
    now = store.database._db.execute("PRAGMA page_count").fetchone()[0]
    store.database._db.execute(f"PRAGMA max_page_count = {now + pages if pages is not None else 1 << 30}")


def test_what_finds_no_room_is_not_stored_and_changes_nothing(file):
    store = Store(file)
    one = filled(store)
    grow(store, 2)
    with pytest.raises(StoreError, match=r"c\.db cannot be written: the disk is full; make room"):
        store.add([store.conversation(one) | {"id": "two", "title": "A long story. " * 50_000}])
    assert store.conversations()["total"] == 1
    grow(store, None)
    two = filled(store)
    store.close()
    again = Store(file)
    assert {found["id"] for found in again.conversations()["conversations"]} == {one, two}
    again.close()


def refuse_to_write(*_: object) -> None:
    raise sqlite3.OperationalError("something is amiss")


def test_an_answer_whose_next_part_cannot_be_stored_ends_with_the_error(file, monkeypatch):
    engine = FakeEngine(Script(text="Once upon a time there was a boat. " * 100, delay_s=0.02))
    monkeypatch.setattr(running_answers, "WRITE_S", 0.05)
    with chatting(engine, file) as chat:
        one = chat.create()["id"]
        monkeypatch.setattr(chat.store, "append", lambda *_: chat.store.database.write(refuse_to_write))
        frames = chat.answer(one, text="Tell me a story.")
        assert (frames[-1]["type"], frames[-1]["state"]) == ("error", "failed")
        assert "c.db cannot be written: something is amiss" in frames[-1]["message"]
        written = engine_text(frames)
        assert 0 < len(written) < 100 * len("Once upon a time there was a boat. ")
        assert texts(chat.store, one)[1] == ("failed", written)


def test_an_answer_whose_end_cannot_be_stored_is_cut_after_the_part_that_was(file, monkeypatch):
    engine = FakeEngine(Script(text="Once upon a time there was a boat. " * 20, delay_s=0.008))
    monkeypatch.setattr(running_answers, "WRITE_S", 0.05)
    with chatting(engine, file) as chat:
        one = chat.create()["id"]
        with monkeypatch.context() as patched:
            patched.setattr("mlx_zip.apps.chat.store._write_message", refuse_to_write)
            frames = chat.answer(one, text="Tell me a story.")
        assert (frames[-1]["type"], frames[-1]["state"]) == ("error", "failed")
        assert "c.db cannot be written: something is amiss" in frames[-1]["message"]
        state, text = texts(chat.store, one)[1]
        assert state == "cut"
        assert text
        assert engine_text(frames).startswith(text)
        assert chat.said(one, "Go on.", chat.show(one)["messages"][1]["id"])["state"] == "whole"


def test_an_answer_is_never_shown_as_cut_while_it_is_written(monkeypatch):
    store, seen = Store(None), []
    one, write = filled(store), store.database.write
    answer = store.conversation(one)["messages"][-1]

    def see() -> None:
        seen.append(store.conversation(one)["messages"][-1]["state"])

    def write_and_see(work):
        see()
        write(work)
        see()

    monkeypatch.setattr(store.database, "write", write_and_see)
    store.resume(answer | {"state": "running"})
    store.finish(one, answer)
    question = new_message("user", answer["id"], "Another one.")
    store.begin(one, [question, new_message("assistant", question["id"], "")])
    assert seen == ["whole", "running", "running", "whole", "whole", "running"]


def engine_text(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["text"] for frame in frames if frame["type"] == "text")


@pytest.mark.parametrize("place", ["file/c.db", "pipe", "folder"])
def test_a_place_where_nothing_can_be_kept_is_refused_with_its_reason(tmp_path, place):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match=place):
        Store(tmp_path / place)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_file_that_cannot_be_opened_to_write_is_refused_with_its_reason_and_stays(file, monkeypatch, code):
    closed(file)
    before = file.read_bytes()

    def refuse(path: object, *_: object) -> int:
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match=rf"c\.db: {os.strerror(code)}"):
            Store(file)
    assert file.read_bytes() == before


def test_threads_write_at_once_and_lose_nothing(file):
    store = Store(file)
    made: list[str] = []

    def work() -> None:
        made.extend(filled(store, f"Story {i}") for i in range(25))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 75
    assert all(len(texts(store, one)) == 2 for one in made)
    assert store.conversations()["total"] == 75
    store.close()


def test_a_purge_that_cannot_overwrite_the_text_says_that_the_conversations_are_gone(file, monkeypatch):
    store = Store(file)
    filled(store)
    monkeypatch.setattr(database, "_shrink", refuse_to_write)
    with pytest.raises(
        StoreError, match=r"^deleted: 1 conversation; but .*c\.db cannot be cleared.*: something is amiss"
    ):
        store.purge()
    assert store.conversations()["total"] == 0
    store.close()


def test_purge_leaves_no_word_in_any_file(file):
    store = Store(file)
    for i in range(20):
        one = filled(store, f"The zebra number {i} " * 50)
    store.delete(one)
    assert store.purge() == 19
    left = b"".join(path.read_bytes() for path in file.parent.iterdir())
    store.close()
    assert b"zebra" not in left
    assert b"zeb" not in left
