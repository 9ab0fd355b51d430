"""Merge lists of byte pair encoding, the times at which merges are applied and split, and the encoder that uses both.

Every merge has a time at which it is applied and a time at which its tokens are split. Plain encoding, first-k, top-k,
`final` and `replay` differ only in these two lists of times.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s
from mlx_zip.codec.params import raise_for_status
from mlx_zip.errors import DataError
from mlx_zip.vocab.first_stage import Pair

BYTES = 256
NEVER = (1 << 32) - 1
NO_ID = (1 << 32) - 1  # id of a byte string that is not a token
MAX_MERGES: int = lib.MLXZIP_MAX_CODEBOOK
LONGEST: int = lib.MLXZIP_BPE_LONGEST
PIECES = {  # ways to cut a text before merges are applied
    "whole": lib.MLXZIP_PIECE_WHOLE,
    "gpt2": lib.MLXZIP_PIECE_GPT2,
    "cl100k": lib.MLXZIP_PIECE_CL100K,
    "digits": lib.MLXZIP_PIECE_DIGITS,
}
_MOST_BYTES = (1 << 32) - 2  # maximum bytes of one piece


@dataclass(frozen=True, eq=False)
class MergeList:
    """A list of merges; each joins two tokens that are bytes or results of earlier merges.

    parts: uint32 [M, 2] tokens; a token below 256 is a byte, and token 256 + m is the result of merge m. letters:
    number of leading merges that make characters of bytes, for vocabularies of characters (byte fallback); they are
    never removed. Raises `DataError` naming the merge if one of its parts is made later, or its token is made twice or
    is too long.
    """

    parts: NDArray[np.uint32]
    letters: int = 0

    def __post_init__(self) -> None:
        parts = self.parts
        if parts.ndim != 2 or parts.shape[1] != 2 or parts.dtype != np.uint32:
            raise DataError(f"merges must be uint32 [M, 2], not {parts.dtype} {list(parts.shape)}")
        if not 0 <= self.letters <= len(parts):
            raise DataError(f"{self.letters} letters are not 0..{len(parts)}, the number of merges")
        if len(parts) > MAX_MERGES:
            raise DataError(f"{len(parts)} merges are more than {MAX_MERGES}")
        late = np.flatnonzero(parts.max(axis=1, initial=0) >= BYTES + np.arange(len(parts)))
        if len(late):
            merge = int(late[0])
            raise DataError(f"merge {merge} {parts[merge].tolist()} uses a token that is not made before it")
        made: dict[bytes, int] = {}
        for merge, token in enumerate(self.tokens[BYTES:]):
            if len(token) > LONGEST:
                raise DataError(f"merge {merge} makes a token of {len(token)} bytes, more than {LONGEST}")
            if (first := made.setdefault(token, merge)) != merge:
                raise DataError(f"merge {merge} makes {token!r}, which merge {first} makes already")

    @classmethod
    def from_byte_pairs(cls, pairs: Iterable[Sequence[bytes]], letters: int = 0) -> MergeList:
        """Makes a list from pairs of byte strings, lowest rank first. Raises `DataError` as the constructor does."""
        tokens = {bytes([byte]): byte for byte in range(BYTES)}
        parts = []
        for merge, pair in enumerate(pairs):
            left, right = pair
            for part in (left, right):
                if part not in tokens:
                    raise DataError(f"merge {merge}, {left!r} with {right!r}: {part!r} is not made before it")
            if (known := tokens.setdefault(left + right, BYTES + merge)) != BYTES + merge:
                raise DataError(
                    f"merge {merge}, {left!r} with {right!r}: merge {known - BYTES} makes that token already"
                )
            parts.append((tokens[left], tokens[right]))
        return cls(np.array(parts, np.uint32).reshape(-1, 2), letters)

    def __len__(self) -> int:
        return len(self.parts)

    def __eq__(self, other: Any) -> bool:
        same = isinstance(other, MergeList) and self.letters == other.letters
        return same and np.array_equal(self.parts, other.parts)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of every token: 256 single bytes, then the merges' results."""
        tokens = [bytes([byte]) for byte in range(BYTES)]
        for left, right in self.parts.tolist():
            tokens.append(tokens[left] + tokens[right])
            if len(tokens[-1]) > LONGEST:
                raise DataError(f"merge {len(tokens) - BYTES - 1} makes a token of more than {LONGEST} bytes")
        return tokens

    @cached_property
    def unfinished(self) -> list[int]:
        """Ranks of merges that make only the first bytes of a character. Encoding splits their tokens at its end."""
        return [rank for rank in range(self.letters) if not is_valid_utf8(self.tokens[BYTES + rank])]

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the merges in order; equal for equal lists, on every machine."""
        return sha256(self.parts.astype("<u4").tobytes()).hexdigest()


def is_valid_utf8(token: bytes) -> bool:
    """Returns whether bytes are valid UTF-8."""
    try:
        token.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class Schedule:
    """Times at which each merge of a list is applied, and at which its tokens are split: uint32 [M], `NEVER` for never.

    `native/bpe.h` defines how these times work on a text.
    """

    apply_at: NDArray[np.uint32]
    split_at: NDArray[np.uint32]

    @classmethod
    def plain(cls, n_merges: int, n_applied: int | None = None) -> Schedule:
        """Returns a schedule that applies the first `n_applied` merges (None: all) by rank and splits nothing."""
        times = cls(np.full(n_merges, NEVER, np.uint32), np.full(n_merges, NEVER, np.uint32))
        n = n_merges if n_applied is None else n_applied
        times.apply_at[:n] = np.arange(n)
        return times

    @classmethod
    def replay(cls, n_merges: int, n: int, virtual: Sequence[int], promoted: Sequence[int]) -> Schedule:
        """Returns a schedule for `n_merges` merges: it applies the first n, then makes the swaps one after another.

        Swap i splits the tokens that merge virtual[i] made, then applies merge promoted[i].
        """
        times, at = cls.plain(n_merges, n), n + 2 * np.arange(len(virtual))
        times.split_at[list(virtual)] = at
        times.apply_at[list(promoted)] = at + 1
        return times

    @classmethod
    def final(cls, n_merges: int, n: int, virtual: Sequence[int], promoted: Sequence[int]) -> Schedule:
        """Returns a schedule that applies the first n and the promoted merges, then splits the tokens of `virtual`."""
        times = cls.plain(n_merges, n)
        times.apply_at[list(promoted)] = n + np.arange(len(promoted))
        times.split_at[list(virtual)] = n + len(promoted)
        return times

    def splitting(self, ranks: Sequence[int]) -> Schedule:
        """Returns this schedule with one more step at the end, which splits the tokens of the merges `ranks`."""
        times = np.concatenate([self.apply_at, self.split_at])
        split_at = self.split_at.copy()
        split_at[list(ranks)] = times[times != NEVER].max(initial=0) + 1
        return Schedule(self.apply_at, split_at)


def drop_dead_merges(pairs: Sequence[Pair]) -> Iterable[Pair]:
    """Returns the merges without those that are never applied to any text.

    If several merges make the same token, only the one that makes it from its own bytes is ever applied. Lists that
    were converted from tiktoken ranks contain such groups.
    """
    makes: dict[bytes, int] = {}
    several: set[bytes] = set()
    for left, right in pairs:
        several |= {left + right} if left + right in makes else set()
        makes[left + right] = 0
    if not several:
        return pairs
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(pairs)))}
    last = {token: _last_merge(token, ranks) for token in several}
    dead = {token for token, rank in last.items() if rank is None}
    alive = []
    for rank, (left, right) in enumerate(pairs):
        token = left + right
        if left in dead or right in dead:
            dead.add(token)
        elif last.get(token, rank) == rank:
            alive.append((left, right))
    return alive


def _last_merge(token: bytes, ranks: Mapping[Pair, int]) -> int | None:
    """Returns the rank of the last merge when a token's bytes are merged; None if they do not become one token."""
    parts, last = [token[i : i + 1] for i in range(len(token))], None
    while len(parts) > 1:
        rank, at = min((ranks.get((parts[i], parts[i + 1]), len(ranks)), i) for i in range(len(parts) - 1))
        if rank == len(ranks):
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        last = rank
    return last


