"""Base ids to text, one id at a time, with the text that the tokenizer's own `decode` gives."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\ufffd"  # stands for bytes that are no complete character (yet)


class Detokenizer:
    """Streams the text of ids with mlx-lm's interface: `add_token`, `text`, `last_segment`, `finalize`, `reset`.

    `text` grows only; an incomplete character is held back until `finalize`. Each id costs a `decode` of the few ids
    since the last but one piece of text, so that spaces between words, which a decoder may drop at the beginning of a
    text, come out as in a `decode` of all ids.
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
        """Takes the next id."""
        self.tokens.append(token)
        self._extend(final=False)

    def finalize(self) -> None:
        """Adds what was held back."""
        self._extend(final=True)

    @property
    def last_segment(self) -> str:
        """The text since this property was last read."""
        segment, self.offset = self.text[self.offset :], len(self.text)
        return segment

    def _extend(self, final: bool) -> None:
        known, whole = (self._decode(end) for end in (self._shown, len(self.tokens)))
        if len(whole) <= len(known) or (whole.endswith(REPLACEMENT) and not final):
            return
        self.text += whole[len(known) :]
        self._begin, self._shown = self._shown, len(self.tokens)

    def _decode(self, end: int) -> str:
        ids = self.tokens[self._begin : end]
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
