"""The inputs of one model call: its ids on the host, their positions, and each layer's view of its KV cache.

Functions of positions share these parameters. mode: "compressed" (each id takes one position) or "base_token_end" (an
id takes as many positions as it has base ids; its position is that of its last base id). context: a call whose last id
has this position or a later one uses LongRoPE's long factors; None for ropes without long factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_zip.errors import ModelError
from mlx_zip.models.decoder import Positions
from mlx_zip.models.rows.zip_state import HostIds, ZipState


def raise_unless_ids_shape(ids: mx.array) -> None:
    """Raises `ModelError` unless ids are integers [B, L] with B, L > 0."""
    if ids.ndim != 2 or 0 in ids.shape or not mx.issubdtype(ids.dtype, mx.integer):
        raise ModelError(f"ids must be integers [B, L] with B, L > 0, got {ids.dtype} {list(ids.shape)}")


def read_ids_on_host(ids: mx.array, state: ZipState) -> HostIds:
    """Copies ids [B, L] to the host, as uint32 or, if the state `takes_single_id`, as one number.

    Ids [B] become [B, 1]. This is the only time that a model call waits for the device. The single id of a generation
    step is read without numpy: reading half a gigabyte of weights has evicted numpy's code from the processor's caches,
    and using numpy again would cost as much as all other work on the host. Raises `ModelError` if an id does not fit 32
    bits.
    """
    if ids.size == 1 and state.takes_single_id():
        one = cast(int, ids.item())
        _raise_unless_ids_fit_32_bits(one, one)
        return one
    host = np.array(ids).reshape(len(ids), -1)
    if host.dtype != np.uint32:
        _raise_unless_ids_fit_32_bits(int(host.min()), int(host.max()))
    return np.ascontiguousarray(host.astype(np.uint32, copy=False))


def ids_per_sequence(ids: HostIds) -> int:
    """Returns L, the number of ids per sequence."""
    return 1 if isinstance(ids, int) else ids.shape[1]


def _raise_unless_ids_fit_32_bits(low: int, high: int) -> None:
    if low < 0 or high > 0xFFFFFFFF:
        raise ModelError(f"ids from {low} to {high} are not all 32-bit token ids")


class PositionedCache:
    """One layer's KV cache as the layer sees it during one call: `offset` holds the call's `Positions`, not a count."""

    def __init__(self, cache: Any, offset: Positions) -> None:
        self.cache, self.offset, self.update_and_fetch = cache, offset, cache.update_and_fetch

    def __getattr__(self, name: str) -> Any:  # `bits` and `group_size` of a quantized cache
        return getattr(self.cache, name)


def kv_length(cache: Any) -> int:
    """Returns the number of ids in a KV cache, left padding included.

    A batch's KV cache counts its ids in `_idx`, because its `offset` holds one number per sequence.
    """
    return cache._idx if hasattr(cache, "_idx") else cache.offset


def set_plain_offsets(kv: Sequence[Any], left_padding: Sequence[int]) -> None:
    """Replaces the offsets that a model call left in a batch's KV caches by new arrays [B] without a graph.

    mlx-lm adds to the offsets lazily and nothing here evaluates them, so the graph of an offset would grow by one
    operation per step. left_padding [B]: number of padding ids per sequence.
    """
    if kv and hasattr(kv[0], "_idx"):
        offset = mx.array([kv[0]._idx - n for n in left_padding])
        for cache in kv:
            cache.offset = offset


# ---- positions


def positions_of_read_ids(state: ZipState, ids: HostIds, mode: str, context: int | None) -> Positions:
    """Returns the positions of ids [B, L], which are the last L ids that the state has read."""
    if mode == "compressed":
        return _compressed_positions(state, state.offset - ids_per_sequence(ids), state.offset, context)
    if isinstance(ids, int):
        last = state.books[0].base_length - 1
        return Positions(start=last, long=_needs_long_at(last, context))
    index = state.base_positions(ids)
    return Positions(index=mx.array(index), long=_needs_long_at(int(index.max()), context))


def positions_of_log(state: ZipState, log: np.ndarray, begin: int, end: int, mode: str, long: bool) -> Positions:
    """Returns the positions of columns `begin` to `end` - 1 of the id log [B, offset]. long: as in `Positions`."""
    if mode == "compressed":
        return replace(_compressed_positions(state, begin, end, None), long=long)
    return Positions(index=mx.array(state.base_positions(log)[:, begin:end]), long=long)


def positions_of_unread_ids(
    state: ZipState, hyper: mx.array, slots: mx.array, mode: str, context: int | None, merge_size: int
) -> Positions | None:
    """Returns the positions of ids [B, 1] that the state has not read yet.

    hyper [B, 1]: whether each id is a hypertoken. slots [B, 1]: the slots of the hypertokens, any slot for other ids.
    merge_size: maximum number of base ids of one id.

    Returns None if the ids may make LongRoPE switch between its short and long factors.
    """
    if mode == "compressed":
        positions = _compressed_positions(state, state.offset, state.offset + 1, context)
        return positions if positions.long == state.long_rope else None
    done = state.base_lengths()
    first, last = int(done.max()), int(done.max()) + merge_size - 1  # range of the longest sequence's next position
    if _needs_long_at(first, context) != state.long_rope or _needs_long_at(last, context) != state.long_rope:
        return None
    spans = mx.array(state.spans())
    spans = spans[0][slots] if len(done) == 1 else mx.take_along_axis(spans, slots, axis=1)
    return Positions(index=_next_positions(mx.array(done[:, None] - 1), hyper, spans), long=state.long_rope)


@mx.compile
def _next_positions(last: mx.array, hyper: mx.array, spans: mx.array) -> mx.array:
    """Returns the positions [B, 1] of the ids after `last`. spans: number of base ids of each id that is `hyper`."""
    return last + mx.where(hyper, spans, 1)


def _compressed_positions(state: ZipState, begin: int, end: int, context: int | None) -> Positions:
    """Returns the positions of columns `begin` to `end` - 1, left padding included, when each id takes one position."""
    padding = state.left_padding
    start = begin - padding[0] if len(padding) == 1 else mx.array([begin - n for n in padding], mx.int32)
    return Positions(start=start, long=_needs_long_at(end - min(padding) - 1, context))


def _needs_long_at(last: int, context: int | None) -> bool:
    return context is not None and last >= context
