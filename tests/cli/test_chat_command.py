"""`mlx_zip chat` with an engine that replays answers: conversation, commands, files, and input that is no terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from mlx_zip import cli
from mlx_zip.arguments import Parser
from mlx_zip.cli import chat, opening
from mlx_zip.cli.chat import loop, terminal
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.cli.chat.front import Front
from mlx_zip.cli.chat.lines import PlainView
from mlx_zip.cli.chat.program import Program, Settings
from mlx_zip.cli.chat.reasoning import split
from mlx_zip.engine import Counts, Emitted, Finished
from mlx_zip.errors import GenerationError
from mlx_zip.text.conversations import read_prompts
from support.fake_engine import FakeEngine, Running, Script, any_role
from support.places import REPO

STORY = "Once upon a time there was a boat."


class Typed(Front):
    """Gives messages that were written before. stops: call `stop` before the answer with this number, from 0."""

    colours = False

    def __init__(self, *messages, stops=()):
        self.messages, self.stops, self.answers = list(messages), stops, 0
        self.said, self.noted, self.errors, self.shown, self.pieces, self.loaded = [], [], [], [], [], []
        self.fail, self.say, self.note = self.errors.append, self.said.append, self.noted.append

    def greet(self, model, info):
        raise AssertionError

    def read(self):
        return self.messages.pop(0) if self.messages else None

    def say(self, line):
        raise AssertionError

    note = say

    def show_conversation(self, talk):
        self.loaded.append(talk)

    @contextmanager
    def answering(self, stop):
        self.shown.append("")
        if self.answers in self.stops:
            stop()
        self.answers += 1
        yield self

    def feed(self, text, length):
        self.shown[-1] += text
        self.pieces.append((text, length))

    def reading(self, read, total):
        pass


def chatted(*messages, script=None, stops=(), settings=None, engine=None):
    front = Typed(*messages, stops=stops)
    program = Program(engine or FakeEngine(script), settings or Settings(), front, Conversation())
    assert loop.run(program) == 0
    return program, front


def asked(program):
    """The messages of each prompt that the engine was given, as text."""
    tokenizer = program.engine.tokenizer
    return [tokenizer.decode(one.base_ids) for one in program.engine.told.submissions]


def of_any_role():
    """An engine whose chat template takes a system message."""
    return FakeEngine(vocab=any_role())


def message(role, content):
    return {"role": role, "content": content}


def test_an_answer_is_shown_with_the_length_of_each_step_and_kept():
    program, front = chatted("hello")
    assert front.shown == [STORY]
    assert {length for _, length in front.pieces} == {1, 2}
    assert program.talk.messages == [message("user", "hello"), message("assistant", STORY)]
    assert "per step" in front.noted[0]


def test_the_next_prompt_holds_the_ids_that_were_emitted():
    program, _ = chatted("hello", "And then?")
    first, second = program.engine.told.submissions
    emitted = program.engine.tokenizer.encode(STORY, add_special_tokens=False)
    assert program.engine.told.notes[0] == (STORY, emitted)
    assert list(second.base_ids)[: len(first.base_ids) + len(emitted)] == [*first.base_ids, *emitted]


class Thinker(Typed):
    """A front with a person before it."""

    asks = True

    def __init__(self, *messages):
        super().__init__(*messages)
        self.thoughts = ""

    def think(self, text):
        self.thoughts += text


def test_marked_reasoning_is_shown_apart_and_kept_in_the_conversation():
    vocab = any_role()
    vocab._tokenizer.chat_template += "{# <think> </think> #}"
    text = "<think>A boat is good.</think>Once upon a time."
    front = Thinker("hello")
    program = Program(FakeEngine(Script(text=text), vocab=vocab), Settings(), front, Conversation())
    assert loop.run(program) == 0
    assert (front.thoughts, front.shown) == ("A boat is good.", ["Once upon a time."])
    assert program.talk.messages[1] == message("assistant", text)


@pytest.mark.parametrize(
    ("text", "thoughts", "shown"),
    [
        ("<think>\nA b < c.\n\nD</think>\n\nHi.", "A b < c.\n\nD", "Hi."),
        (" plain <think> x", "", " plain <think> x"),
        ("<thi", "", "<thi"),
        ("<think>x</th", "x</th", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_reasoning_is_found_however_the_text_was_cut_into_pieces(text, thoughts, shown, size):
    vocab = any_role()
    vocab._tokenizer.chat_template += "{# <think> </think> #}"
    front = Thinker()
    front.shown.append("")
    with split(front, vocab, [5]) as feed:
        for i in range(0, len(text), size):
            feed(text[i : i + size], 1)
    assert (front.thoughts, front.shown[0]) == (thoughts, shown)


def test_marked_reasoning_stays_as_it_is_where_no_person_reads():
    vocab = any_role()
    vocab._tokenizer.chat_template += "{# <think> </think> #}"
    text = "<think>A boat is good.</think>Once upon a time."
    _, front = chatted("hello", engine=FakeEngine(Script(text=text), vocab=vocab))
    assert front.shown == [text]


def test_reasoning_is_faint_in_a_terminal(capsys):
    view = terminal.TerminalView(PlainView(sys.stdout, False))
    view.think("A boat")
    view.think(" is \x1b[31mgood.")
    view.feed("Once upon a time.", 1)
    view.finish()
    written = capsys.readouterr().out
    assert written == "\x1b[2mA boat\x1b[0m\x1b[2m is ␛[31mgood.\x1b[0m\n\nOnce upon a time.\n"


def test_a_stopped_answer_keeps_what_was_shown():
    program, front = chatted("one", "two", script=Script(text=STORY, delay_s=0.02), stops=(0,))
    assert front.errors == []
    kept = program.talk.messages
    if front.shown[0]:  # stopped after a few words
        assert kept[1] == message("assistant", front.shown[0])
        assert STORY.startswith(front.shown[0])
    assert kept[-2:] == [message("user", "two"), message("assistant", STORY)]
    assert program.engine.told.tickets[0].cancelled.is_set()


class Eager(FakeEngine):
    """Goes on with an answer after it was stopped, as an engine does that is in the middle of a step."""

    def submit(self, submission, deliver):
        one, two = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in ("One more", "Two"))
        for event in (
            Emitted(1, one),
            None,
            Emitted(2, two),
            Finished("cancelled", Counts(base_tokens=len(one + two))),
        ):
            deliver(event)
        return Running(submission)


def test_what_arrives_after_a_stop_is_left_out():
    program, front = chatted("hello", engine=Eager())
    assert front.shown == ["One more"]
    assert program.talk.messages[1] == message("assistant", "One more")
    assert program.engine.told.notes == [
        ("One more", program.engine.tokenizer.encode("One more", add_special_tokens=False))
    ]
    assert front.said == ["stopped; the answer so far is kept"]


def test_a_message_without_an_answer_is_taken_back_and_can_be_asked_again():
    engine = FakeEngine(Script(fails=GenerationError("out of memory"), ids=()))
    program, front = chatted("one", engine=engine)
    assert (front.errors, program.talk.messages) == (["out of memory"], [])
    engine.script = Script()
    program.front.messages = ["/retry"]
    loop.run(program)
    assert program.talk.messages == [message("user", "one"), message("assistant", STORY)]


def test_retry_takes_the_place_of_the_last_answer_with_another_seed_and_temperature():
    program, _ = chatted("one", "/retry 0.5")
    assert len(program.talk.messages) == 2
    first, second = program.engine.told.submissions
    assert list(first.base_ids) == list(second.base_ids)
    assert (first.sampling["seed"], second.sampling["seed"], second.sampling["temp"]) == (0, 1, 0.5)


def test_a_retry_that_fails_leaves_the_answer_that_was_there():
    engine = FakeEngine()
    program, front = chatted("one", engine=engine)
    engine.script = Script(fails=GenerationError("no"), ids=())
    front.messages = ["/retry"]
    loop.run(program)
    assert program.talk.messages == [message("user", "one"), message("assistant", STORY)]
    assert program.talk.answered


def test_reset_forgets_messages_but_not_the_system_message():
    program, _ = chatted("/system Be brief.", "one", "/reset", "two", engine=of_any_role())
    assert "Be brief." in asked(program)[1]
    assert "one" not in asked(program)[1]
    assert len(program.talk.messages) == 2


def test_a_system_message_that_the_template_refuses_is_refused_at_once_and_the_chat_goes_on(tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": [message("system", "Be brief."), message("user", "hello")]}))
    program, front = chatted("/system Be brief.", f"/load {file}", "hello")
    assert len(front.errors) == 2
    assert all("takes no system message" in error for error in front.errors)
    assert program.talk.system is None
    assert front.shown == [STORY]


def test_a_system_message_can_be_shown_and_removed():
    program, front = chatted("/system", "/system Be brief.", "/system", "/system off", engine=of_any_role())
    assert front.said[0] == "there is no system message"
    assert front.said[2] == "system message: Be brief."
    assert program.talk.system is None


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ("/rest", "there is no command /rest; did you mean /reset?"),
        ("/xyzzy", "there is no command /xyzzy; /help lists the commands"),
        ("/retry", "/retry: nothing was asked yet"),
        ("/retry warm", "/retry warm: a temperature is a number, for example 0.7"),
        ("/save a.jsonl", "/save: nothing was said yet"),
        ("/save", "/save: nothing was said yet"),
        ("/load", "/load needs the name of one file"),
        ("/load 'a", "/load: No closing quotation"),
        ("/load nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("/load a.txt", "a.txt: a conversation is a .jsonl file"),
        ("/load /", "/: is no name of a file"),
        ("/load ..", "..: is no name of a file"),
        ("/load ''", ".: is no name of a file"),
        (f"/load {'a' * 300}", f"{'a' * 300}.jsonl: File name too long"),
        (f"/pack {'a' * 300}.json", f"{'a' * 300}.json cannot be read as a pack: File name too long"),
        ("/pack nowhere.json", "nowhere.json cannot be read as a pack: No such file or directory"),
        ("/colours red", "/colours red: give on, off or nothing"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line_and_the_chat_goes_on(typed, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, front = chatted(typed, "hello")
    assert front.errors == [error]
    assert front.shown == [STORY]


@pytest.mark.parametrize(
    ("name", "error"),
    [("/", "/: is no name of a file"), ("''", ".: is no name of a file"), ("a" * 300, "File name too long")],
)
def test_a_name_that_no_file_can_have_saves_nothing_and_the_chat_goes_on(name, error):
    _, front = chatted("hello", f"/save {name}", "hello")
    assert [error in line for line in front.errors] == [True]
    assert front.shown == [STORY, STORY]


def test_two_slashes_send_one_and_other_names_of_commands_work():
    program, front = chatted("//reset is a word", "/colors", "/?", "/q", "never read")
    assert program.talk.messages[0]["content"] == "/reset is a word"
    assert front.colours
    assert any(line.startswith("/stats") for line in front.said)
    assert front.messages == ["never read"]


def test_stats_tell_steps_codebook_and_cached_tokens():
    _, front = chatted("/stats", "hello", "more", "/stats")
    assert front.said[0] == "no answer yet"
    text = "\n".join(front.said[1:])
    for words in (
        "last answer: ",
        "base tokens/s",
        "2 answers: ",
        "steps saved",
        "3 of them cached",
        "codebook: 6 of 64 entries",
        "KV",
    ):
        assert words in text


def test_vocabulary_lists_the_most_used_hypertokens_with_uses_origin_and_parts():
    engine = FakeEngine()
    ids = [[5], [300, 301], [300, 301], [302, 303], [engine.tokenizer.eos_token_id]]
    engine.script = Script(ids=ids)
    program, front = chatted("/vocabulary", "hello", "/vocabulary", "more", "/vocabulary", engine=engine)
    first, second = (program.engine.tokenizer.decode([300 + i]).strip() for i in (0, 1))
    assert front.said[0] == "no hypertokens yet; answers from a loaded file are not counted"
    assert front.said[1] == "the 2 most used of 2 hypertokens in this conversation: uses, where learned, parts"
    uses, origin, *parts = front.said[2].split(maxsplit=2)
    assert (uses, origin) == ("2x", "answer")
    assert [one.strip("· ") for one in parts[0].split(" | ")] == [first, second]
    assert front.said[5].split()[0] == "4x"


def test_vocabulary_counts_only_the_answers_that_the_conversation_has():
    program, front = chatted("hello", "/retry", "/vocabulary")
    assert len(program.talk.uses) == 1
    assert all(line.split()[0] == "1x" for line in front.said[1:])
    program.front.messages = ["/reset", "/vocabulary"]
    loop.run(program)
    assert front.said[-1] == "no hypertokens yet; answers from a loaded file are not counted"


def test_vocabulary_of_a_model_without_hypertokens_is_refused():
    engine = FakeEngine()
    engine.info = replace(engine.info, merge_size=0, codebook_size=0)
    _, front = chatted("/vocabulary", engine=engine)
    assert front.errors == ["/vocabulary: this model has no hypertokens"]


def test_a_conversation_longer_than_the_context_is_one_line_and_ends_nothing():
    program, front = chatted("a b " * 3000, "hello")
    assert len(front.errors) == 1
    assert "/reset begins a new conversation" in front.errors[0]
    assert [one["content"] for one in program.talk.messages] == ["hello", STORY]


def test_an_answer_at_the_limit_says_so():
    _, front = chatted("hello", settings=Settings(max_tokens=4))
    assert front.said == ["cut off after 4 base tokens (--max-tokens)"]


@pytest.mark.parametrize("asks", [True, False])
def test_a_conversation_can_be_saved_after_the_engine_has_stopped_and_a_pipe_ends(asks, tmp_path):
    engine = FakeEngine()
    program, front = chatted("one", engine=engine)
    engine.die()
    front.asks, front.messages = asks, ["two", f"/save {tmp_path}/talk", "/quit"]
    assert loop.run(program) == 1
    assert front.errors == ["the engine has stopped; /save keeps the conversation, /quit ends the chat"]
    assert (tmp_path / "talk.jsonl").exists() is asks


def test_packs_are_given_to_the_next_request():
    program, front = chatted("/pack", "/pack none", "hello", "/pack own", "hello")
    assert front.said == [
        "codebooks begin as the model's own",
        "codebooks begin empty",
        "codebooks begin as the model's own",
    ]
    first, second = program.engine.told.submissions
    assert (first.pack.entries, second.pack) == ((), None)


# ---- files


def test_a_saved_conversation_is_loaded_again_and_other_readers_read_it(tmp_path):
    file = tmp_path / "talk.jsonl"
    typed = ("/system Be brief.", "hello ☃", f"/save {tmp_path}/talk", "more", f"/save {file}")
    program, front = chatted(*typed, engine=of_any_role())
    assert front.errors == []
    assert json.loads(file.read_text()) == {
        "messages": [message("system", "Be brief."), *program.talk.messages],
    }
    assert len(read_prompts(file)[0].content) == 5
    again, front = chatted(f"/load {file}", "third", engine=of_any_role())
    assert again.talk.system == "Be brief."
    assert again.talk.messages[:4] == program.talk.messages
    assert front.loaded == [again.talk]


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
    assert len(program.talk.messages) == 2


def test_a_loaded_question_without_an_answer_can_be_asked(tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": [message("user", "hello")]}) + "\n")
    program, _ = chatted(f"/load {file}", "/retry")
    assert program.talk.messages == [message("user", "hello"), message("assistant", STORY)]


# ---- the command


@pytest.fixture
def fake(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(opening, "opened", lambda group, name, **options: engine)
    return engine


def type_lines(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_lines_of_a_pipe_are_messages_and_only_answers_go_to_standard_output(fake, monkeypatch, run):
    type_lines(monkeypatch, "hello\n\n/stats\r\nünï\n/nothing\n".encode())
    status, out, err = run("chat", "--max-tokens", 8)
    assert (status, out) == (0, "Once upon a time there was a boat\n" * 2)
    assert "last answer" in err
    assert err.endswith("error: there is no command /nothing; /help lists the commands\n")


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
        (["--model", ""], "no model: --model is empty"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--temp", "-1"], "temp (--temp) must be "),
        (["--chat-template-args", "["], "--chat-template-args is not valid JSON"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_before_a_model_is_loaded(flags, error, run, monkeypatch):
    monkeypatch.setattr(opening, "opened", lambda *args, **options: pytest.fail("loaded"))
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
