"""A conversation in the terminal: answers, their reasoning, and the commands that change or show them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from mlx_zip.cli.chat import commands, terminal
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.cli.chat.front import PlainView
from mlx_zip.cli.chat.program import Program, Settings, split_reasoning
from mlx_zip.engine import Counts, Emitted, Finished
from mlx_zip.errors import GenerationError
from support.fake_engine import FakeEngine, Running, Script, any_role
from support.typed_chat import STORY, Typed, asked, chatted, message, of_any_role


def test_an_answer_is_shown_with_the_length_of_each_step_and_kept():
    program, front = chatted("hello")
    assert front.shown == [STORY]
    assert {length for _, length in front.pieces} == {1, 2}
    assert program.conversation.messages == [message("user", "hello"), message("assistant", STORY)]
    assert "per step" in front.noted[0]


def test_the_next_prompt_holds_the_ids_that_were_emitted():
    program, _ = chatted("hello", "And then?")
    first, second = program.engine.told.submissions
    emitted = program.engine.tokenizer.encode(STORY, add_special_tokens=False)
    assert program.engine.told.notes[0] == (STORY, emitted)
    assert list(second.base_ids)[: len(first.base_ids) + len(emitted)] == [*first.base_ids, *emitted]


class Thinker(Typed):
    """A front with a person before it."""

    is_interactive = True

    def __init__(self, *messages):
        super().__init__(*messages)
        self.thoughts = ""

    def feed_reasoning(self, text):
        self.thoughts += text


def test_marked_reasoning_is_shown_apart_and_kept_in_the_conversation():
    vocab = any_role()
    vocab._tokenizer.chat_template += "{# <think> </think> #}"
    text = "<think>A boat is good.</think>Once upon a time."
    front = Thinker("hello")
    program = Program(FakeEngine(Script(text=text), vocab=vocab), Settings(), front, Conversation())
    assert commands.run_chat_loop(program) == 0
    assert (front.thoughts, front.shown) == ("A boat is good.", ["Once upon a time."])
    assert program.conversation.messages[1] == message("assistant", text)


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
    with split_reasoning(front, vocab, [5]) as feed:
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
    view.feed_reasoning("A boat")
    view.feed_reasoning(" is \x1b[31mgood.")
    view.feed("Once upon a time.", 1)
    view.finish()
    written = capsys.readouterr().out
    assert written == "\x1b[2mA boat\x1b[0m\x1b[2m is ␛[31mgood.\x1b[0m\n\nOnce upon a time.\n"


def test_a_stopped_answer_keeps_what_was_shown():
    program, front = chatted("one", "two", script=Script(text=STORY, delay_s=0.02), stops=(0,))
    assert front.errors == []
    kept = program.conversation.messages
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
    assert program.conversation.messages[1] == message("assistant", "One more")
    assert program.engine.told.notes == [
        ("One more", program.engine.tokenizer.encode("One more", add_special_tokens=False))
    ]
    assert front.said == ["stopped; the answer so far is kept"]


def test_a_message_without_an_answer_is_taken_back_and_can_be_asked_again():
    engine = FakeEngine(Script(fails=GenerationError("out of memory"), ids=()))
    program, front = chatted("one", engine=engine)
    assert (front.errors, program.conversation.messages) == (["out of memory"], [])
    engine.script = Script()
    program.front.messages = ["/retry"]
    commands.run_chat_loop(program)
    assert program.conversation.messages == [message("user", "one"), message("assistant", STORY)]


def test_retry_takes_the_place_of_the_last_answer_with_another_seed_and_temperature():
    program, _ = chatted("one", "/retry 0.5")
    assert len(program.conversation.messages) == 2
    first, second = program.engine.told.submissions
    assert list(first.base_ids) == list(second.base_ids)
    assert (first.sampling["seed"], second.sampling["seed"], second.sampling["temp"]) == (0, 1, 0.5)


def test_a_retry_that_fails_leaves_the_answer_that_was_there():
    engine = FakeEngine()
    program, front = chatted("one", engine=engine)
    engine.script = Script(fails=GenerationError("no"), ids=())
    front.messages = ["/retry"]
    commands.run_chat_loop(program)
    assert program.conversation.messages == [message("user", "one"), message("assistant", STORY)]
    assert program.conversation.answered


def test_reset_forgets_messages_but_not_the_system_message():
    program, _ = chatted("/system Be brief.", "one", "/reset", "two", engine=of_any_role())
    assert "Be brief." in asked(program)[1]
    assert "one" not in asked(program)[1]
    assert len(program.conversation.messages) == 2


def test_a_system_message_that_the_template_refuses_is_refused_at_once_and_the_chat_goes_on(tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": [message("system", "Be brief."), message("user", "hello")]}))
    program, front = chatted("/system Be brief.", f"/load {file}", "hello")
    assert len(front.errors) == 2
    assert all("takes no system message" in error for error in front.errors)
    assert program.conversation.system is None
    assert front.shown == [STORY]


def test_a_system_message_can_be_shown_and_removed():
    program, front = chatted("/system", "/system Be brief.", "/system", "/system off", engine=of_any_role())
    assert front.said[0] == "there is no system message"
    assert front.said[2] == "system message: Be brief."
    assert program.conversation.system is None


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
    assert program.conversation.messages[0]["content"] == "/reset is a word"
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
    assert len(program.conversation.uses) == 1
    assert all(line.split()[0] == "1x" for line in front.said[1:])
    program.front.messages = ["/reset", "/vocabulary"]
    commands.run_chat_loop(program)
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
    assert [one["content"] for one in program.conversation.messages] == ["hello", STORY]


def test_an_answer_at_the_limit_says_so():
    _, front = chatted("hello", settings=Settings(max_tokens=4))
    assert front.said == ["cut off after 4 base tokens (--max-tokens)"]


@pytest.mark.parametrize("asks", [True, False])
def test_a_conversation_can_be_saved_after_the_engine_has_stopped_and_a_pipe_ends(asks, tmp_path):
    engine = FakeEngine()
    program, front = chatted("one", engine=engine)
    engine.die()
    front.is_interactive, front.messages = asks, ["two", f"/save {tmp_path}/talk", "/quit"]
    assert commands.run_chat_loop(program) == 1
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