# ---- encoding


class BpeEncoder:
    """Encodes text to tokens of a `MergeList` by a `Schedule`; without a schedule, plain byte pair encoding.

    Tokens are uint32: below 256 a byte, 256 + m the result of merge m. pieces: a key of `PIECES`. The encoder caches
    pieces, in a few MB at most. Threads may share an encoder; its calls run one at a time. Source: arXiv 1508.07909,
    section 3.2, for merges; AdaptBPE, arXiv 2601.21665, for the schedule.
    """

    def __init__(self, merges: MergeList, schedule: Schedule | None = None, pieces: str = "gpt2") -> None:
        if pieces not in PIECES:
            raise DataError(f"pieces {pieces!r} is none of {', '.join(PIECES)}")
        self.merges, self.pieces = merges, pieces
        times = schedule or Schedule.plain(len(merges))
        self.schedule = times.splitting(merges.unfinished) if merges.unfinished else times
        self._lock = threading.Lock()
        self._bpe = _make_native_bpe(merges, self.schedule)

    def encode(self, text: bytes) -> Uint32s:
        """Returns the tokens of any bytes, uint32; `decode` turns these tokens into the same bytes."""
        data, n_out = ffi.from_buffer("uint8_t[]", text), ffi.new("size_t *")
        tokens = np.empty(len(data), np.uint32)
        with self._lock:
            status = lib.mlxzip_bpe_encode(
                self._bpe, PIECES[self.pieces], data, len(data), ffi.from_buffer("uint32_t[]", tokens), n_out
            )
        _check_bpe_status(status)
        return tokens[: n_out[0]].copy()  # a copy, so that the buffer is freed

    def encode_pieces(self, pieces: Sequence[bytes]) -> tuple[Uint32s, NDArray[np.int64]]:
        """Encodes pieces, without cutting them further -> (tokens of all pieces, end of each piece's tokens)."""
        text = ffi.from_buffer("uint8_t[]", b"".join(pieces))
        ends = np.fromiter(accumulate(map(len, pieces)), np.uintp, len(pieces))
        tokens, id_ends = np.empty(len(text), np.uint32), np.empty(len(pieces), np.uintp)
        with self._lock:
            status = lib.mlxzip_bpe_encode_pieces(
                self._bpe,
                text,
                ffi.from_buffer("size_t[]", ends),
                len(ends),
                ffi.from_buffer("uint32_t[]", tokens),
                ffi.from_buffer("size_t[]", id_ends),
            )
        _check_bpe_status(status)
        return tokens[: int(id_ends[-1]) if len(pieces) else 0], id_ends.astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Returns the joined bytes of tokens."""
        known = self.merges.tokens
        return b"".join([known[token] for token in tokens])


def cut_into_pieces(text: bytes, pieces: str) -> list[bytes]:
    """Cuts a text into pieces, which joined are the text. pieces: how to cut, a key of `PIECES`."""
    data, ends = ffi.from_buffer("uint8_t[]", text), np.empty(len(text), np.uintp)
    n = lib.mlxzip_pieces(PIECES[pieces], data, len(data), ffi.from_buffer("size_t[]", ends))
    found, at = [], 0
    for end in ends[:n].tolist():
        found.append(text[at:end])
        at = end
    return found


def _make_native_bpe(merges: MergeList, schedule: Schedule) -> Any:
    arrays = [np.ascontiguousarray(a) for a in (merges.parts, schedule.apply_at, schedule.split_at)]
    spec, out = ffi.new("mlxzip_bpe_spec *"), ffi.new("mlxzip_bpe **")
    spec.n_merges = len(merges)
    spec.parts, spec.apply_at, spec.split_at = (ffi.from_buffer("uint32_t[]", array) for array in arrays)
    _check_bpe_status(lib.mlxzip_bpe_new(spec, out))
    return ffi.gc(out[0], lib.mlxzip_bpe_free)


def _check_bpe_status(status: int) -> None:
    """Raises `DataError` if the C library refused an argument, `MemoryError` if memory ran out."""
    if status == lib.MLXZIP_E_ARG:
        raise DataError(f"times of merges that contradict each other, or a piece of more than {_MOST_BYTES} bytes")
    raise_for_status(status)
