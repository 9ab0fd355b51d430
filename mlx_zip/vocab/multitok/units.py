"""What the units of a dictionary are: the words of a list, or the ids of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.errors import CodecError, DataError

UNKNOWN = "�"  # stands for a word that was not known when it was numbered


@dataclass(frozen=True)
class Words:
    """The words of a list, in the order of their numbers; by default what Python's `str.split()` takes for words.

    Raises `CodecError` where the list is empty or holds a word twice.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        if len(self._numbers) != len(self.words) or not self.words:
            raise CodecError("the list of words is empty" if not self.words else "the list of words holds one twice")

    @classmethod
    def in_order(cls, samples: Iterable[Iterable[str]]) -> Words:
        """All words of some samples, in the order of their first appearance."""
        seen: dict[str, None] = {}
        for sample in samples:
            seen.update(dict.fromkeys(sample))
        return cls(tuple(seen))

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.words)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def numbers(self, sample: Sequence[str]) -> Uint32s:
        """Words -> numbers uint32 [n]; a word that is not in the list gets `size`."""
        get, unknown = self._numbers.get, len(self.words)
        return np.fromiter((get(word, unknown) for word in sample), np.uint32, len(sample))

    def shown(self, numbers: Iterable[int]) -> str:
        """Numbers -> text, a blank between words."""
        return " ".join(self.words[number] if number < len(self.words) else UNKNOWN for number in numbers)

    def refusal(self, sample: Sequence[Any], at: int) -> str:
        """What is wrong with the unit at a place that has no number."""
        return f"word {sample[at]!r:.60} is none of the dictionary's {self.size}"

    def to_dict(self) -> dict[str, Any]:
        """For a file."""
        return {"kind": "words", "words": list(self.words)}


@dataclass(frozen=True)
class Tokens:
    """The ids 0..size-1 of a tokenizer, which is known by its `first_stage.tokenizer_fingerprint` (empty: any's)."""

    size: int
    fingerprint: str = ""

    def may_be(self, other: Tokens) -> bool:
        """Whether these can be the ids of another's tokenizer, as far as both know theirs."""
        known = {self.fingerprint, other.fingerprint} - {""}
        return self.size == other.size and len(known) < 2

    def numbers(self, sample: Any) -> Uint32s:
        """Ids as they are, uint32 [n]; see `as_ids`."""
        return as_ids(sample)

    def shown(self, numbers: Iterable[int]) -> str:
        """Numbers -> text: the ids, as nothing here knows what they stand for."""
        return " ".join(map(str, numbers))

    def refusal(self, sample: Sequence[Any], at: int) -> str:
        """What is wrong with the unit at a place that has no number."""
        return f"id {sample[at]} is not below {self.size}, the tokenizer's size"

    def to_dict(self) -> dict[str, Any]:
        """For a file."""
        return {"kind": "tokens", "size": self.size, "fingerprint": self.fingerprint}


Units = Words | Tokens


def units_from_dict(data: Any) -> Units:
    """What `to_dict` gave. Raises `DataError` naming the field."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "words":
        words = data.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DataError("units.words must be a list of words")
        try:
            return Words(tuple(words))
        except CodecError as error:
            raise DataError(f"units.words: {error}") from error
    if kind == "tokens":
        size, fingerprint = data.get("size"), data.get("fingerprint")
        if type(size) is not int or size < 1 or not isinstance(fingerprint, str):
            raise DataError("units must have a size of at least 1 and a fingerprint")
        return Tokens(size, fingerprint)
    raise DataError(f"units.kind must be words or tokens, got {kind!r:.40}")
