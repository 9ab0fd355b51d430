"""Hierarchical BPE, second stage: turns the bytes of a token into a patch of at most S symbols, in C.

Symbols: 0..255 are bytes; 256 is the end mark, which counts in a patch's length; 257 + k is the result of merge k.
Merges are learned only from the tokens that do not fit yet. So a token is encoded by applying the merges until it fits
(mode `stop`); applying all of them (mode `full`) gives shorter patches than the merges were learned for.

Source: arXiv 2510.15517 §2.1, algorithm 1. The paper leaves four points open. Here overlapping pairs all count; of
equally frequent pairs the smallest is merged; pairs are replaced from left to right; equal tokens count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.params import raise_for_status
from mlx_zip.errors import CodecError, DataError

MARK: int = lib.MLXZIP_MARK
FIRST_MERGE = MARK + 1
MAX_PATCH: int = lib.MLXZIP_MAX_PATCH
MAX_MERGES: int = lib.MLXZIP_MAX_MERGES
MAX_TOKEN_BYTES: int = lib.MLXZIP_MAX_TOKEN_BYTES
MODES = ("stop", "full")

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PatchMerges:
    """The learned merges, immutable: patch_size S (2..256) and V' pairs of symbols, in order.

    Raises `CodecError` naming the merge if one uses the end mark or a later symbol, repeats a pair, or makes a symbol
    of more than 65535 bytes.
    """

    patch_size: int
    pairs: Pairs

    def __post_init__(self) -> None:
        _check_patch_size(self.patch_size)
        object.__setattr__(self, "pairs", tuple((int(a), int(b)) for a, b in self.pairs))
        if len(self.pairs) > MAX_MERGES:
            raise CodecError(f"{len(self.pairs)} merges are more than {MAX_MERGES}")
        seen, lengths = set[tuple[int, int]](), [1] * FIRST_MERGE
        for k, pair in enumerate(self.pairs):
            if MARK in pair or not all(0 <= symbol < FIRST_MERGE + k for symbol in pair):
                raise CodecError(f"merge {k} {pair} uses the end mark {MARK} or a symbol that is made later")
            if pair in seen:
                raise CodecError(f"merge {k} {pair} occurs twice")
            seen.add(pair)
            lengths.append(lengths[pair[0]] + lengths[pair[1]])
            if lengths[-1] > MAX_TOKEN_BYTES:
                raise CodecError(f"merge {k} {pair} makes a symbol of more than {MAX_TOKEN_BYTES} bytes")

    @property
    def symbols(self) -> int:
        """Number of symbols: 256 bytes, the end mark, V' merges."""
        return FIRST_MERGE + len(self.pairs)

    @cached_property
    def bytes_of_symbols(self) -> tuple[bytes, ...]:
        """The bytes of each symbol; b"" for the end mark."""
        out = [*(bytes([byte]) for byte in range(MARK)), b""]
        for left, right in self.pairs:
            out.append(out[left] + out[right])
        return tuple(out)

    def encode(self, token: bytes, mode: str = "stop") -> list[int]:
        """Returns the symbols of one token's patch, the end mark included.

        The patch has more than `patch_size` symbols if applying all merges does not make it shorter. mode: see
        `encode_all`.
        """
        return self.encode_all([token], mode)[0].tolist()

    def encode_all(self, tokens: Sequence[bytes], mode: str = "stop") -> list[NDArray[np.uint16]]:
        """Returns the patch of each token, uint16 [its length], like `encode`.

        mode: "stop" applies merges until the token fits `patch_size` symbols, "full" applies all merges. Raises
        `CodecError` if `mode` is another text.
        """
        check_patch_mode(mode)
        data, offsets = _join_tokens(tokens)
        out, lengths = np.empty(len(data) + len(tokens), np.uint16), np.empty(len(tokens), np.uint32)
        size, bad = self.patch_size if mode == "stop" else 0, ffi.new("size_t *")
        raise_for_status(
            lib.mlxzip_patches_encode(
                ffi.from_buffer("mlxzip_merge[]", self._native),
                len(self.pairs),
                size,
                ffi.from_buffer("uint8_t[]", data),
                ffi.from_buffer("size_t[]", offsets),
                len(tokens),
                ffi.from_buffer("uint16_t[]", out),
                ffi.from_buffer("uint32_t[]", lengths),
                bad,
            )
        )
        begins = offsets[:-1] + np.arange(len(tokens), dtype=np.uintp)
        return [out[at : at + n] for at, n in zip(begins.tolist(), lengths.tolist(), strict=True)]

    def decode(self, symbols: Iterable[int]) -> bytes:
        """Returns the bytes of the symbols before the end mark, or of all symbols if there is no end mark.

        Symbols after the end mark are padding. Raises `CodecError` if a symbol is unknown.
        """
        bytes_of_symbols, out = self.bytes_of_symbols, []
        for symbol in symbols:
            if not 0 <= symbol < len(bytes_of_symbols):
                raise CodecError(f"symbol {symbol} is not below {len(bytes_of_symbols)}")
            if symbol == MARK:
                break
            out.append(bytes_of_symbols[symbol])
        return b"".join(out)

    @cached_property
    def _native(self) -> NDArray[np.uint16]:
        return np.array(self.pairs, np.uint16).reshape(-1, 2)


