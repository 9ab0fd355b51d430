"""Prepares a text for merging: finds added tokens, normalizes the text, cuts it into pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from mlx_zip.errors import DataError, bare_exceptions_as_value_errors, errors_as
from mlx_zip.vocab.adaptbpe.merge_list import PIECES, cut_into_pieces
from mlx_zip.vocab.first_stage import AddedToken, spelled_to_bytes

CHARACTERS, BLANK = (
    "characters",
    "\u2581",
)  # `pieces` for byte fallback; what spells a blank in such vocabularies

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {  # published patterns; native/pieces.c implements them in C
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": _CL100K,
    "digits": _CL100K.replace("{1,3}", ""),
}
CUT_BY_NAME = {"llama3": "cl100k", "cl100k": "cl100k", "qwen": "digits"}  # .tiktoken files do not say how text is cut


@dataclass(frozen=True)
class PieceSplitter:
    """How texts become pieces.

    pieces: a key of `PIECES`; "tokenizers" to run `pre_tokenizer` (in the form of a tokenizer.json) with the
    `tokenizers` library; or "characters" for byte fallback, with or without a pre_tokenizer. added: added tokens.
    normalizer: in the form of a tokenizer.json, or None. Raises `DataError` if the fields contradict each other.
    """

    pieces: str = "gpt2"
    added: tuple[AddedToken, ...] = ()
    normalizer: Any = None
    pre_tokenizer: Any = field(default=None)

    def __post_init__(self) -> None:
        if self.pieces not in (*PIECES, "tokenizers", CHARACTERS):
            raise DataError(f"pieces {self.pieces!r} is none of {', '.join(PIECES)}, tokenizers, {CHARACTERS}")
        if self.pieces == "tokenizers" and not self.pre_tokenizer:
            raise DataError("pieces 'tokenizers' needs a pre_tokenizer")

    @property
    def encoder_pieces(self) -> str:
        """The key of `PIECES` by which the C encoder cuts its input; "whole" if the input is already cut."""
        return self.pieces if self.pieces in PIECES else "whole"

    def bytes_of_token(self, token: bytes) -> bytes:
        """Returns the text that a token stands for, as bytes: with byte fallback, `BLANK` stands for a blank."""
        return token.replace(BLANK.encode(), b" ") if self.pieces == CHARACTERS else token

    def normalized_parts(self, text: str) -> Iterator[bytes | int]:
        """Yields the normalized parts of a text as UTF-8, and between them the ids of added tokens.

        Raises `DataError` if the text has a lone surrogate.
        """
        raw = [added for added in self.added if not added.normalized]
        late = [added for added in self.added if added.normalized]
        for stretch in _split_at_added_tokens(text, raw):
            if isinstance(stretch, int):
                yield stretch
            else:
                for part in _split_at_added_tokens(self._normalize(stretch), late):
                    yield part if isinstance(part, int) else _as_utf8(part)

    def split_part(self, part: bytes) -> list[bytes]:
        """Cuts one part of a text, in UTF-8, into pieces."""
        if self.pieces in PIECES:
            return cut_into_pieces(part, self.pieces)
        if self.pieces == CHARACTERS and self.pre_tokenizer is None:
            return [part]
        text = part.decode("utf-8", "surrogateescape")
        spelled = (lambda piece: piece.encode("utf-8")) if self.pieces == CHARACTERS else spelled_to_bytes
        return [spelled(piece) for piece, _ in self._library_tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    def _normalize(self, text: str) -> str:
        return self._library_tokenizer.normalizer.normalize_str(text) if self.normalizer else text

    @cached_property
    def _library_tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer` without tokens that has the normalizer and the pre_tokenizer."""
        from tokenizers import Tokenizer

        empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
        parts = {"normalizer": self.normalizer, "pre_tokenizer": self.pre_tokenizer}
        fault = "the tokenizers library cannot read this normalizer or pre_tokenizer"
        with errors_as(DataError, fault, ValueError), bare_exceptions_as_value_errors():
            return Tokenizer.from_str(json.dumps(empty | parts))

    def to_record(self) -> dict[str, Any]:
        """Returns the fields as plain values for a JSON file; `from_record` reads them."""
        return {**asdict(self), "added": [asdict(added) for added in self.added]}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> PieceSplitter:
        """Returns the `PieceSplitter` that `to_record` described. Raises `KeyError` or `TypeError` for another form."""
        added = tuple(AddedToken(**token) for token in record["added"])
        return cls(record["pieces"], added, record["normalizer"], record["pre_tokenizer"])


def piece_rule_of(pre_tokenizer: Any) -> str | None:
    """Returns the key of `PIECES` that cuts like this pre_tokenizer, "tokenizers" if none does.

    Returns None if the pre_tokenizer is not byte-level.
    """
    if not isinstance(pre_tokenizer, dict):
        return None
    steps = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if not isinstance(steps, list) or not steps or not isinstance(steps[-1], dict):
        return None
    if steps[-1].get("type") != "ByteLevel":
        return None
    if steps[-1].get("add_prefix_space", True):
        return "tokenizers"
    by_regex = steps[-1].get("use_regex", True)
    if len(steps) == 1:
        return "gpt2" if by_regex else "whole"
    if len(steps) == 2 and not by_regex:
        return next((name for name, pattern in PATTERNS.items() if _splits_by(steps[0], pattern)), "tokenizers")
    return "tokenizers"


def _splits_by(step: Any, pattern: str) -> bool:
    form = ("Split", "Isolated", False, {"Regex": pattern})
    return isinstance(step, dict) and tuple(map(step.get, ("type", "behavior", "invert", "pattern"))) == form


def _split_at_added_tokens(text: str, added: Sequence[AddedToken]) -> Iterator[str | int]:
    """Yields the parts of a text and the ids of added tokens in it; of several matches the leftmost, then longest."""
    if not added:
        yield from [text] if text else []
        return
    longest_first = sorted(added, key=lambda token: len(token.content), reverse=True)
    at = 0
    for match in re.finditer("|".join(token.pattern for token in longest_first), text):
        if match.start() > at:
            yield text[at : match.start()]
        yield longest_first[(match.lastindex or 1) - 1].id
        at = match.end()
    if at < len(text):
        yield text[at:]


def _as_utf8(text: str) -> bytes:
    """Returns a text in UTF-8, with escaped bytes restored. Raises `DataError` if it has a lone surrogate."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise DataError(f"the text has a lone surrogate at character {error.start}: it is not Unicode text") from error
