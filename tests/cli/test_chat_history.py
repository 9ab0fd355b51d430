"""The file of what was typed in earlier chats."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from mlx_zip.cli.chat import terminal
from mlx_zip.cli.chat.terminal import TypedHistory


@pytest.fixture
def file(tmp_path):
    return tmp_path / "folder" / "typed.jsonl"


def lines(file):
    """The messages in a file, the newest first, and the warnings."""
    warnings = []
    return list(TypedHistory(file, warnings.append).load_history_strings()), warnings


def test_messages_come_back_newest_first_with_all_their_lines_and_characters(file):
    typed = TypedHistory(file, pytest.fail)
    for text in ("one", "two\nlines", "\udcff ☃ \x1b"):
        typed.append_string(text)
    assert lines(file) == (["\udcff ☃ \x1b", "two\nlines", "one"], [])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_others_could_read_is_closed_to_them(file):
    file.parent.mkdir()
    file.touch(mode=0o644)
    TypedHistory(file, pytest.fail).append_string("one")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_damaged_lines_are_left_out(file):
    file.parent.mkdir()
    file.write_bytes(b'"one"\n{\n\xff\n[1]\n\n"two"\n"half')
    assert lines(file) == (["two", "one"], [])


def test_a_very_long_message_is_not_kept(file):
    TypedHistory(file, pytest.fail).append_string("x" * (terminal.MOST_CHARACTERS + 1))
    assert not file.exists()


def test_the_older_half_of_a_large_file_is_dropped(file, monkeypatch):
    monkeypatch.setattr(terminal, "MOST_BYTES", 100)
    typed = TypedHistory(file, pytest.fail)
    for n in range(20):
        typed.append_string(f"message {n}")
    kept, _ = lines(file)
    assert kept == [f"message {n}" for n in range(19, 9, -1)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_used_is_told_once(tmp_path):
    warnings = []
    typed = TypedHistory(tmp_path, warnings.append)
    assert list(typed.load_history_strings()) == []
    typed.append_string("one")
    typed.append_string("two")
    assert len(warnings) == 1
    assert warnings[0].startswith(f"what you type is not kept: {tmp_path}: ")


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/full")])
def test_a_pipe_or_a_device_in_its_place_is_told_and_not_read(tmp_path, make):
    file = tmp_path / "typed.jsonl"
    make(file)
    warnings = []
    reading = threading.Thread(target=lambda: warnings.extend(lines(file)[1]), daemon=True)
    reading.start()
    reading.join(10)
    assert not reading.is_alive()
    assert warnings == [f"what you type is not kept: {file}: is a folder or device, not a file"]
