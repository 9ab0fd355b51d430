"""Computes the position of each id of a call, and whether the call uses LongRoPE's long factors.

Parameters of every function here: mode is "compressed" (each id takes one position) or "base_token_end" (an id takes
as many positions as it has base ids, and has the position of the last). context: a call whose last id has this position
or a later one uses the long factors; None for ropes without long factors.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_zip.models.inputs import length_of
from mlx_zip.models.rope import Positions
from mlx_zip.models.rows.zip_state import HostIds, ZipState


def positions_of(state: ZipState, ids: HostIds, mode: str, context: int | None) -> Positions:
    """Returns the positions of ids [B, L], which are the last L ids that the state has read."""
    if mode == "compressed":
        return _compressed(state, state.offset - length_of(ids), state.offset, context)
    if isinstance(ids, int):
        last = state.books[0].base_length - 1
        return Positions(start=last, long=_is_long(last, context))
    index = state.base_positions(ids)
    return Positions(index=mx.array(index), long=_is_long(int(index.max()), context))


def positions_of_log(state: ZipState, log: np.ndarray, begin: int, end: int, mode: str, long: bool) -> Positions:
    """Returns the positions of columns `begin` to `end` - 1 of `log` [B, offset]. long: as in `Positions`."""
    if mode == "compressed":
        return replace(_compressed(state, begin, end, None), long=long)
    return Positions(index=mx.array(state.base_positions(log)[:, begin:end]), long=long)


def needs_long(state: ZipState, ids: np.ndarray, mode: str, context: int | None, merge_size: int) -> bool:
    """Returns whether a call that reads ids [B, L] next uses LongRoPE's long factors.

    merge_size: the most base ids of an id. Raises `CodecError` for ids that such a call would not take.
    """
    if context is None:
        return False
    length = ids.shape[1]
    if mode == "compressed":
        return _is_long(state.offset + length - min(state.left_padding) - 1, context)
    done = int(state.base_lengths().max())
    if _is_long(done, context) == _is_long(done + merge_size * length - 1, context):
        return _is_long(done, context)
    return _is_long(int(state.base_lengths_after(ids).max()) - 1, context)


def positions_ahead(
    state: ZipState, hyper: mx.array, slots: mx.array, mode: str, context: int | None, merge_size: int
) -> Positions | None:
    """Returns the positions of ids [B, 1] that the state has not read yet.

    hyper [B, 1]: whether each id is a hypertoken. slots [B, 1]: its slot then, else any slot.

    Returns None if the ids may make LongRoPE switch between its short and long factors.
    """
    if mode == "compressed":
        positions = _compressed(state, state.offset, state.offset + 1, context)
        return positions if positions.long == state.long_rope else None
    done = state.base_lengths()
    first, last = int(done.max()), int(done.max()) + merge_size - 1  # range of the longest sequence's next position
    if _is_long(first, context) != state.long_rope or _is_long(last, context) != state.long_rope:
        return None
    spans = mx.array(state.spans())
    spans = spans[0][slots] if len(done) == 1 else mx.take_along_axis(spans, slots, axis=1)
    return Positions(index=_ends(mx.array(done[:, None] - 1), hyper, spans), long=state.long_rope)


@mx.compile
def _ends(last: mx.array, hyper: mx.array, spans: mx.array) -> mx.array:
    """Returns the positions [B, 1] of ids that come after the positions `last` [B, 1] and have these spans [B, 1]."""
    return last + mx.where(hyper, spans, 1)


def _compressed(state: ZipState, begin: int, end: int, context: int | None) -> Positions:
    """Returns the positions of columns `begin` to `end` - 1, left padding included, when each id takes one position."""
    padding = state.left_padding
    start = begin - padding[0] if len(padding) == 1 else mx.array([begin - n for n in padding], mx.int32)
    return Positions(start=start, long=_is_long(end - min(padding) - 1, context))


def _is_long(last: int, context: int | None) -> bool:
    """Returns whether a call whose last id has position `last` uses the long factors."""
    return context is not None and last >= context
