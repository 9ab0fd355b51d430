"""A disk that is really full: a small file system in memory, which only root can mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_zip.apps.chat import database
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.errors import DataError
from support.chat_app import chatting
from support.fake_engine import FakeEngine, Script
from support.http_server import until
from support.slow_cases import slow_but

TEXT = "Once upon a time there was a boat. "


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of one megabyte. Skips the test, with the reason, where none can be mounted."""
    try:
        words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    if done.returncode:
        pytest.skip(f"no disk can be mounted: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(disk: Path, room: int = 0) -> Path:
    """Fills the disk up to some bytes, and returns the file to delete."""
    free = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - room)))
    return ballast


def problem(chat):
    return chat.call("GET", "state").json["storage"]["problem"]


@pytest.mark.parametrize("room", slow_but([0, 4096, 40_000], 4096))
def test_a_full_disk_ends_no_conversation_and_all_is_in_the_file_when_there_is_room(disk, room, monkeypatch):
    monkeypatch.setattr(database, "IDLE_RETRY_S", 0.2)
    with chatting(FakeEngine(Script(text=TEXT * 100)), disk / "c.db") as chat:
        one = chat.create()["id"]
        before = chat.said(one, "before")
        ballast = fill(disk, room)
        two = chat.create()["id"]
        frames = chat.answer(two, text="a long message " * 60)
        assert frames[-1]["message"]["state"] == "whole"
        told = [frame["message"] for frame in frames if frame["type"] == "storage"]
        assert len(told) == 1
        assert "the disk is full; changes are in memory only" in told[0]
        chat.said(one, "after", before["id"])
        ballast.unlink()
        assert until(lambda: problem(chat) is None)  # with nothing written meanwhile
        shown = [chat.show(name) for name in (one, two)]
    with chatting(file=disk / "c.db") as chat:
        assert [chat.show(name) for name in (one, two)] == shown


def test_an_app_that_starts_on_a_full_disk_writes_to_the_file_when_there_is_room(disk, monkeypatch):
    monkeypatch.setattr(database, "IDLE_RETRY_S", 0.2)
    with chatting(file=disk / "c.db") as chat:
        one = chat.create()["id"]
        first = chat.said(one, "before")
    ballast = fill(disk)
    with chatting(file=disk / "c.db") as chat:
        assert "the disk is full" in problem(chat)
        assert len(chat.show(one)["messages"]) == 2
        chat.said(one, "more", first["id"])
        two = chat.create(title="new")["id"]
        ballast.unlink()
        assert until(lambda: problem(chat) is None)
    with chatting(file=disk / "c.db") as chat:
        assert len(chat.show(one)["messages"]) == 4
        assert chat.show(two)["title"] == "new"


def test_what_is_deleted_after_a_start_on_a_full_disk_goes_when_there_is_room(disk, monkeypatch):
    monkeypatch.setattr(database, "IDLE_RETRY_S", 0.2)
    with chatting(file=disk / "c.db") as chat:
        chat.said(chat.create()["id"], "private")
    ballast = fill(disk)
    with chatting(file=disk / "c.db") as chat:
        assert chat.call("DELETE", "conversations").json["deleted"] == 1
        ballast.unlink()
        assert until(lambda: problem(chat) is None)
        assert chat.call("GET", "conversations").json["total"] == 0
    assert b"private" not in (disk / "c.db").read_bytes()


def test_what_is_deleted_on_a_full_disk_is_told_to_be_there_still_and_goes_when_there_is_room(disk, monkeypatch):
    with chatting(file=disk / "c.db") as chat:
        one, two = chat.create()["id"], chat.create()["id"]
        chat.said(one, "private")
        ballast = fill(disk)
        gone = chat.call("DELETE", "conversations").json
        assert gone["deleted"] == 2
        assert "the disk is full" in gone["problem"]
        ballast.unlink()
    with chatting(file=disk / "c.db") as chat:
        assert chat.call("GET", "conversations").json["total"] == 0
        assert chat.call("GET", f"conversations/{two}").status == 404


def test_a_conversation_of_the_terminal_that_cannot_be_saved_leaves_nothing_behind(disk):
    fill(disk)
    talk = Conversation(messages=[{"role": "user", "content": TEXT * 1000}])
    with pytest.raises(DataError, match="No space left on device"):
        talk.save(str(disk / "talk"))
    assert [path.name for path in disk.iterdir()] == ["ballast"]
