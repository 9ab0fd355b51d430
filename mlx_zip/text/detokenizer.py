"""Turns base ids into text, one id at a time, so that the whole text is that of the tokenizer's own `decode`."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\ufffd"  # stands for bytes that are no complete character (yet)


class Detokenizer:
    """Streams the text of ids with mlx-lm's interface: `add_token`, `text`, `last_segment`, `finalize`, `reset`.

    `text` is the text so far and only grows; an incomplete character is held back until `finalize`. Each id costs one
    `decode` of the few ids since the last but one piece of text: a decoder may drop a space at the beginning of a text,
    so the ids of the piece before are decoded too.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Forgets all ids."""
        self.tokens: list[int] = []
        self.text = ""
        self.offset = 0
        self._begin = self._shown = 0  # ids from `_begin` are decoded; those before `_shown` are in the text

    def add_token(self, token: int) -> None:
        """Adds the next id, and its text to `text` unless the text ends within a character."""
        self.tokens.append(token)
        self._extend(final=False)

    def finalize(self) -> None:
        """Adds the text that was held back to `text`."""
        self._extend(final=True)

    @property
    def last_segment(self) -> str:
        """The text since this property was last read."""
        segment, self.offset = self.text[self.offset :], len(self.text)
        return segment

    def _extend(self, final: bool) -> None:
        """Adds the text of new ids to `text`. final: add incomplete characters too."""
        known, whole = (self._decode(end) for end in (self._shown, len(self.tokens)))
        if len(whole) <= len(known) or (whole.endswith(REPLACEMENT) and not final):
            return
        self.text += whole[len(known) :]
        self._begin, self._shown = self._shown, len(self.tokens)

    def _decode(self, end: int) -> str:
        """Returns the text of the ids from `_begin` up to the index `end`."""
        ids = self.tokens[self._begin : end]
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
