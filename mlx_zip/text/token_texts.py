"""The texts and bytes of single tokens, for log-probabilities and for the parts of hypertokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mlx_zip.text.detokenizer import REPLACEMENT
from mlx_zip.text.token_facts import bytes_by_id

_MOST = 1 << 16  # remembered tokens


class TokenTexts:
    """Maps a token's base ids to its text and its UTF-8 bytes, `tokens[base_ids] -> (text, bytes)`.

    The text of a token that holds part of a character has replacement characters; its bytes are exact.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], tuple[str, bytes]] = {}
        self._before = list(tokenizer.encode("a", add_special_tokens=False))[-1:]

    def __getitem__(self, base_ids: Sequence[int]) -> tuple[str, bytes]:
        """Returns the text and the bytes of a token."""
        key = tuple(base_ids)
        if (found := self._known.get(key)) is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            text = self._text(key)
            found = self._known[key] = (text, text.encode() if REPLACEMENT not in text else self._bytes(key))
        return found

    def _text(self, base_ids: tuple[int, ...]) -> str:
        """Returns what the base ids add to a text; decoders may drop a space at the beginning of a text."""
        return self.decode([*self._before, *base_ids])[len(self.decode(self._before)) :]

    def decode(self, base_ids: Sequence[int]) -> str:
        """Returns the text of base ids, special tokens included; ids without a token have none."""
        known = [i for i in base_ids if i < len(self._tokenizer)]
        return self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _bytes(self, base_ids: tuple[int, ...]) -> bytes:
        """Returns the bytes of base ids that hold part of a character."""
        return b"".join(self._bytes_by_id[i] for i in base_ids if i < len(self._bytes_by_id))

    @cached_property
    def _bytes_by_id(self) -> list[bytes]:
        """The bytes of all base ids; most answers need none of them."""
        return bytes_by_id(self._tokenizer)


def characters(data: bytes) -> int:
    """Returns how many characters begin in a part of a text in UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in data)
