"""`mlx_zip chat` in a pseudo-terminal, as people use it: keys, history, Ctrl-C, a terminal that is resized."""

from __future__ import annotations

import json
import re
import stat
import sys
import termios
import time
from contextlib import contextmanager

import pytest

from support.chat_child import ForkedChat
from support.places import REPO
from support.pseudo_terminal import PseudoTerminal

CHILD = REPO / "tests/support/chat_child.py"
READY = r"> .*or /help"  # the prompt, which is empty
LONG = "one two three four five six seven eight nine ten " * 12
STORY = "Once upon a time there was a boat."


@contextmanager
def chat(data, *flags, columns=80, **script):
    """A chat whose user's data folder is `data`, with an engine that replays a script; a model has a new Python."""
    environment = {"XDG_DATA_HOME": str(data), "HOME": str(data), "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
    if model := script.pop("model", None):
        started = PseudoTerminal([sys.executable, str(CHILD), model, *flags], environment, columns)
    else:
        words = [json.dumps({"text": STORY, **script}), *flags]
        started = PseudoTerminal(words, environment, columns, ForkedChat)
    with started as terminal:
        terminal.until(READY)
        yield terminal


def leave(terminal):
    """Ends a chat that waits at an empty prompt."""
    terminal.type("\x04")
    assert terminal.ended() == 0


def history(data):
    return next(data.rglob("chat_history"), None)


def kept(data):
    return [line[1:] for line in history(data).read_text().splitlines() if line.startswith("+")]


@pytest.mark.slow
def test_messages_are_edited_come_back_in_the_next_chat_and_only_their_user_can_read_them(tmp_path):
    with chat(tmp_path) as terminal:
        terminal.type("helXlo\x1b[D\x1b[D\x7f\r")  # two to the left, and the X is gone
        terminal.until("per step")
        terminal.until(READY)
        leave(terminal)
    assert kept(tmp_path) == ["hello"]
    assert stat.S_IMODE(history(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE(history(tmp_path).parent.stat().st_mode) == 0o700
    with chat(tmp_path) as terminal:
        terminal.type("\x1b[A")
        terminal.until("hello")
        terminal.type(" again\r")
        terminal.until("per step")
        terminal.until(READY)
        leave(terminal)
    assert kept(tmp_path) == ["hello", "hello again"]


@pytest.mark.slow
def test_history_can_be_switched_off(tmp_path):
    with chat(tmp_path, "--no-history") as terminal:
        terminal.type("hello\r")
        terminal.until("per step")
        terminal.until(READY)
        leave(terminal)
    assert history(tmp_path) is None


@pytest.mark.slow
def test_a_history_that_cannot_be_written_is_one_line_and_the_chat_goes_on(tmp_path):
    (tmp_path / "mlx_zip").write_text("a file")
    with chat(tmp_path) as terminal:
        assert terminal.said.count("error: what you type is not kept: ") == 1
        terminal.type("hello\r")
        terminal.until("per step")
        terminal.until(READY)
        leave(terminal)


def saved(terminal, tmp_path):
    """The messages of the conversation, by /save."""
    terminal.type(f"/save {tmp_path}/talk\r")
    terminal.until("saved in")
    terminal.until(READY)
    return [one["content"] for one in json.loads((tmp_path / "talk.jsonl").read_text())["messages"]]


@pytest.mark.slow
def test_alt_enter_begins_a_line_and_pasted_lines_are_one_message(tmp_path):
    with chat(tmp_path) as terminal:
        terminal.type("one\x1b\rtwo\x1b[200~three\r\nfour\x1b[201~\r")
        terminal.until("per step")
        terminal.until(READY)
        assert saved(terminal, tmp_path)[0] == "one\ntwothree\nfour"


@pytest.mark.slow
def test_a_huge_paste_is_shown_as_its_size_and_sent_whole(tmp_path):
    paste = "word " * 200_000
    with chat(tmp_path) as terminal:
        terminal.type("a \x1b[200~" + paste + "\x1b[201~ b")
        terminal.until(r"\[paste 1: 1,000,000 characters\]")
        terminal.type("\r")
        terminal.until("error: .*/reset begins a new conversation")  # longer than the context
        terminal.until(READY)
        terminal.type("\x1b[A\r")  # what was refused comes back whole
        terminal.until("error: .*/reset begins a new conversation")
        terminal.until(READY)
        terminal.type("\x1b[200~" + "word " * 500 + "\x1b[201~\r")
        terminal.until("per step")
        terminal.until(READY)
        assert saved(terminal, tmp_path)[0] == "word " * 500


@pytest.mark.slow
def test_bytes_that_are_not_utf8_become_replacement_characters(tmp_path):
    with chat(tmp_path) as terminal:
        terminal.type(b"a \xff b\r")
        terminal.until("per step")
        terminal.until(READY)
        assert saved(terminal, tmp_path)[0] == "a \ufffd b"


def test_ctrl_c_stops_an_answer_which_is_kept_and_the_chat_goes_on(tmp_path):
    with chat(tmp_path, text=LONG, delay_s=0.05) as terminal:
        terminal.type("hello\r")
        terminal.until("one two three")
        terminal.type("\x03")
        terminal.until("stopped; the answer so far is kept")
        terminal.until(READY)
        _, answer = saved(terminal, tmp_path)
        assert answer.startswith("one two three")
        assert LONG.startswith(answer)
        assert len(answer) < len(LONG)
        leave(terminal)


@pytest.mark.slow
def test_ctrl_c_clears_a_message_and_twice_at_an_empty_prompt_ends_the_chat(tmp_path):
    with chat(tmp_path) as terminal:
        terminal.type("some words")
        terminal.until("some words")
        terminal.type("\x03")
        terminal.until(READY)
        terminal.type("\x03")
        terminal.until("Ctrl-C again, or Ctrl-D, ends the chat")
        terminal.until(READY)
        terminal.type("\x03")
        assert terminal.ended() == 0


@pytest.mark.slow
def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(tmp_path):
    with chat(tmp_path, text=LONG, delay_s=0.01) as terminal:
        terminal.type("hello\r")
        terminal.until("one two")
        terminal.type("/stats\r")
        terminal.until("ten[^/]*per step.*/stats.*last answer")
        assert "/stats" not in re.search(r"one two.*per step", terminal.shown, re.DOTALL)[0].split("per step")[0]


@pytest.mark.slow
def test_a_terminal_that_is_resized_during_an_answer_wraps_at_its_new_width(tmp_path):
    with chat(tmp_path, text=LONG, delay_s=0.01, columns=80) as terminal:
        terminal.type("hello\r")
        terminal.until("one two three")
        terminal.resize(40)
        terminal.until("per step")
        terminal.until(READY)
        answer = re.search(r"one two.*ten", terminal.shown, re.DOTALL)[0]
        assert " ".join(answer.split()) == LONG.strip()
        lengths = [len(line) for line in answer.split("\n")]
        assert max(lengths) <= 80
        assert max(lengths[3:]) <= 40
        leave(terminal)


@pytest.mark.slow
def test_retry_asks_again_and_markdown_and_colours_are_shown(tmp_path):
    with chat(tmp_path, text="# Title\n\n**bold** and `code`\n", ends=False) as terminal:
        terminal.type("hello\r")
        terminal.until("Title\n\nbold and code\n.*per step")
        terminal.until(READY)
        assert "\x1b[36m" in terminal.said.split("hello")[-1]  # an id of two base tokens
        terminal.type("/colours\r")
        terminal.until("hypertokens are not coloured")
        terminal.until(READY)
        before = len(terminal.said)
        terminal.type("/retry\r")
        terminal.until("Title\n\nbold and code\n.*per step")
        assert "\x1b[36m" not in terminal.said[before:]
        terminal.until(READY)
        assert len(saved(terminal, tmp_path)) == 2


@pytest.mark.slow
def test_plain_leaves_markdown_as_it_is(tmp_path):
    with chat(tmp_path, "--plain", text="**bold**", ends=False) as terminal:
        terminal.type("hello\r")
        terminal.until(r"\*\*bold\*\*")


@pytest.mark.slow
def test_control_sequences_in_answers_and_loaded_files_are_pictures(tmp_path):
    bad = "a \x1b]0;owned\x07 b \x1b[2J c \x9b2J d"
    (tmp_path / "bad.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": bad}, {"role": "assistant", "content": bad}]}) + "\n"
    )
    with chat(tmp_path, text=bad, ends=False) as terminal:
        terminal.type("hello\r")
        terminal.until("d\n.*per step")
        terminal.until(READY)
        terminal.type(f"/load {tmp_path}/bad.jsonl\r")
        terminal.until("loaded 2 messages.*d\n.*d\n")
        terminal.until(READY)
        assert "owned" in terminal.shown
        for sequence in ("\x1b]0;owned", "\x1b[2J", "\x9b"):
            assert sequence not in terminal.said
        assert terminal.said.count("␛]0;owned␇") == 3
        leave(terminal)


