"""The units of a dictionary (the words of a list, or the ids of a tokenizer), and samples of units or of ids.

The module also holds a dictionary's settings for training, its totals, and how it was pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.errors import CodecError, DataError, errors_as

MAX_PHRASES: int = lib.MLXZIP_MAX_PHRASES
NO_ID = (1 << 32) - 1  # id of a run that is only the beginning of phrases
PRUNINGS = ("published", "single", "parent", "reencode")
Ends = NDArray[np.uint64]
UNKNOWN = "�"  # shown for an unknown word


@dataclass(frozen=True, eq=False)
class Samples:
    """m sequences, joined: ids (or units) uint32 [n], ends uint64 [m]; sequence k ends before ends[k].

    Ids after the last end belong to a sequence that is still open. Iterating yields the m sequences as views.
    """

    ids: Uint32s
    ends: Ends

    @classmethod
    def from_sequences(cls, sequences: Iterable[Any]) -> Samples:
        """Returns sequences of ids as samples. Accepts the types, and raises the errors, of `as_ids`."""
        arrays = [as_ids(sequence) for sequence in sequences]
        ids = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
        return cls(ids, np.cumsum([len(array) for array in arrays], dtype=np.uint64))

    @classmethod
    def join(cls, parts: Iterable[Samples]) -> Samples:
        """Joins parts in order; ids after the last end of a part belong to the first sequence of the next part."""
        parts = [cls.from_sequences([]), *parts]
        starts = np.cumsum([0, *(len(part.ids) for part in parts[:-1])]).astype(np.uint64)
        ends = [part.ends + start for part, start in zip(parts, starts, strict=True)]
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Uint32s]:
        start = 0
        for end in self.ends.tolist():
            yield self.ids[start:end]
            start = end

    def to_lists(self) -> list[list[int]]:
        """Returns the m sequences as lists."""
        return [sequence.tolist() for sequence in self]

    def split_at(self, first: int) -> tuple[Samples, Samples]:
        """Returns the first `first` sequences and the others, as two samples."""
        at = self.ends[first - 1] if first else np.uint64(0)
        return Samples(self.ids[: int(at)], self.ends[:first]), Samples(self.ids[int(at) :], self.ends[first:] - at)


@dataclass(frozen=True)
class Words:
    """Words, numbered in the order of a list. Texts are split into words by Python's `str.split()`.

    Raises `CodecError` if the list is empty or a word occurs twice.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        if len(self._numbers) != len(self.words) or not self.words:
            raise CodecError("the list of words is empty" if not self.words else "the list of words holds one twice")

    @classmethod
    def from_samples(cls, samples: Iterable[Iterable[str]]) -> Words:
        """Returns all words of samples, in the order of first appearance."""
        seen: dict[str, None] = {}
        for sample in samples:
            seen.update(dict.fromkeys(sample))
        return cls(tuple(seen))

    @property
    def size(self) -> int:
        """Number of words."""
        return len(self.words)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def numbers(self, sample: Sequence[str]) -> Uint32s:
        """Returns the numbers of words, uint32 [n]; an unknown word gets `size`."""
        get, unknown = self._numbers.get, len(self.words)
        return np.fromiter((get(word, unknown) for word in sample), np.uint32, len(sample))

    def show_units(self, numbers: Iterable[int]) -> str:
        """Returns the words with these numbers, joined by blanks; `UNKNOWN` for a number that no word has."""
        return " ".join(self.words[number] if number < len(self.words) else UNKNOWN for number in numbers)

    def unknown_unit_message(self, sample: Sequence[Any], at: int) -> str:
        """Returns the error message for the unknown word at index `at` of a sample."""
        return f"word {sample[at]!r:.60} is not among the dictionary's {self.size} words"

    def to_dict(self) -> dict[str, Any]:
        """Returns the units as plain values for a file; `units_from_dict` reads them."""
        return {"kind": "words", "words": list(self.words)}


