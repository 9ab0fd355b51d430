"""A chat without a terminal: each line of standard input is a message, and answers are printed as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from mlx_zip.cli import colours
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.cli.chat.front import Front, View, interrupts
from mlx_zip.cli.chat.harmless import harmless
from mlx_zip.engine import EngineInfo
from mlx_zip.errors import GenerationError


class PlainView:
    """Writes an answer's text at once, as it is but for control characters. coloured: whether lengths are coloured."""

    def __init__(self, out: TextIO, coloured: bool) -> None:
        self._out, self._coloured, self._last = out, coloured, "\n"

    def feed(self, text: str, length: int = 1) -> None:
        """Writes a piece of text, which came as an id of `length` base tokens."""
        shown = harmless(text)
        self._out.write(colours.painted(shown, length) if self._coloured else shown)
        self._out.flush()
        self._last = text[-1:] or self._last

    def think(self, text: str) -> None:
        """Writes a piece of reasoning like text."""
        self.feed(text)

    def reading(self, read: int, total: int) -> None:
        """Shows nothing."""

    def finish(self) -> None:
        """Ends the last line."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()


class LineFront(Front):
    """Reads messages from standard input, one per line. colours, coloured: as in `PlainView`.

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
    def answering(self, stop: Callable[[], None]) -> Iterator[View]:
        """Prints an answer. Ctrl-C stops it if a person types the messages; else it ends the program."""
        view = PlainView(sys.stdout, self.colours)
        if sys.stdin.isatty():
            with interrupts(stop):
                yield view
        else:
            yield view
        view.finish()

    def show_conversation(self, talk: Conversation) -> None:
        """Says how long the conversation is."""
        self.say(f"loaded {len(talk.messages)} messages")

    def say(self, line: str) -> None:
        """Prints a line on standard error, so that standard output holds the model's words alone."""
        print(harmless(line), file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Shows nothing."""
