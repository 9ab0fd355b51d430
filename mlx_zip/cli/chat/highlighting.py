"""Colours lines of code as they arrive."""

from __future__ import annotations

from typing import Any

from pygments import highlight
from pygments.formatters import TerminalFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

LONGEST = 2000  # characters of a line that is coloured
SEEN = 60  # lines before a line that tell what it is in, for example a long string


class Highlighter:
    """A block of code. fence: marks that it begins with. coloured: whether the code is to be coloured at all."""

    def __init__(self, fence: str, language: str, coloured: bool) -> None:
        self._fence = fence
        self._lexer = _lexer(language) if coloured else None
        self._formatter: Any = TerminalFormatter()
        self._lines: list[str] = []

    def ends(self, line: str) -> bool:
        """Returns whether a line is the block's last one."""
        bare = line.strip()
        return len(bare) >= len(self._fence) and not bare.strip(self._fence[0])

    def line(self, line: str) -> str | None:
        """Returns the block's next line in colours, None if that is not to be coloured."""
        if self._lexer is None or len(line) > LONGEST:
            return None
        self._lines = [*self._lines[-SEEN:], line]
        shown = highlight("\n".join(self._lines), self._lexer, self._formatter).split("\n")
        return shown[len(self._lines) - 1]


def _lexer(language: str) -> Any:
    """Returns what cuts code of a language into tokens, None if the language is not known."""
    name = language.split(" ")[0].split("{")[0]
    try:
        return get_lexer_by_name(name, stripnl=False, ensurenl=True) if name else None
    except ClassNotFound:
        return None
