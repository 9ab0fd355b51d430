"""A disk that is really full: a small file system in memory, which only root can mount."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_zip.apps.chat.store import CUT
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.errors import DataError
from support.chat_app import chatting
from support.fake_engine import FakeEngine, Script
from support.http_server import until
from support.slow_cases import slow_but

TEXT = "Once upon a time there was a boat. "


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 16 megabytes. Skips the test, with the reason, where none can be mounted."""
    try:
        words = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    if done.returncode:
        pytest.skip(f"no disk can be mounted: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(disk: Path, room: int = 0) -> Path:
    """Fills the disk up to some bytes, and returns the file to delete."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:  # another thread may write meanwhile
            file.write(bytes(4096))
    os.truncate(ballast, max(0, ballast.stat().st_size - room))
    return ballast


FULL = r"c\.db cannot be written: the disk is full"


@pytest.mark.parametrize("room", slow_but([0, 4096, 40_000], 0))
def test_what_finds_no_room_is_refused_and_all_that_was_stored_stays(disk, room):
    with chatting(FakeEngine(Script(text=TEXT)), disk / "c.db") as chat:
        one = chat.create()["id"]
        before = chat.said(one, "before")
        shown = chat.show(one)
        ballast = fill(disk, room)
        asked = {"parent": before["id"], "text": "a long message " * 60}
        for refused in (
            chat.call("PATCH", f"conversations/{one}", {"draft": TEXT * 10_000}),
            *([] if room else [chat.call("POST", f"conversations/{one}/answer", asked)]),
        ):
            assert refused.status == 500
            assert re.search(FULL, refused.json["error"]["message"])
        assert chat.show(one) == shown
        ballast.unlink()
        chat.said(one, "after", before["id"])
        shown = chat.show(one)
        assert len(shown["messages"]) == 4
    with chatting(file=disk / "c.db") as chat:
        assert chat.show(one) == shown


def test_an_answer_that_finds_no_room_any_more_ends_with_an_error_and_can_be_continued(disk):
    engine = FakeEngine(Script(text=TEXT * 200, delay_s=0.01))
    with chatting(engine, disk / "c.db") as chat:
        one = chat.create()["id"]
        chat.said(one, "before")
        thread = threading.Thread(target=lambda: frames.extend(chat.answer(one, text="A story.")))
        frames: list[dict[str, Any]] = []
        thread.start()
        assert until(lambda: "boat" in chat.show(one)["messages"][-1]["text"])
        ballast = fill(disk)
        thread.join(60)
        assert (frames[-1]["type"], frames[-1]["state"]) == ("error", "failed")
        assert re.search(FULL, frames[-1]["message"])
        question, cut = chat.show(one)["messages"][-2:]
        assert question["text"] == "A story."
        assert (cut["state"], cut["reason"]) in (("cut", CUT), ("failed", frames[-1]["message"]))  # if the end had room
        assert (TEXT * 200).startswith(cut["text"].strip())
        ballast.unlink()
        last = chat.answer(one, parent=cut["id"], **{"continue": True})[-1]["message"]
        assert last["state"] == "whole"
        assert last["text"].startswith(cut["text"].strip())
        assert "".join(token["t"] for token in last["tokens"]) == last["text"]
        shown = chat.show(one)
    with chatting(file=disk / "c.db") as chat:
        assert chat.show(one) == shown


def test_an_app_does_not_start_on_a_full_disk_and_leaves_the_file_as_it_is(disk, run):
    with chatting(file=disk / "c.db") as chat:
        one = chat.create()["id"]
        chat.said(one, "before")
        shown = chat.show(one)
    ballast = fill(disk)
    status, said, error = run("app", "--port", "0", "--data", str(disk / "c.db"))
    assert (status, said, error.count("\n")) == (2, "", 1)
    assert re.search(r"c\.db: the disk is full.*make room.*--data", error)
    ballast.unlink()
    with chatting(file=disk / "c.db") as chat:
        assert chat.show(one) == shown


def test_what_cannot_be_deleted_on_a_full_disk_is_all_there_and_goes_when_there_is_room(disk):
    with chatting(file=disk / "c.db") as chat:
        for _ in range(20):
            chat.said(chat.create()["id"], "private")
        ballast = fill(disk)
        refused = chat.call("DELETE", "conversations")
        assert refused.status == 500
        assert re.search(FULL, refused.json["error"]["message"])
        assert chat.call("GET", "conversations").json["total"] == 20
        ballast.unlink()
        assert chat.call("DELETE", "conversations").json == {"deleted": 20}
    assert b"private" not in (disk / "c.db").read_bytes()


def test_a_conversation_of_the_terminal_that_cannot_be_saved_leaves_nothing_behind(disk):
    fill(disk)
    talk = Conversation(messages=[{"role": "user", "content": TEXT * 1000}])
    with pytest.raises(DataError, match="No space left on device"):
        talk.save(str(disk / "talk"))
    assert [path.name for path in disk.iterdir()] == ["ballast"]
