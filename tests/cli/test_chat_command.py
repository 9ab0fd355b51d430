"""`mlx_zip chat` with an engine that replays answers: the command, its files, and input that is no terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from mlx_zip import cli
from mlx_zip.arguments import Parser
from mlx_zip.cli import chat
from mlx_zip.cli.serving import opening
from mlx_zip.text.conversations import read_prompts
from support.fake_engine import FakeEngine, Script
from support.places import REPO
from support.typed_chat import STORY, chatted, message, of_any_role

# ---- files


def test_a_saved_conversation_is_loaded_again_and_other_readers_read_it(tmp_path):
    file = tmp_path / "talk.jsonl"
    typed = ("/system Be brief.", "hello ☃", f"/save {tmp_path}/talk", "more", f"/save {file}")
    program, front = chatted(*typed, engine=of_any_role())
    assert front.errors == []
    assert json.loads(file.read_text()) == {
        "messages": [message("system", "Be brief."), *program.conversation.messages],
    }
    assert len(read_prompts(file)[0]) == 5
    again, front = chatted(f"/load {file}", "third", engine=of_any_role())
    assert again.conversation.system == "Be brief."
    assert again.conversation.messages[:4] == program.conversation.messages
    assert front.loaded == [again.conversation]


def test_a_file_of_something_else_is_not_replaced(tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text("mine")
    _, front = chatted("hello", f"/save {file}")
    assert front.errors == [f"{file}: is there already; give another name, or remove it first"]
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "holds no conversation"),
        (b"\xff\xfe\n", "not valid UTF-8 at byte 0"),
        (b"{", "not valid JSON"),
        (b"[1]\n", "not a JSON object"),
        (b'{"text": "a"}\n', "holds no messages"),
        (b'{"messages": [{"role": "user", "content": 1}]}\n', "content of message 0 is int, not text"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', "not valid Unicode"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', "message 0 is by 'assistant', not by 'user'"),
        (b'{"messages": [{"role": "user", "content": "a"}]}\n' * 2, "more than one conversation"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_and_the_conversation_stays(content, error, tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_bytes(content)
    program, front = chatted("hello", f"/load {file}")
    assert len(front.errors) == 1
    assert error in front.errors[0]
    assert len(program.conversation.messages) == 2


def test_a_loaded_question_without_an_answer_can_be_asked(tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": [message("user", "hello")]}) + "\n")
    program, _ = chatted(f"/load {file}", "/retry")
    assert program.conversation.messages == [message("user", "hello"), message("assistant", STORY)]


# ---- the command


@pytest.fixture
def fake(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(opening, "open_chosen_engine", lambda args, *given: engine)
    return engine


def type_lines(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_lines_of_a_pipe_are_messages_and_only_answers_go_to_standard_output(fake, monkeypatch, run):
    type_lines(monkeypatch, "hello\n\n/stats\r\nünï\n/nothing\n".encode())
    status, out, err = run("chat", "--max-tokens", 8)
    assert (status, out) == (0, "Once upon a time there was a boat\n" * 2)
    assert "last answer" in err
    assert err.endswith("error: there is no command /nothing; /help lists the commands\n")


@pytest.mark.parametrize(("seen", "prompts"), [(True, "> > \n"), (False, "")])
def test_a_person_at_a_terminal_without_control_sequences_sees_a_prompt(seen, prompts, fake, monkeypatch, run):
    type_lines(monkeypatch, b"hello\n")
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: seen)
    monkeypatch.setenv("TERM", "dumb")
    assert run("chat", "--color", "never") == (0, "Once upon a time there was a boat.\n", prompts)


def test_control_characters_in_an_answer_are_shown_in_a_pipe_too(fake, monkeypatch, run):
    fake.script = Script(text="a \x1b]0;title\x07 b\x9b31m", ends=False)
    type_lines(monkeypatch, b"hello\n")
    _, out, _ = run("chat")
    assert out == "a ␛]0;title␇ b\ufffd31m\n"


def test_a_line_that_is_not_utf8_ends_a_pipe(fake, monkeypatch, run):
    type_lines(monkeypatch, b"hello\n\xff\n")
    assert run("chat")[::2] == (2, "error: standard input, line 2: not valid UTF-8 at byte 0\n")


def test_closed_standard_input_is_one_line(fake, monkeypatch, run):
    monkeypatch.setattr(sys, "stdin", None)
    assert run("chat") == (2, "", "error: standard input is closed; a chat reads messages from it\n")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--max-kv-size", "9"], "--max-kv-size cannot be used: "),
        (["--pipeline"], "--pipeline cannot be used: "),
        (["--model", ""], "the name of the model is empty"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--temp", "-1"], "temp (--temp) must be "),
        (["--chat-template-args", "["], "--chat-template-args is not valid JSON"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_before_a_model_is_loaded(flags, error, run, monkeypatch):
    monkeypatch.setattr(opening, "open_chosen_engine", lambda *given: pytest.fail("loaded"))
    status, _, err = run("chat", *flags)
    assert status == 2
    assert err.startswith(f"error: {error}")


@pytest.mark.parametrize("library", ["prompt_toolkit", "rich"])
def test_without_its_libraries_the_chat_says_what_to_install(library, tmp_path):
    code = f"import sys; sys.modules['{library}'] = None; from mlx_zip.cli import main; sys.exit(main(['chat']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, input="", cwd=REPO)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: mlx_zip chat needs prompt_toolkit, rich, which are not installed: in the folder of mlx_zip's source "
        "run pip install -e '.[chat]'\n"
    )


def test_the_flags_are_those_of_mlx_lm_with_its_defaults():
    from mlx_lm.chat import setup_arg_parser

    ours = Parser()
    chat.add_arguments(ours)
    known = {name: action for action in ours._actions for name in action.option_strings}
    theirs = [action for action in setup_arg_parser()._actions if action.dest not in ("help", "model")]
    assert [name for action in theirs for name in action.option_strings if name not in known] == []
    changed = {"max_tokens", "pipeline"}  # 400 with the bundled model; refused
    differ = [one.dest for one in theirs if known[one.option_strings[0]].default != one.default]
    assert set(differ) <= changed
    assert chat.MAX_TOKENS == 256


@pytest.mark.slow
def test_a_reader_of_standard_output_that_leaves_ends_the_chat_with_status_1():
    child = REPO / "tests/support/chat_child.py"
    script = json.dumps({"text": "a word " * 300, "delay_s": 0.005})
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, child, script], input=b"hello\n", stdout=writer, stderr=subprocess.PIPE, timeout=120
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_chat_is_a_command():
    assert "chat" in cli.COMMANDS
