"""Cuts pieces into windows of base ids and compresses these, together with their loss masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import CodecError, DataError
from mlx_zip.training.prepare.encoding import Piece


@dataclass(frozen=True)
class Window:
    """A window of base ids: ids uint32 [n]; counted bool [n]: whether the loss counts an id; n_bytes: UTF-8 bytes."""

    ids: Uint32s
    counted: NDArray[np.bool_]
    n_bytes: int


def cut(pieces: Sequence[Piece], context: int, fill: bool | None, lead: tuple[int, ...]) -> Iterator[Window]:
    """Yields windows of at most `context` base ids, in order. Each begins with a lead, which the loss does not count.

    fill: True: join pieces, so that all windows but the last are full; each begins with `lead`. False: cut each piece
    on its own; its windows begin with its own lead. None: True for documents, False for conversations. The first id of
    a window is never counted, because nothing stands before it.
    """
    for filled, run in groupby(pieces, lambda piece: not piece.conversation if fill is None else fill):
        if filled:
            yield from _cut(*_joined(list(run)), context, lead)
        else:
            for piece in run:
                yield from _cut(piece.ids, piece.counted, piece.n_bytes, context, piece.lead)


def _joined(run: Sequence[Piece]) -> tuple[Uint32s, NDArray[np.bool_], NDArray[np.int64]]:
    """Returns `ids`, `counted` and `n_bytes` of pieces, each joined into one array."""
    return (
        np.concatenate([piece.ids for piece in run]),
        np.concatenate([piece.counted for piece in run]),
        np.concatenate([piece.n_bytes for piece in run]),
    )


def _cut(
    ids: Uint32s, counted: NDArray[np.bool_], n_bytes: NDArray[np.int64], context: int, lead: tuple[int, ...]
) -> Iterator[Window]:
    """Yields the windows of one sequence; the arrays are those of a `Piece`."""
    front, room = np.array(lead, np.uint32), context - len(lead)
    uncounted = np.zeros(len(lead), np.bool_)
    for begin in range(0, len(ids), room):
        part = slice(begin, begin + room)
        in_loss = np.concatenate([uncounted, counted[part]])
        in_loss[0] = False
        yield Window(np.concatenate([front, ids[part]]), in_loss, int(n_bytes[part].sum()))


def compress_window(params: CodecParams, window: Window) -> tuple[Uint32s, NDArray[np.bool_]]:
    """Returns a window's compressed ids uint32 [m] and loss mask bool [m].

    A hypertoken counts only if all its base ids do. Every id is known to the codebook at its place, so a causal model
    could write it there. Raises `DataError` for an id that is no base id of the codec.
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
