"""The interface between a chat and its user; and the front that reads lines, for use without a terminal."""

from __future__ import annotations

import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from mlx_zip.cli import colours
from mlx_zip.cli.actions import escape_unprintable
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.cli.chat.screen import replace_controls
from mlx_zip.engine import EngineInfo
from mlx_zip.errors import GenerationError


class View(Protocol):
    """Where one answer is shown."""

    def feed(self, text: str, length: int) -> None:
        """Shows a piece of text, which came as an id of `length` base tokens."""
        ...

    def feed_reasoning(self, text: str) -> None:
        """Shows a piece of the model's reasoning; called only for an interactive front."""
        ...

    def show_prefill(self, read: int, total: int) -> None:
        """Shows that `read` of the prompt's `total` ids have been read."""
        ...


class Front(ABC):
    """Reads a chat's messages and shows its answers; a context manager, inside which the chat runs.

    colours: whether hypertokens are coloured. is_interactive: whether a person chats. key_help: lines of /help about
    keys.
    """

    colours: bool
    is_interactive = False
    key_help: Sequence[str] = ()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @abstractmethod
    def greet(self, model: str, info: EngineInfo) -> None:
        """Shows, once, which model answers."""

    @abstractmethod
    def read(self) -> str | None:
        """Returns the next message, None when there are no more."""

    @abstractmethod
    def show_answer(self, stop: Callable[[], None]) -> AbstractContextManager[View]:
        """Returns a context in which an answer is shown. stop: called in it when the user wants the answer to end."""

    @abstractmethod
    def show_conversation(self, talk: Conversation) -> None:
        """Shows a conversation that was loaded."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Shows a line from the chat itself, not from the model."""

    @abstractmethod
    def note(self, line: str) -> None:
        """Shows a line of little importance."""

    def fail(self, line: str) -> None:
        """Shows an error as one line on standard error."""
        print(f"error: {escape_unprintable(' '.join(line.split())[:1000])}", file=sys.stderr, flush=True)


@contextmanager
def call_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Until the block ends, Ctrl-C calls `stop` and raises nothing; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class PlainView:
    """Writes an answer's text at once, control characters replaced. coloured: whether hypertokens are coloured."""

    def __init__(self, out: TextIO, coloured: bool) -> None:
        self._out, self._coloured, self._last = out, coloured, "\n"

    def feed(self, text: str, length: int = 1) -> None:
        """Writes a piece of text, which came as an id of `length` base tokens."""
        shown = replace_controls(text)
        self._out.write(colours.colour_text(shown, length) if self._coloured else shown)
        self._out.flush()
        self._last = text[-1:] or self._last

    def feed_reasoning(self, text: str) -> None:
        """Writes a piece of reasoning like text."""
        self.feed(text)

    def show_prefill(self, read: int, total: int) -> None:
        """Shows nothing."""

    def finish(self) -> None:
        """Ends the last line."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()


class LineFront(Front):
    """Reads messages from standard input, one per line. coloured: as in `PlainView`.

    Raises `GenerationError` if standard input is closed.
    """

    def __init__(self, coloured: bool = False) -> None:
        if sys.stdin is None:
            raise GenerationError("standard input is closed; a chat reads messages from it")
        self.colours = coloured
        self._lines = enumerate(sys.stdin.buffer, start=1)

    def greet(self, model: str, info: EngineInfo) -> None:
        """Shows nothing: standard output is for answers."""

    def read(self) -> str | None:
        """Returns the next line. Raises `GenerationError` for one that is not UTF-8."""
        n, line = next(self._lines, (0, b""))
        if not n:
            return None
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise GenerationError(f"standard input, line {n}: not valid UTF-8 at byte {error.start}") from error

    @contextmanager
    def show_answer(self, stop: Callable[[], None]) -> Iterator[View]:
        """Prints an answer. Ctrl-C stops it if a person types the messages; else it ends the program."""
        view = PlainView(sys.stdout, self.colours)
        if sys.stdin.isatty():
            with call_on_interrupt(stop):
                yield view
        else:
            yield view
        view.finish()

    def show_conversation(self, talk: Conversation) -> None:
        """Says how long the conversation is."""
        self.say(f"loaded {len(talk.messages)} messages")

    def say(self, line: str) -> None:
        """Prints a line on standard error, so that standard output holds the model's words alone."""
        print(replace_controls(line), file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Shows nothing."""