class LearnedMerges(NamedTuple):
    """The result of `learn_merges`.

    merges: the learned merges. counts int64 [V']: occurrences of each pair when it was merged. left int64 [V']: number
    of tokens that each merge made fit, so that later merges are not learned from them.
    """

    merges: PatchMerges
    counts: NDArray[np.int64]
    left: NDArray[np.int64]


def learn_merges(tokens: Iterable[bytes], patch_size: int) -> LearnedMerges:
    """Learns merges until every token fits `patch_size` symbols, end mark included.

    tokens: the byte strings of a first-stage tokenizer's tokens, of at most 65535 bytes each. Equal tokens count once,
    and the order does not matter. Raises `CodecError` if the patch size is outside 2..256, `DataError` if tokens are
    too long or need more than 65279 merges.
    """
    _check_patch_size(patch_size)
    pool = tokens_too_long(tokens, patch_size)
    data, offsets = _join_tokens(pool)
    if len(data) > lib.MLXZIP_MAX_TOKENS_BYTES:
        raise DataError(f"the tokens that do not fit have {len(data)} bytes, more than {lib.MLXZIP_MAX_TOKENS_BYTES}")
    room = min(len(data), MAX_MERGES)  # each merge makes the pool shorter
    pairs, counts, left = np.empty((room, 2), np.uint16), np.empty(room, np.uint32), np.empty(room, np.uint32)
    n = ffi.new("size_t *")
    status = lib.mlxzip_patches_learn(
        ffi.from_buffer("uint8_t[]", data),
        ffi.from_buffer("size_t[]", offsets),
        len(pool),
        patch_size,
        ffi.from_buffer("mlxzip_merge[]", pairs),
        ffi.from_buffer("uint32_t[]", counts),
        ffi.from_buffer("uint32_t[]", left),
        room,
        n,
    )
    if status == lib.MLXZIP_E_SPACE:
        raise DataError(f"the tokens need more than {MAX_MERGES} merges: choose a larger patch size")
    raise_for_status(status)
    merges = PatchMerges(patch_size, tuple(map(tuple, pairs[: n[0]].tolist())))
    return LearnedMerges(merges, counts[: n[0]].astype(np.int64), left[: n[0]].astype(np.int64))


def tokens_too_long(tokens: Iterable[bytes], patch_size: int) -> list[bytes]:
    """Returns the distinct tokens that merges are learned from: those of `patch_size` bytes or more."""
    return [token for token in dict.fromkeys(tokens) if len(token) + 1 > patch_size]


def _check_patch_size(patch_size: Any) -> None:
    """Raises `CodecError` unless the patch size is an integer in 2..256. (Only the empty token would fit 1.)"""
    if isinstance(patch_size, bool) or not isinstance(patch_size, int) or not 2 <= patch_size <= MAX_PATCH:
        raise CodecError(f"the patch size must be an integer from 2 to {MAX_PATCH}, got {patch_size!r}")


def check_patch_mode(mode: Any) -> None:
    """Raises `CodecError` unless the mode is in `MODES`."""
    if mode not in MODES:
        raise CodecError(f"mode {mode!r} is not one of {', '.join(MODES)}")


def _join_tokens(tokens: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.uintp]]:
    """Returns n tokens joined, uint8, and n + 1 offsets: the beginning of each token, and the end of the last token.

    Raises `DataError` if a token has more than `MAX_TOKEN_BYTES` bytes.
    """
    lengths = np.fromiter(map(len, tokens), np.uintp, len(tokens))
    if len(tokens) and lengths.max() > MAX_TOKEN_BYTES:
        at = int(lengths.argmax())
        raise DataError(f"token {tokens[at][:20]!r}... has {lengths[at]} bytes, at most {MAX_TOKEN_BYTES} can be read")
    return np.frombuffer(b"".join(tokens), np.uint8), np.concatenate([np.zeros(1, np.uintp), np.cumsum(lengths)])
