"""A chat in a terminal: messages can be edited and are kept in a file, answers are rendered as they arrive."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from mlx_zip.cli import colours
from mlx_zip.cli.chat.commands import ALIASES, COMMANDS
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.cli.chat.front import PROMPT, Front, PlainView, call_on_interrupt
from mlx_zip.cli.chat.markdown import MarkdownStream
from mlx_zip.cli.chat.screen import Screen, repair_surrogates, replace_control_characters, style_text
from mlx_zip.engine import EngineInfo
from mlx_zip.errors import DataError, failure_reason
from mlx_zip.files import atomic_file, check_regular_file

_MOST_SHOWN = 2000  # characters; a longer paste is shown as a placeholder with its size
_PATIENCE_S = 1.0  # time after which the progress of a prefill is shown
_FAINT, _BOLD = "2", "1"
HISTORY_FILE = "chat_history"
MOST_BYTES = 1 << 20  # upper bound of the history file; of a larger one a new chat drops the older half
MOST_CHARACTERS = 1 << 14  # a longer message is not kept in the history file


class TerminalView:
    """Shows one answer. render: `PlainView` or `MarkdownStream` that the text is fed to."""

    def __init__(self, render: Any) -> None:
        self._render, self._begun, self._status = render, time.monotonic(), False
        self._thinking = self._answering = False

    def feed(self, text: str, length: int = 1) -> None:
        """Shows a piece of text. length: number of base tokens of its id."""
        self._clear_status()
        self._answering = True
        self._end_thinking("\n\n")
        self._render.feed(text, length)

    def feed_reasoning(self, text: str) -> None:
        """Shows a piece of the model's reasoning in faint letters, without rendering it."""
        self._clear_status()
        self._thinking = self._answering = True
        sys.stdout.write(style_text(replace_control_characters(text), _FAINT))
        sys.stdout.flush()

    def show_prefill(self, read: int, total: int) -> None:
        """Shows in a temporary line how much of a long prompt has been read; does nothing once the answer has begun."""
        if not self._answering and read < total and time.monotonic() - self._begun >= _PATIENCE_S:
            sys.stdout.write(f"\r\x1b[K{style_text(f'reading: {read:,} of {total:,} ids', _FAINT)}")
            sys.stdout.flush()
            self._status = True

    def finish(self) -> None:
        """Shows the text that the renderer held back, and ends the line."""
        self._clear_status()
        self._end_thinking("\n")
        self._render.finish()

    def _end_thinking(self, newlines: str) -> None:
        if self._thinking:
            sys.stdout.write(newlines)
            self._thinking = False

    def _clear_status(self) -> None:
        if self._status:
            sys.stdout.write("\r\x1b[K")
            self._status = False