@dataclass(frozen=True)
class Tokens:
    """The ids 0..size-1 of a tokenizer. fingerprint: its `first_stage.tokenizer_fingerprint`, "" if unknown."""

    size: int
    fingerprint: str = ""

    def may_equal(self, other: Tokens) -> bool:
        """Returns whether `self` and `other` may be the same tokenizer; an unknown fingerprint matches any."""
        known = {self.fingerprint, other.fingerprint} - {""}
        return self.size == other.size and len(known) < 2

    def numbers(self, sample: Any) -> Uint32s:
        """Returns ids unchanged, uint32 [n]; see `as_ids`."""
        return as_ids(sample)

    def show_units(self, numbers: Iterable[int]) -> str:
        """Returns the ids as numbers in a text, because their tokens are not known here."""
        return " ".join(map(str, numbers))

    def unknown_unit_message(self, sample: Sequence[Any], at: int) -> str:
        """Returns the error message for the unknown id at index `at` of a sample."""
        return f"id {sample[at]} is not below {self.size}, the tokenizer's size"

    def to_dict(self) -> dict[str, Any]:
        """Returns the units as plain values for a file; `units_from_dict` reads them."""
        return {"kind": "tokens", "size": self.size, "fingerprint": self.fingerprint}


Units = Words | Tokens


def units_from_dict(data: Any) -> Units:
    """Returns the units that `to_dict` of `Words` or `Tokens` described. Raises `DataError` naming a wrong field."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "words":
        words = data.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DataError("units.words must be a list of words")
        with errors_as(DataError, "units.words", CodecError):
            return Words(tuple(words))
    if kind == "tokens":
        size, fingerprint = data.get("size"), data.get("fingerprint")
        if type(size) is not int or size < 1 or not isinstance(fingerprint, str):
            raise DataError("units must have a size of at least 1 and a fingerprint")
        return Tokens(size, fingerprint)
    raise DataError(f"units.kind must be words or tokens, got {kind!r:.40}")


@dataclass(frozen=True)
class Settings:
    """The settings that a dictionary is trained with.

    units: `Words` or `Tokens`. window: maximum units of a phrase; 0 for any number (the paper's Max). first_id: id of
    unit 0; units take consecutive ids from there, then phrases do. limit: maximum number of phrases. unk_id: id emitted
    for an unknown unit, which is part of no phrase; it is a unit's id or below first_id. None: an unknown unit is an
    error. Raises `CodecError` naming the field if a field is out of range.
    """

    units: Units
    window: int = 0
    first_id: int = 1
    limit: int = MAX_PHRASES
    unk_id: int | None = None

    def __post_init__(self) -> None:
        room = NO_ID - self.units.size
        if not 1 <= self.units.size <= 1 << 31:
            raise CodecError(f"{self.units.size} units are not within 1..2^31")
        bounds = {"window": NO_ID, "first_id": room, "limit": MAX_PHRASES}
        if self.unk_id is not None:
            bounds["unk_id"] = self.first_id + self.units.size - 1
        for name, most in bounds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= most:
                raise CodecError(f"{name} must be an integer within 0..{most}, got {value!r:.40}")
        object.__setattr__(self, "limit", min(self.limit, room - self.first_id))

    def native(self) -> Any:
        """Returns the settings as the C library's struct."""
        unk = self.unk_id is not None
        return ffi.new(
            "mlxzip_phrases_spec *",
            {
                "units": self.units.size,
                "first_id": self.first_id,
                "window": self.window,
                "limit": self.limit,
                "has_unk": unk,
                "unk_id": self.unk_id if unk else 0,
            },
        )


@dataclass
class Totals:
    """Totals of encoded texts: number of finished samples, units read, tokens written."""

    samples: int = 0
    units: int = 0
    tokens: int = 0

    @property
    def ratio(self) -> float:
        """Tokens per unit, the paper's r (definition 1); 1 if there are no units."""
        return self.tokens / self.units if self.units else 1.0

    def add(self, units: Samples, ids: Samples) -> None:
        """Adds samples of units, and the ids that the samples were encoded to, to the totals."""
        self.samples += len(units)
        self.units += len(units.ids)
        self.tokens += len(ids.ids)


@dataclass(frozen=True)
class Pruning:
    """How a dictionary was pruned: phrases used at most `at_most` times were removed, in one of the modes `PRUNINGS`.

    Raises `CodecError` naming the field if a field is invalid.
    """

    at_most: int = 1
    mode: str = "reencode"

    def __post_init__(self) -> None:
        if self.mode not in PRUNINGS:
            raise CodecError(f"mode must be one of {', '.join(PRUNINGS)}, got {self.mode!r:.40}")
        if type(self.at_most) is not int or self.at_most < 0:
            raise CodecError(f"at_most must be an integer of 0 or more, got {self.at_most!r:.40}")


def count_leading_samples(samples: int, percent: float) -> int:
    """Returns `percent` percent of `samples`, rounded down. Raises `CodecError` if `percent` is outside 0..100."""
    if not 0 <= percent <= 100:
        raise CodecError(f"a fraction must be within 0..100 percent, got {percent}")
    return int(samples * percent / 100)
