"""Pieces to samples: windows of base ids, compressed as a causal model can emit them, masks carried along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import CodecError, DataError
from mlx_zip.training.encoding import Piece


@dataclass(frozen=True)
class Window:
    """ids uint32 [n] base ids, counted bool [n]: whether the loss does; n_bytes: UTF-8 bytes of the text in it."""

    ids: Uint32s
    counted: NDArray[np.bool_]
    n_bytes: int


def cut(pieces: Sequence[Piece], context: int, fill: bool | None, lead: tuple[int, ...]) -> Iterator[Window]:
    """Windows of at most `context` base ids, in order; each begins with its piece's lead, which is not counted.

    fill: put several pieces into one window, after `lead`, so that only the last window of a run is shorter; None does
    so for documents, and leaves each conversation on its own. The first id of a window has nothing before it and is
    never counted.
    """
    for filled, run in groupby(pieces, lambda piece: not piece.conversation if fill is None else fill):
        if filled:
            yield from _cut(*_joined(list(run)), context, lead)
        else:
            for piece in run:
                yield from _cut(piece.ids, piece.counted, piece.n_bytes, context, piece.lead)


def _joined(run: Sequence[Piece]) -> tuple[Uint32s, NDArray[np.bool_], NDArray[np.int64]]:
    return (
        np.concatenate([piece.ids for piece in run]),
        np.concatenate([piece.counted for piece in run]),
        np.concatenate([piece.n_bytes for piece in run]),
    )


def _cut(
    ids: Uint32s, counted: NDArray[np.bool_], n_bytes: NDArray[np.int64], context: int, lead: tuple[int, ...]
) -> Iterator[Window]:
    front, room = np.array(lead, np.uint32), context - len(lead)
    uncounted = np.zeros(len(lead), np.bool_)
    for begin in range(0, len(ids), room):
        part = slice(begin, begin + room)
        learnt = np.concatenate([uncounted, counted[part]])
        learnt[0] = False
        yield Window(np.concatenate([front, ids[part]]), learnt, int(n_bytes[part].sum()))


def compress_window(params: CodecParams, window: Window) -> tuple[Uint32s, NDArray[np.bool_]]:
    """Ids uint32 [m] and mask bool [m]: an id counts only if all base ids in it do.

    No id is one that its codebook has not installed yet, so a causal model could have emitted each. Raises
    `DataError` for an id that is no base id of the codec.
    """
    book = Codebook(params)
    try:
        ids = book.compress(window.ids)
        book.push(ids)
        spans = book.logged()[1].astype(np.int64)
    except CodecError as error:
        raise DataError(f"the tokenizer does not belong to this codec: {error}") from error
    if len(ids) == len(window.ids):
        return ids, window.counted
    return ids, np.logical_and.reduceat(window.counted, np.cumsum(spans) - spans)