class TerminalFront(Front):
    """Front of a chat in a terminal. history: file of typed messages, None to keep none.

    plain: whether to print answers without rendering their Markdown. may_colour: whether colours may be used at all.
    """

    is_interactive = True
    key_help = (
        "Enter sends; Alt-Enter (or Esc, then Enter) begins a new line; pasted lines stay together",
        "Up and Down bring back what was typed; Ctrl-R searches it; Tab completes commands and file names",
        "Ctrl-C stops an answer, which is kept; Ctrl-D, or Ctrl-C twice at an empty prompt, ends the chat",
        "a message that begins with two slashes is sent to the model with one",
    )

    def __init__(self, history: Path | None, plain: bool, may_colour: bool) -> None:
        super().__init__(may_colour)
        self._plain, self._may_colour = plain, may_colour
        self._pastes: dict[str, str] = {}  # placeholder -> pasted text; kept for messages recalled later
        self._answered = False  # whether an answer was shown since the last prompt
        self._opened = contextlib.ExitStack()
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else open_history(history, self.show_error),
            multiline=True,
            key_bindings=self._make_key_bindings(),
            completer=_CommandCompleter(),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            prompt_continuation=" " * len(PROMPT),
            placeholder=FormattedText([("fg:ansibrightblack", "a message, or /help")]),
            enable_suspend=True,
        )

    def __enter__(self) -> TerminalFront:
        """Until the block ends, hides keys typed between prompts, which the next prompt reads, and ignores Ctrl-C."""
        self._opened.enter_context(call_on_interrupt(lambda: None))
        self._opened.enter_context(_hide_typed_keys())
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def show_model(self, model: str, info: EngineInfo) -> None:
        """Shows which model answers, and what colours mean."""
        self.show_note(f"{Path(model).name}; /help shows commands and keys")
        if info.codebook_size and self.colours:
            print(colours.colour_legend(), flush=True)

    def read_message(self) -> str | None:
        """Returns the next message; None after Ctrl-D, or after Ctrl-C twice at an empty prompt."""
        if self._answered:
            print(flush=True)
        warned = self._answered = False
        while True:
            try:
                text = repair_surrogates(self._session.prompt(PROMPT))
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._session.default_buffer.text:
                    warned = False
                elif warned:
                    return None
                else:
                    warned = True
                    self.show_note("Ctrl-C again, or Ctrl-D, ends the chat")
                continue
            for shown, paste in self._pastes.items():
                text = text.replace(shown, paste)
            return text

    @contextmanager
    def show_answer(self, stop: Callable[[], None]) -> Iterator[TerminalView]:
        """Context manager: yields the view of one answer; Ctrl-C calls `stop`."""
        view, self._answered = TerminalView(self._make_renderer()), True
        with call_on_interrupt(stop):
            try:
                yield view
            finally:
                view.finish()

    def show_conversation(self, conversation: Conversation) -> None:
        """Shows a loaded conversation: its system message, and its last user message with the answer."""
        self.show_note(
            f"loaded {len(conversation.messages)} messages"
            + (f"; system message: {conversation.system}" if conversation.system else "")
        )
        for message in conversation.messages[-2:]:
            if message["role"] == "user":
                print(style_text(PROMPT, _BOLD) + replace_control_characters(message["content"]), flush=True)
                continue
            render = self._make_renderer()
            render.feed(message["content"], 1)
            render.finish()
        if conversation.asked is not None and not conversation.answered:
            print(style_text(PROMPT, _BOLD) + replace_control_characters(conversation.asked), flush=True)
            self.show_note("nothing has answered the last message; /retry asks it")

    def show_line(self, line: str) -> None:
        """Shows a line from the chat itself, not from the model."""
        print(replace_control_characters(line), flush=True)

    def show_note(self, line: str) -> None:
        """Shows a line of little importance in faint letters."""
        print(style_text(replace_control_characters(line), _FAINT), flush=True)

    def _make_renderer(self) -> Any:
        coloured = self.colours and self._may_colour
        if self._plain:
            return PlainView(sys.stdout, coloured)
        tint = colours.colour_code if coloured else lambda length: ""
        return MarkdownStream(Screen(sys.stdout), tint, self._may_colour)

    def _make_key_bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        @bindings.add("enter")
        def _(event: KeyPressEvent) -> None:
            if event.current_buffer.text.strip():
                event.current_buffer.validate_and_handle()

        @bindings.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(
                self._abbreviate_paste(event.data.replace("\r\n", "\n").replace("\r", "\n"))
            )

        return bindings

    def _abbreviate_paste(self, text: str) -> str:
        """Returns what the prompt shows for pasted text: the text itself, or for a long one a placeholder."""
        if len(text) <= _MOST_SHOWN:
            return text
        shown = f"[paste {len(self._pastes) + 1}: {len(text):,} characters]"
        self._pastes[shown] = text
        return shown


class _CommandCompleter(Completer):
    """Completes commands, and file names after commands that take a file name."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yields the completions at the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        word, space, argument = text[1:].partition(" ")
        command = COMMANDS.get(ALIASES.get(word, word))
        if space and command is not None and command.takes_path:
            yield from self._paths.get_completions(Document(argument.lstrip()), complete_event)
        elif not space:
            for name, known in COMMANDS.items():
                if name.startswith(word):
                    yield Completion(f"/{name}", -len(text), display_meta=known.purpose)


@contextmanager
def _hide_typed_keys() -> Iterator[None]:
    """Context manager: hides keys typed between prompts; the next prompt reads them unchanged."""
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    quiet = [*before]
    quiet[0] = before[0] & ~termios.ICRNL
    quiet[3] = before[3] & ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(handle, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(handle, termios.TCSADRAIN, before)


class TypedHistory(FileHistory):
    """History of typed messages, kept in a file in prompt_toolkit's format.

    warn: called with one line for each message that cannot be written.
    """

    def __init__(self, file: Path, warn: Callable[[str], None]) -> None:
        self._warn = warn
        super().__init__(file)

    def store_string(self, string: str) -> None:
        """Adds a message to the file, unless it is longer than `MOST_CHARACTERS`."""
        if len(string) > MOST_CHARACTERS:
            return
        try:
            super().store_string(repair_surrogates(string))
        except OSError as error:
            self._warn(f"what you type is not kept: {self.filename}: {failure_reason(error)}")


def open_history(file: Path, warn: Callable[[str], None]) -> History:
    """Returns the history kept in `file`, which is made readable by its owner only.

    If the file cannot be used, calls `warn` with one line, and returns a history in memory.
    """
    try:
        check_regular_file(file)  # reading a pipe or a device may never end
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        os.fchmod(handle, 0o600)
        os.close(handle)
        if file.stat().st_size > MOST_BYTES:
            _drop_older_half(file)
    except (OSError, DataError) as error:
        warn(f"what you type is not kept: {file}: {failure_reason(error).removeprefix(f'{file}: ')}")
        return InMemoryHistory()
    return TypedHistory(file, warn)


def _drop_older_half(file: Path) -> None:
    """Removes the older half of a history file's bytes, up to the beginning of a message. Raises `OSError`."""
    content, begin = file.read_bytes(), b"\n# "
    with atomic_file(file) as partial:
        partial.touch(mode=0o600)
        partial.write_bytes(begin + content[len(content) // 2 :].partition(begin)[2])
