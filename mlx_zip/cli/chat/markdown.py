"""Renders Markdown on a terminal as the text arrives; never changes what is already on the screen.

A word is written when it is complete, a phrase between marks (**, `, [) when its closing mark arrives, a line of code
when it ends, and a table after its last row. Line breaks are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import TerminalFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from rich.console import Console
from rich.markdown import Markdown

from mlx_zip.cli.chat.screen import Screen, last_break_length, replace_control_characters, style_text

_MOST_HELD = 400  # characters; longer text is written without waiting for a closing mark
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_SPECIAL = re.compile(r"[*_`~\[\]\\&<!]")
_OPEN = re.compile(r"(?<!\w)_(?=\S)|\*(?=\S)|`|~~(?=\S)|\[[^\]]*$|\]\([^)]*$")  # a mark whose closing mark may follow
_FENCE = re.compile(r" *(`{3,}|~{3,}) *([^`]*)")
_HEADING = re.compile(r"(#{1,6}) (.*)")
_RULE = re.compile(r" {0,3}([-*_])(?: *\1){2,} *")
_LEAD = re.compile(r"( *)((?:> ?)*)( *)(?:([-*+]|\d{1,9}[.)]) +)?")
_WHOLE = re.compile(r" *(?:```|~~~)|#{1,6} |\|")  # start of a line that is written only when complete
_UNDECIDED = re.compile(r"`{0,2}|~{0,2}|#{0,6}|(?:[-*_] *)*|(?:> *)*(?:[-*+]|\d{1,9}[.)]?)?")  # kind not decided yet
_SGR = re.compile(r"\x1b\[[\d;]*m")
_STRONG = "1"
_STYLES = {"strong_open": _STRONG, "em_open": "3", "s_open": "9", "link_open": "4"}
_CODE, _FAINT = "94", "2"
_ONE = chr(1)  # in `MarkdownStream._lengths`: an id of one base token, which has no tint
_LONGEST_COLOURED = 2000  # characters; longer lines of code are not coloured
_SEEN = 60  # number of earlier lines given to the highlighter, because a line may be inside a long string


class MarkdownStream:
    """Renders one answer on `screen`. tint: number of base tokens of an id -> SGR code of the id's text, "" for none.

    coloured: whether to colour tables, inline code and, if `tint` colours nothing, blocks of code.
    """

    def __init__(self, screen: Screen, tint: Callable[[int], str], coloured: bool = True) -> None:
        self.screen, self._tint, self._coloured = screen, tint, coloured
        self._text = self._lengths = ""  # unwritten text; per character, chr(base tokens of its id)
        self._state = self._at_line_start
        self._code: _Highlighter | None = None
        self._table: list[str] = []

    def feed(self, text: str, length: int = 1) -> None:
        """Takes the next piece of text and writes what is complete. length: number of base tokens of the piece's id."""
        text = replace_control_characters(text)
        self._text += text
        self._lengths += chr(length) * len(text)
        while self._state(False):
            pass
        self.screen.flush()

    def finish(self) -> None:
        """Writes the text that was held back, and ends the line."""
        while self._text and self._state(True):
            pass
        self._end_table()
        self.screen.end_line()
        self.screen.flush()

    # States: each writes what is complete and returns whether to call the next state. final: whether the answer ended.

    def _at_line_start(self, final: bool) -> bool:
        line, whole = self._held_line(final)
        if not whole and (_UNDECIDED.fullmatch(line.strip(" ")) or _WHOLE.match(line)):
            return False
        if not line.startswith("|"):
            self._end_table()
        if not (whole and self._write_whole_line(line)):
            self._begin_text(line)
        return True

    def _held_line(self, final: bool) -> tuple[str, bool]:
        line, newline, _ = self._text.partition("\n")
        return line, bool(newline) or final

    def _write_whole_line(self, line: str) -> bool:
        """Writes a complete line that is not running text, such as a heading; returns False if it is running text."""
        if fence := _FENCE.fullmatch(line):
            self.screen.write_lines(style_text(line, _FAINT))
            coloured = self._coloured and not self._tint(2)
            self._code, self._state = _Highlighter(fence[1], fence[2].strip(), coloured), self._in_code
        elif heading := _HEADING.fullmatch(line):
            self._write_heading(heading)
        elif _RULE.fullmatch(line):
            self.screen.write_lines(style_text("─" * min(self.screen.columns, 40), _FAINT))
        elif line.startswith("|"):
            self._table.append(line)
        elif not line.strip():
            self.screen.newline()
        else:
            return False
        self._drop_written(len(line) + 1)
        return True

    def _write_heading(self, found: re.Match[str]) -> None:
        text = found[2].rstrip(" ")
        if (bare := text.rstrip("#")).endswith(" "):
            text = bare.rstrip(" ")
        self._write(text, self._lengths[found.start(2) :], [_STRONG], _parse_inline(text))
        self.screen.newline()

    def _begin_text(self, line: str) -> None:
        lead = _LEAD.match(line)
        assert lead is not None
        bars, bullet = "│ " * lead[2].count(">"), lead[4] or ""
        shown = lead[1] + bars + lead[3] + ("• " if bullet in ("-", "*", "+") else bullet + " ") * bool(bullet)
        self.screen.begin_line(shown, lead[1] + bars + " " * (len(shown) - len(lead[1]) - len(bars)))
        self._drop_written(lead.end())
        self._state = self._in_text

    def _in_text(self, final: bool) -> bool:
        line, whole = self._held_line(final)
        endless = len(line) > _MOST_HELD and not last_break_length(line)
        ready = len(line) if whole or endless else last_break_length(line)
        if ready and not self._write_ready(line[:ready], whole):
            return False
        if endless:
            self.screen.end_word()
        if not whole:
            return False
        self.screen.newline() if self._text.startswith("\n") else self.screen.end_word()
        self._drop_written(1)
        self._state = self._at_line_start
        return True

    def _write_ready(self, piece: str, whole: bool) -> bool:
        """Writes the piece, or its part before a mark that may still be closed; returns whether all was written."""
        special = _SPECIAL.search(piece)
        tokens = _parse_inline(piece)
        if special and not (whole or len(piece) > _MOST_HELD or _has_all_marks_closed(tokens)):
            piece = piece[: last_break_length(piece[: special.start()])]
            self._add_tinted_text(piece, self._lengths, [])
            self._drop_written(len(piece))
            return False
        self._write(piece, self._lengths, [], tokens)
        self._drop_written(len(piece))
        return True

    def _in_code(self, final: bool) -> bool:
        line, whole = self._held_line(final)
        if not whole:
            return False
        assert self._code is not None
        if self._code.is_closing_fence(line):
            self.screen.write_lines(style_text(line, _FAINT))
            self._state = self._at_line_start
        else:
            lit = self._code.highlight_line(line)
            self.screen.write_lines((lit if lit is not None else self._tint_line(line, self._lengths)) + "\n")
        self._drop_written(len(line) + 1)
        return True

    def _end_table(self) -> None:
        if not self._table:
            return
        table, out = Markdown("", hyperlinks=False), StringIO()
        table.parsed = _PARSER.parse("\n".join(self._table))
        console = Console(
            file=out,
            width=self.screen.columns,
            force_terminal=True,
            color_system="standard" if self._coloured else None,
            legacy_windows=False,
        )
        console.print(table)
        self._table = []
        lines = out.getvalue().split("\n")
        self.screen.write_lines("\n".join(line.rstrip() for line in lines if _SGR.sub("", line).strip()))

    # Text of one line.

    def _write(self, piece: str, lengths: str, styles: Sequence[str], tokens: Sequence[Token]) -> None:
        """Writes a piece of a line whose marks are all closed.

        styles: SGR codes of the whole piece. tokens: inline tokens of the piece.
        """
        at, styles, links = 0, list(styles), [("", 0)]
        for token in tokens:
            if token.nesting > 0:
                styles.append(_STYLES.get(token.type, ""))
                links += [(str(token.attrs.get("href", "")), at)] * (token.type == "link_open")
            elif token.nesting < 0:
                styles.pop()
                if token.type == "link_close" and (link := links.pop())[0] not in piece[link[1] : at]:
                    self.screen.put_text(f" ({link[0]})", _FAINT)
            elif token.content:
                found = piece.find(token.content, at)  # -1 if the source is spelled differently: &amp;
                at = found + len(token.content) if found >= 0 else at
                code = [_CODE] if token.type == "code_inline" and self._coloured else []
                self._add_tinted_text(token.content, lengths[found:at] if found >= 0 else "", [*styles, *code])
        if piece[at:].endswith(" "):  # the parser may drop it
            self.screen.put_text(" ")

    def _add_tinted_text(self, text: str, lengths: str, styles: Sequence[str]) -> None:
        """Adds text, tinted per character. lengths: like `self._lengths`; characters beyond its end get no tint."""
        for piece, tint in self._tinted_pieces(text, lengths):
            self.screen.put_text(piece, ";".join(filter(None, [*styles, tint])))

    def _tint_line(self, line: str, lengths: str) -> str:
        return "".join(style_text(piece, tint) for piece, tint in self._tinted_pieces(line, lengths))

    def _tinted_pieces(self, text: str, lengths: str) -> Iterator[tuple[str, str]]:
        """Yields the pieces of a text whose characters have equal lengths in base tokens, each with its tint."""
        padded = lengths[: len(text)].ljust(len(text), _ONE)
        for run in re.finditer(r"(.)\1*", padded, re.DOTALL):
            yield text[run.start() : run.end()], self._tint(ord(run[1]))

    def _drop_written(self, n: int) -> None:
        self._text, self._lengths = self._text[n:], self._lengths[n:]


