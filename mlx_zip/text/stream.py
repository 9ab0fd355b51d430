"""Turns generated base ids into text that may be shown, and finds where a text ends.

A text ends at an eos, at a stop string (matched in the text, independent of token borders) or at the token limit. The
tokenizer's streaming detokenizer decodes the ids. Text may be shown one or more ids later than it was generated, or not
at all, so `TextStream.characters` counts the characters that were generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mlx_zip.errors import GenerationError
from mlx_zip.text.tokenizers import as_tokenizer


class StopMatcher:
    """Cuts text before the stop string that is completed first, and holds back text that may become a stop string.

    The result does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(stops)
        if "" in self.stops:
            raise GenerationError("a stop string (--stop) is empty")
        if wrong := [stop for stop in self.stops if not isinstance(stop, str)]:
            raise GenerationError(f"a stop string (--stop) must be text, got {wrong[0]!r:.80}")
        self.matched = False
        self.stopped_by: str | None = None  # the stop string that ended the text
        self._held = ""

    def feed(self, text: str) -> str:
        """Takes the next piece of text and returns the text that may now be shown.

        `matched` is True afterwards if a stop string ended the text.
        """
        if not self.stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            self.matched, self._held = True, ""
            _, at, self.stopped_by = min(ends)
            return text[:at]
        shown = len(text) - partial_mark_length(text, self.stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Returns the text held back. Call it when no more text will come."""
        held, self._held = self._held, ""
        return held


def partial_mark_length(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest suffix of a text that is a proper prefix of a mark, 0 if there is none."""
    longest = max(map(len, marks), default=1) - 1
    tails = range(min(longest, len(text)), 0, -1)
    return next((n for n in tails if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class TextPiece(NamedTuple):
    """What one generated id adds to a text. text: the text that may now be shown.

    base_ids: base ids of the generated id, up to the end of the text, including eos. finish_reason: "stop" or "length"
    if the text has ended (see `TextStream`), else None.
    """

    text: str
    base_ids: tuple[int, ...]
    finish_reason: str | None


class TextStream:
    """Decodes one generated sequence, which is fed one expansion (the base ids of one emitted id) at a time.

    tokenizer: our `Tokenizer`, mlx-lm's `TokenizerWrapper` (the text is then the one that mlx-lm prints), or a bare
    tokenizer of transformers.

    Ends with finish_reason "stop" at an eos or a stop string, and with "length" after `max_tokens` base tokens (None:
    no limit), also in the middle of an expansion. Ids without a token add no text.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None, stop: Iterable[str] = ()) -> None:
        tokenizer = as_tokenizer(tokenizer)
        self._detokenizer = tokenizer.detokenizer
        self._tokens = len(tokenizer)  # embeddings may have more rows than there are tokens
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._max_tokens = max_tokens
        self._stops = StopMatcher(stop)
        self._taken = 0  # number of characters
        self.base_tokens = 0

    def feed(self, expansion: Sequence[int], last: bool = False) -> TextPiece:
        """Takes the base ids of one generated id and returns the piece that the id adds to the text.

        last: whether no further id can follow, because the limit is reached or the context is full.
        """
        text = ""
        for n, base_id in enumerate(expansion, start=1):
            self.base_tokens += 1
            if base_id in self._eos:
                return self._make_last_piece(text, tuple(expansion[:n]), "stop")
            text += self._stops.feed(self._next_segment(base_id))
            if self._stops.matched:
                return TextPiece(text, tuple(expansion[:n]), "stop")
            if self.base_tokens == self._max_tokens or (last and n == len(expansion)):
                return self._make_last_piece(text, tuple(expansion[:n]), "length")
        return TextPiece(text, tuple(expansion), None)

    @property
    def characters(self) -> int:
        """Number of characters decoded so far, including text that is held back or cut off."""
        return self._taken

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, else None."""
        return self._stops.stopped_by

    def finish(self, reason: str) -> TextPiece:
        """Ends the text at the caller's request and returns the text held back.

        reason: the finish_reason, unless the text held back completes a stop string (then "stop").
        """
        return self._make_last_piece("", (), reason)

    def _next_segment(self, base_id: int) -> str:
        if base_id >= self._tokens:
            return ""
        self._detokenizer.add_token(base_id)
        return self._take_new_text()

    def _take_new_text(self) -> str:
        """Returns the part of the detokenizer's text that was not taken before.

        The detokenizer's text may shrink for a while: with a byte-fallback decoder, the first byte of a character turns
        preceding characters that are spelled as bytes into replacement characters, until the character is complete.
        """
        text = self._detokenizer.text
        new, self._taken = text[self._taken :], max(self._taken, len(text))
        return new

    def _make_last_piece(self, text: str, counted: tuple[int, ...], reason: str) -> TextPiece:
        """Returns the last piece: `text` plus held-back text. counted: the piece's base ids. reason: see `finish`."""
        self._detokenizer.finalize()
        text += self._stops.feed(self._take_new_text())
        if self._stops.matched:
            return TextPiece(text, counted, "stop")
        return TextPiece(text + self._stops.flush(), counted, reason)
