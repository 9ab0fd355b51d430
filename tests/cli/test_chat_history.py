"""The file of what was typed in earlier chats."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from mlx_zip.cli.chat import terminal
from mlx_zip.cli.chat.terminal import open_history


@pytest.fixture
def file(tmp_path):
    return tmp_path / "folder" / "typed"


def lines(file):
    """The messages in a file, the newest first, and the warnings."""
    warnings = []
    return list(open_history(file, warnings.append).load_history_strings()), warnings


def test_messages_come_back_newest_first_with_all_their_lines_and_characters(file):
    typed = open_history(file, pytest.fail)
    for text in ("one", "two\n\n# lines\n+", "\udcff \u2603 \x1b"):
        typed.append_string(text)
    assert lines(file) == (["\ufffd \u2603 \x1b", "two\n\n# lines\n+", "one"], [])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_others_could_read_is_closed_to_them(file):
    file.parent.mkdir()
    file.touch(mode=0o644)
    open_history(file, pytest.fail)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_damaged_lines_are_left_out(file):
    file.parent.mkdir()
    file.write_bytes(b'+one\n"{\n\xff\n+two\n')
    assert lines(file) == (["two", "one"], [])


def test_a_very_long_message_is_not_kept(file):
    typed = open_history(file, pytest.fail)
    typed.append_string("x" * (terminal.MOST_CHARACTERS + 1))
    assert file.stat().st_size == 0


def test_the_older_half_of_a_large_file_is_dropped(file, monkeypatch):
    typed = open_history(file, pytest.fail)
    for n in range(20):
        typed.append_string(f"message {n:2}")
    monkeypatch.setattr(terminal, "MOST_BYTES", 100)
    kept, _ = lines(file)
    assert kept == [f"message {n:2}" for n in range(19, 19 - len(kept), -1)]
    assert 9 <= len(kept) <= 10
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_used_is_told_once(tmp_path):
    warnings = []
    typed = open_history(tmp_path, warnings.append)
    assert list(typed.load_history_strings()) == []
    typed.append_string("one")
    assert len(warnings) == 1
    assert warnings[0].startswith(f"what you type is not kept: {tmp_path}: ")


def test_a_message_that_cannot_be_written_is_told_and_comes_back_in_this_chat(file):
    warnings = []
    typed = open_history(file, warnings.append)
    file.unlink()
    file.symlink_to("/dev/full")
    typed.append_string("one")
    assert warnings == [f"what you type is not kept: {file}: No space left on device"]
    assert typed.get_strings() == ["one"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/full")])
def test_a_pipe_or_a_device_in_its_place_is_told_and_not_read(tmp_path, make):
    file = tmp_path / "typed"
    make(file)
    warnings = []
    reading = threading.Thread(target=lambda: warnings.extend(lines(file)[1]), daemon=True)
    reading.start()
    reading.join(10)
    assert not reading.is_alive()
    assert warnings == [f"what you type is not kept: {file}: is a folder or device, not a file"]
