"""Encodes long texts piece by piece; refuses a text that must exceed the token limit, and stops when cancelled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from mlx_zip.errors import PromptTooLongError
from mlx_zip.text.prompts import encode_text
from mlx_zip.text.token_facts import bytes_by_id, leading_special_ids, longest_token_bytes

PIECE = 1 << 16  # characters that the tokenizer gets at a time
LONGEST_PIECE = 1 << 19  # maximum characters of a piece in which no word ends
NO_PROMPT, MOST_ESCAPED = 1 << 20, 6  # bytes of a body that may be no prompt; maximum bytes of JSON per byte of text
Check = Callable[[], None]  # raises if the request was cancelled
_END_OF_WORD = re.compile(r"[^\W\d_](?= [^\W\d_])")
_ACROSS_WORDS = re.compile(rb"[A-Za-z\x80-\xff] ")
_PROBES = (("one", "two"), ("A", "b"), ("it's", "a"), ("é", "ü"), ("今日", "は"))


class LongTexts:
    """Checks long texts for one tokenizer and splits them into pieces. May be used from any thread.

    most: maximum base tokens of a prompt, None for no limit.
    """

    def __init__(self, tokenizer: Any, most: int | None) -> None:
        self.tokenizer, self.most = tokenizer, most

    def check_text_size(self, size: int, what: str = "it") -> None:
        """Raises `PromptTooLongError` if `size` bytes of text need more than `most` tokens. what: name of the text."""
        if self.most is None or size <= self.most or self._longest_token_bytes is None:
            return
        if (least := -(-size // self._longest_token_bytes)) > self.most:
            raise PromptTooLongError.of(least, self.most, f"counted from {size} bytes, {what} has at least so many")

    def check_request_size(self, size: int, prompts: int) -> None:
        """Raises `PromptTooLongError` if a body of `size` bytes must have a prompt that is too long.

        prompts: maximum number of prompts in the body, counting a prediction as a prompt. JSON has up to six bytes per
        byte of text. Reasoning in the body counts even if the chat template leaves it out.
        """
        if size > NO_PROMPT:
            what = "it" if prompts == 1 else "one of the request's texts"
            self.check_text_size((size - NO_PROMPT) // (MOST_ESCAPED * prompts), what)

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields (piece, whether it begins in the middle of a word) for all pieces of a text.

        The text is cut between words, so the base ids that `encode` returns for all pieces, joined, equal those of the
        whole text. If no word ends within `LONGEST_PIECE` characters, the text is cut inside a word, and the base ids
        next to the cut may differ.
        """
        at, goes_on = 0, False
        while at < len(text):
            end, skip = self._end_of_piece(text, at)
            yield text[at:end], goes_on
            at, goes_on = end + (skip or 0), skip is None

    def _end_of_piece(self, text: str, at: int) -> tuple[int, int | None]:
        """Returns the end of the piece that begins at `at`, and the number of characters to skip after the piece.

        The number is None if the cut may be in the middle of a word.
        """
        if len(text) - at <= PIECE:
            return len(text), 0
        last = at + LONGEST_PIECE
        if self._skip_between_pieces is not None and (found := _END_OF_WORD.search(text, at + PIECE, last)):
            return found.end(), self._skip_between_pieces
        return min(last, len(text)), None

    def encode(self, piece: str, goes_on: bool) -> list[int]:
        """Returns the base ids of a piece. goes_on: whether the piece begins in the middle of a word.

        If so, the piece is encoded after a newline, because the tokenizer may put a space in front of every text.
        """
        if goes_on:
            before, ids = encode_text(self.tokenizer, "\n"), encode_text(self.tokenizer, f"\n{piece}")
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return encode_text(self.tokenizer, piece)

    @cached_property
    def _longest_token_bytes(self) -> int | None:
        """An upper bound on the bytes of text per token, None if unknown."""
        return longest_token_bytes(self.tokenizer)

    @cached_property
    def _skip_between_pieces(self) -> int | None:
        """Number of characters to skip between two pieces: 1 if the tokenizer puts a space before every text, else 0.

        None if texts must not be cut between words, because a token may span the end of a word, or the ids of two words
        depend on each other.
        """
        if any(map(_ACROSS_WORDS.search, bytes_by_id(self.tokenizer))):
            return None
        return next((skip for skip in (0, 1) if all(self._encodes_separately(*pair, skip) for pair in _PROBES)), None)

    def _encodes_separately(self, left: str, right: str, skip: int) -> bool:
        """Returns whether "left right" encodes to the ids of `left` plus the ids of " right" from `skip` on."""
        encode = lambda text: encode_text(self.tokenizer, text)
        return encode(f"{left} {right}") == encode(left) + encode(f" {right}"[skip:])

    @cached_property
    def special_ids_around(self) -> tuple[list[int], list[int]]:
        """Ids of the special tokens that the tokenizer adds before and after a text."""
        bare, whole = self.tokenizer.encode("a", add_special_tokens=False), list(self.tokenizer.encode("a"))
        before = list(leading_special_ids(self.tokenizer))
        return before, whole[len(before) + len(bare) :]


def utf8_size(text: str) -> int:
    """Returns the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class LongEncoding:
    """Encodes the texts of one prompt; called like `encode_text`. check: called before each piece."""

    def __init__(self, texts: LongTexts, check: Check) -> None:
        self._texts, self._check, self._tokens = texts, check, 0

    def __call__(self, tokenizer: Any, text: str, special: bool = False) -> list[int]:
        """Returns the base ids of a text.

        Raises `PromptTooLongError` as soon as the prompt has too many tokens, and the errors of `encode_text` and
        `check`.
        """
        self._check()
        self._texts.check_text_size(utf8_size(text))
        if len(text) <= PIECE:
            return self._count_tokens(encode_text(tokenizer, text, special))
        bos = tokenizer.bos_token
        before, after = self._texts.special_ids_around if special and not (bos and text.startswith(bos)) else ([], [])
        ids = list(before)
        for piece, goes_on in self._texts.pieces(text):
            self._check()
            self._raise_if_too_long()
            ids += self._count_tokens(self._texts.encode(piece, goes_on))
        return ids + after

    def _count_tokens(self, ids: list[int]) -> list[int]:
        self._tokens += len(ids)
        return ids

    def _raise_if_too_long(self) -> None:
        most = self._texts.most
        if most is not None and self._tokens > most:
            raise PromptTooLongError.of(self._tokens, most, "it has at least so many, and was not read to its end")
