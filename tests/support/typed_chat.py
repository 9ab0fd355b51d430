"""Chats whose messages were typed before, with an engine that replays answers."""

from __future__ import annotations

from contextlib import contextmanager

from mlx_zip.cli.chat import commands
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.cli.chat.front import Front
from mlx_zip.cli.chat.program import Program, Settings
from support.fake_engine import FakeEngine, any_role

STORY = "Once upon a time there was a boat."


class Typed(Front):
    """Gives messages that were written before. stops: call `stop` before the answer with this number, from 0."""

    colours = False

    def __init__(self, *messages, stops=()):
        self.messages, self.stops, self.answers = list(messages), stops, 0
        self.said, self.noted, self.errors, self.shown, self.pieces, self.loaded = [], [], [], [], [], []

    def show_model(self, model, info):
        raise AssertionError

    def read_message(self):
        return self.messages.pop(0) if self.messages else None

    def show_line(self, line):
        self.said.append(line)

    def show_note(self, line):
        self.noted.append(line)

    def show_error(self, line):
        self.errors.append(line)

    def show_conversation(self, talk):
        self.loaded.append(talk)

    @contextmanager
    def show_answer(self, stop):
        self.shown.append("")
        if self.answers in self.stops:
            stop()
        self.answers += 1
        yield self

    def feed(self, text, length):
        self.shown[-1] += text
        self.pieces.append((text, length))

    def show_prefill(self, read, total):
        pass


def chatted(*messages, script=None, stops=(), settings=None, engine=None):
    front = Typed(*messages, stops=stops)
    program = Program(engine or FakeEngine(script), settings or Settings(), front, Conversation())
    assert commands.run_chat_loop(program) == 0
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
