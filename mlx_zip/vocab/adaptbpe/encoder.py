"""Byte pair encoding in which merges can be undone: encodes bytes to tokens and back, by the C library."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.merges import MergeList, Schedule

PIECES = {  # ways to cut a text before merges are applied
    "whole": lib.MLXZIP_PIECE_WHOLE,
    "gpt2": lib.MLXZIP_PIECE_GPT2,
    "cl100k": lib.MLXZIP_PIECE_CL100K,
    "digits": lib.MLXZIP_PIECE_DIGITS,
}
_MOST_BYTES = (1 << 32) - 2  # of one piece


class Encoder:
    """Encodes text to tokens of a `MergeList` by a `Schedule`; without a schedule, plain byte pair encoding.

    Tokens are uint32: below 256 a byte, 256 + m the result of merge m. pieces: a key of `PIECES`. Pieces are cached, a
    few MB at most. Threads may share an encoder; its calls run one at a time. Source: arXiv 1508.07909, section 3.2,
    for merges; AdaptBPE, arXiv 2601.21665, for the schedule.
    """

    def __init__(self, merges: MergeList, schedule: Schedule | None = None, pieces: str = "gpt2") -> None:
        if pieces not in PIECES:
            raise DataError(f"pieces {pieces!r} is none of {', '.join(PIECES)}")
        self.merges, self.pieces = merges, pieces
        times = schedule or Schedule.plain(len(merges))
        self.schedule = times.splitting(merges.unfinished) if merges.unfinished else times
        self._lock = threading.Lock()
        self._bpe = _new_bpe(merges, self.schedule)

    def encode(self, text: bytes) -> Uint32s:
        """Encodes any bytes to tokens, uint32; `decode` returns the same bytes."""
        data, n_out = ffi.from_buffer("uint8_t[]", text), ffi.new("size_t *")
        tokens = np.empty(len(data), np.uint32)
        with self._lock:
            status = lib.mlxzip_bpe_encode(
                self._bpe, PIECES[self.pieces], data, len(data), ffi.from_buffer("uint32_t[]", tokens), n_out
            )
        _check(status)
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
        _check(status)
        return tokens[: int(id_ends[-1]) if len(pieces) else 0], id_ends.astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Returns the bytes of tokens, joined."""
        known = self.merges.tokens
        return b"".join([known[token] for token in tokens])


def cut(text: bytes, pieces: str) -> list[bytes]:
    """Cuts a text into pieces; joined, the pieces are the text. pieces: how, a key of `PIECES`."""
    data, ends = ffi.from_buffer("uint8_t[]", text), np.empty(len(text), np.uintp)
    n = lib.mlxzip_pieces(PIECES[pieces], data, len(data), ffi.from_buffer("size_t[]", ends))
    found, at = [], 0
    for end in ends[:n].tolist():
        found.append(text[at:end])
        at = end
    return found


def _new_bpe(merges: MergeList, schedule: Schedule) -> Any:
    """Returns an encoder of the C library. Raises `DataError` for a schedule that contradicts the merges."""
    arrays = [np.ascontiguousarray(a) for a in (merges.parts, schedule.apply_at, schedule.split_at)]
    spec, out = ffi.new("mlxzip_bpe_spec *"), ffi.new("mlxzip_bpe **")
    spec.n_merges = len(merges)
    spec.parts, spec.apply_at, spec.split_at = (ffi.from_buffer("uint32_t[]", array) for array in arrays)
    _check(lib.mlxzip_bpe_new(spec, out))
    return ffi.gc(out[0], lib.mlxzip_bpe_free)


def _check(status: int) -> None:
    """Raises the exception for an error status of the C library; returns for MLXZIP_OK."""
    if status == lib.MLXZIP_E_MEMORY:
        raise MemoryError("the encoder is out of memory")
    if status != lib.MLXZIP_OK:
        raise DataError(f"times of merges that contradict each other, or a piece of more than {_MOST_BYTES} bytes")