def _parse_inline(piece: str) -> Sequence[Token]:
    """Returns the inline tokens of a piece of a line; plain text is one token."""
    if not _SPECIAL.search(piece):
        return [Token("text", "", 0, content=piece)]
    return _PARSER.parseInline(piece)[0].children or []


def _has_all_marks_closed(tokens: Sequence[Token]) -> bool:
    return not any(token.type == "text" and _OPEN.search(token.content) for token in tokens)


class _Highlighter:
    """Colours a block of code line by line. fence: the marks that begin the block. coloured: whether to colour it."""

    def __init__(self, fence: str, language: str, coloured: bool) -> None:
        self._fence = fence
        self._lexer = _find_lexer(language) if coloured else None
        self._formatter: Any = TerminalFormatter()
        self._lines: list[str] = []

    def is_closing_fence(self, line: str) -> bool:
        """Returns whether a line is the block's last one."""
        bare = line.strip()
        return len(bare) >= len(self._fence) and not bare.strip(self._fence[0])

    def highlight_line(self, line: str) -> str | None:
        """Returns the block's next line with SGR codes, None if the line is not to be coloured."""
        if self._lexer is None or len(line) > _LONGEST_COLOURED:
            return None
        self._lines = [*self._lines[-_SEEN:], line]
        shown = highlight("\n".join(self._lines), self._lexer, self._formatter).split("\n")
        return shown[len(self._lines) - 1]


def _find_lexer(language: str) -> Any:
    """Returns the lexer of a language, None if pygments does not have one."""
    name = language.split(" ")[0].split("{")[0]
    try:
        return get_lexer_by_name(name, stripnl=False, ensurenl=True) if name else None
    except ClassNotFound:
        return None