@pytest.mark.slow
def test_commands_and_file_names_are_completed(tmp_path):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    with chat(tmp_path) as terminal:
        terminal.type("/sta")
        terminal.until("show base tokens per step")  # the menu
        terminal.type("\t")
        terminal.until("ts")
        terminal.type("\r")
        terminal.until("no answer yet")
        terminal.until(READY)
        terminal.type(f"/load {tmp_path}/ta")
        terminal.until("talk.jsonl")
        terminal.type("\t")
        time.sleep(0.3)
        terminal.type("\r")
        terminal.until("nothing has answered the last message")


@pytest.mark.slow
def test_the_vocabulary_of_the_bundled_model_is_listed_and_in_the_help(tmp_path):
    with chat(tmp_path, "--max-tokens", "60", model="stories") as terminal:
        terminal.type("/help\r")
        terminal.until("/vocabulary .*show the hypertokens")
        terminal.until(READY)
        terminal.type("Tell me a story about a frog.\r")
        terminal.until("per step")
        terminal.until(READY)
        terminal.type("/vocabulary\r")
        terminal.until(r"most used of \d+ hypertokens.*\n +\d+x  (pack|prompt|answer) +\S+ \| \S+")
        terminal.until(READY)
        leave(terminal)


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_chat(tmp_path):
    with chat(tmp_path, text=LONG, delay_s=0.05) as terminal:
        terminal.type("hello\r")
        terminal.until("one two")
        terminal.process.terminate()
        assert terminal.ended() == 143


@pytest.mark.slow
def test_the_terminal_is_left_as_it_was(tmp_path):
    with chat(tmp_path) as terminal:
        leave(terminal)
        flags = termios.tcgetattr(terminal._master)
        assert flags[3] & termios.ECHO
        assert flags[3] & termios.ICANON


@pytest.mark.slow
def test_the_bundled_model_reads_only_what_is_new_in_a_turn(tmp_path):
    with chat(tmp_path, "--max-tokens", "60", model="stories") as terminal:
        terminal.type("Tell me a story about a frog.\r")
        terminal.until("per step")
        terminal.until(READY)
        terminal.type("And then?\r")
        found = terminal.until(r"([\d,]+) of ([\d,]+) cached")
        assert int(found[1]) >= int(found[2]) - 10
        terminal.until(READY)
        terminal.type("Tell me more.\r")
        terminal.until("Once|the|The")
        terminal.type("\x03")
        terminal.until("stopped|per step")
        terminal.until(READY)
        terminal.type("Go on.\r")
        found = terminal.until(r"([\d,]+) of ([\d,]+) cached")
        assert int(found[1]) >= int(found[2]) - 10
        leave(terminal)
