"""Writes text to a terminal without harmful characters, and wraps its words at the terminal's width.

Control characters are shown, never sent. What is on the screen is never changed, so nothing flickers.
"""

from __future__ import annotations

import os
import re
from typing import TextIO

from rich.cells import cell_len

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_UNSEEN = (
    *range(0x80, 0xA0),  # a second set of control characters; some terminals take 0x9B for ESC [
    *range(0x2028, 0x202F),  # line separators, and marks that turn the direction of the text around them
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # halves of surrogate pairs, which no terminal can be sent
)
_HALVES = re.compile("[\ud800-\udfff]")
_NO_BYTES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_TABLE = {**_PICTURES, **dict.fromkeys(_UNSEEN, 0xFFFD)}
_WIDEST = 100  # columns; longer lines are hard to read
# Characters of scripts without spaces, around which a line may break.
_WIDE = "\u2e80-\u2fff\u3001-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
_RUNS = re.compile(rf"\s+|[{_WIDE}]|[^\s{_WIDE}]+")
_BROKEN = re.compile(rf".*[\s{_WIDE}]", re.DOTALL)


def replace_control_characters(text: str) -> str:
    """Returns the text with control characters replaced by pictures of them, such as ␛ for escape.

    Newlines and tabs stay. A line that ends in a carriage return and a newline ends in a newline alone. Characters
    without a picture become the replacement character.
    """
    if text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_TABLE)


def repair_surrogates(text: str) -> str:
    """Returns typed text as valid Unicode: bytes that were not UTF-8 become the replacement character.

    Python reads such bytes from a terminal as lone surrogates. Adjacent surrogates whose bytes together are valid UTF-8
    become that character.
    """
    if not _HALVES.search(text):
        return text
    return _NO_BYTES.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def last_break_length(text: str) -> int:
    """Returns the length of the longest prefix of `text` after which a line may break, 0 if there is none."""
    found = _BROKEN.match(text)
    return found.end() if found else 0


def style_text(text: str, codes: str) -> str:
    """Returns text with terminal attributes. codes: SGR codes such as "1;36"; "" leaves the text unchanged."""
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


class Screen:
    """Writes wrapped text to a terminal. out: text stream of the terminal, whose cursor must be at the left margin.

    Text is collected until `flush` writes it.
    """

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._pending: list[str] = []
        self._word: list[tuple[str, str]] = []  # parts of a word that may go on: text and its SGR codes
        self._spaces = self._column = self._margin = 0
        self._hang = ""  # text that each continuation of a wrapped line begins with
        self._blank = True  # whether the last line is empty, or nothing was written yet

    @property
    def columns(self) -> int:
        """Maximum width of a line, at most 100; read anew each time, because the terminal may be resized."""
        try:
            found = os.get_terminal_size(self.out.fileno()).columns
        except (OSError, ValueError):  # not a terminal
            found = 0
        return min(found or 80, _WIDEST)

    def begin_line(self, text: str, hang: str) -> None:
        """Begins a line with text such as a bullet. hang: text that each further line begins with if the line wraps."""
        self._write(text)
        self._hang, self._margin = hang, cell_len(hang)

    def put_text(self, text: str, codes: str = "") -> None:
        """Adds text without newlines. A word may arrive in several parts and is placed on a line when it ends."""
        for run in _RUNS.findall(text):
            if run.isspace():
                self.end_word()
                self._spaces = 1
            elif len(run) == 1 and _BROKEN.match(run):
                self.end_word()
                self._word.append((run, codes))
                self.end_word()
            else:
                self._word.append((run, codes))

    def end_word(self) -> None:
        """Places the collected word on the current line, or on the next line if it does not fit."""
        if not self._word:
            return
        width = sum(cell_len(text) for text, _ in self._word)
        if self._column > self._margin and self._column + self._spaces + width > self.columns:
            self._pending.append("\n")
            self._column = 0
            self._write(self._hang)
        elif self._column > self._margin:
            self._write(" " * self._spaces)
        for text, codes in self._word:
            self._write(text, codes)
        self._word, self._spaces = [], 0

    def newline(self) -> None:
        """Ends the line; of several empty lines in a row writes only one."""
        self.end_word()
        empty = self._column == 0
        if not (empty and self._blank):
            self._pending.append("\n")
        self._blank, self._column, self._spaces, self._hang, self._margin = empty, 0, 0, "", 0

    def end_line(self) -> None:
        """Ends the line if it is not empty."""
        self.end_word()
        if self._column:
            self.newline()

    def write_lines(self, lines: str) -> None:
        """Writes whole lines as they are; they may hold SGR codes."""
        self.end_line()
        if lines:
            self._pending.append(lines if lines.endswith("\n") else lines + "\n")
            self._blank = False

    def flush(self) -> None:
        """Writes the collected text. Raises `OSError`, for example if the reader of a pipe has left."""
        if self._pending:
            text = "".join(self._pending)
            self._pending = []
            self.out.write(text)
            self.out.flush()

    def _write(self, text: str, codes: str = "") -> None:
        if text:
            self._pending.append(style_text(text, codes))
            self._column = (self._column + cell_len(text) - 1) % self.columns + 1  # a terminal wraps at its width
