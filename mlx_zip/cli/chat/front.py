"""`Front`, between a chat and its user: reads lines and needs no terminal. In a terminal, `TerminalFront` is used."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TextIO

from mlx_zip.cli import colours
from mlx_zip.cli.actions import escape_unprintable
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.cli.chat.screen import replace_control_characters
from mlx_zip.engine import EngineInfo
from mlx_zip.errors import GenerationError

PROMPT = "> "


@contextmanager
def call_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Context manager: makes Ctrl-C call `stop` instead of raising `KeyboardInterrupt`, in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class PlainView:
    """Writes an answer's text as it arrives, control characters replaced. coloured: whether to colour hypertokens."""

    def __init__(self, out: TextIO, coloured: bool) -> None:
        self._out, self._coloured, self._last = out, coloured, "\n"

    def feed(self, text: str, length: int = 1) -> None:
        """Writes a piece of text. length: number of base tokens of its id."""
        shown = replace_control_characters(text)
        self._out.write(colours.colour_text(shown, length) if self._coloured else shown)
        self._out.flush()
        self._last = text[-1:] or self._last

    def show_prefill(self, read: int, total: int) -> None:
        """Shows nothing."""

    def finish(self) -> None:
        """Ends the last line."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()


class Front:
    """Reads a chat's messages from standard input, one per line; prints answers on standard output, all else on stderr.

    A context manager; the chat runs inside its block. colours: whether hypertokens are coloured. is_interactive:
    whether a person chats in a terminal. key_help: lines about keys for /help.
    """

    is_interactive = False
    key_help: Sequence[str] = ()

    def __init__(self, coloured: bool = False) -> None:
        self.colours = coloured

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def show_model(self, model: str, info: EngineInfo) -> None:
        """Shows which model answers; called once, before the first message. This front prints only answers."""

    def read_message(self) -> str | None:
        """Returns the next message, None at the end of the chat. Raises `GenerationError` for a line not in UTF-8.

        A person at a terminal, for example with TERM=dumb, sees a prompt.
        """
        prompts = sys.stdin.isatty() and sys.stderr is not None and sys.stderr.isatty()
        if prompts:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        n, line = next(self._lines, (0, b""))
        if not n:
            if prompts:
                print(file=sys.stderr)
            return None
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise GenerationError(f"standard input, line {n}: not valid UTF-8 at byte {error.start}") from error

    @cached_property
    def _lines(self) -> Iterator[tuple[int, bytes]]:
        return enumerate(sys.stdin.buffer, start=1)

    @contextmanager
    def show_answer(self, stop: Callable[[], None]) -> Iterator[Any]:
        """Context manager: yields the view of one answer. stop: called if the user stops the answer.

        The view has `feed(text, length)`, `show_prefill(read, total)` and, if a person chats, `feed_reasoning(text)`.
        """
        view = PlainView(sys.stdout, self.colours)
        if sys.stdin.isatty():
            with call_on_interrupt(stop):
                yield view
        else:
            yield view
        view.finish()

    def show_conversation(self, conversation: Conversation) -> None:
        """Shows a conversation that was loaded. This front prints its number of messages."""
        self.show_line(f"loaded {len(conversation.messages)} messages")

    def show_line(self, line: str) -> None:
        """Shows a line from the chat itself, not from the model."""
        print(replace_control_characters(line), file=sys.stderr, flush=True)

    def show_note(self, line: str) -> None:
        """Shows a line of little importance. This front does not print such lines."""

    def show_error(self, line: str) -> None:
        """Shows an error as one line on standard error."""
        print(f"error: {escape_unprintable(' '.join(line.split())[:1000])}", file=sys.stderr, flush=True)
