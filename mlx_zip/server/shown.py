"""Which emitted ids an answer's text consists of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_zip.engine import Emitted
from mlx_zip.server.turn import ShownToken
from mlx_zip.text.token_texts import TokenTexts

Facts = tuple[int, tuple[str, ...], str, int]  # the fields of a `ShownToken` between `text` and `continues`


@dataclass(eq=False)
class _Placed:
    """A token and the characters of the answer that it gave: from `begin` up to `end`. shown: whether a text has it."""

    facts: Facts
    begin: int
    end: int
    shown: bool = False


class ShownTokens:
    """The tokens of one answer, placed by the characters that they gave, until a piece of text takes them.

    Characters are counted from the answer's beginning, with those of reasoning and of calls of tools. A token whose
    characters come in two pieces is in both.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._waiting: deque[_Placed] = deque()
        self._last: _Placed | None = None
        self._end = 0

    def add(self, event: Emitted, base_ids: Sequence[int], characters: int) -> None:
        """Adds an emitted id. base_ids: its base ids in the text. characters: all that there are of the answer now."""
        if not base_ids:
            self.extend(characters)
            return
        self._last = _Placed(self._facts(event, base_ids), self._end, characters)
        self._end = characters
        self._waiting.append(self._last)

    def extend(self, characters: int) -> None:
        """Gives characters that come at the answer's end, for bytes of an incomplete one, to the last token."""
        last, begin, self._end = self._last, self._end, characters
        if last is None or characters == begin:
            return
        if last not in self._waiting:
            last.begin = begin
            self._waiting.append(last)
        last.end = characters

    def take(self, begin: int, text: str) -> tuple[ShownToken, ...]:
        """Returns the tokens of the text that begins with character `begin`, and forgets those of what precedes it."""
        end, found = begin + len(text), []
        while self._waiting and (placed := self._waiting[0]).begin < end:
            if placed.end > begin or placed.begin >= begin:
                part = text[max(placed.begin - begin, 0) : placed.end - begin]
                found.append(ShownToken(part, *placed.facts, placed.shown))
                placed.shown = True
            if placed.end > end:
                placed.begin = end
                break
            self._waiting.popleft()
        return tuple(found)

    def _facts(self, event: Emitted, base_ids: Sequence[int]) -> Facts:
        """Returns what is known of an emitted id besides its text."""
        if event.origin is None:
            return event.id, (), "", -1
        parts = tuple(self._texts[(one,)][0] for one in base_ids)
        return event.id, parts, event.origin.kind, event.origin.at
