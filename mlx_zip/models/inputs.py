"""The inputs of one model call: its ids on the host, and each layer's view of its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_zip.errors import ModelError
from mlx_zip.models.rope import Positions
from mlx_zip.models.rows.zip_state import HostIds, ZipState


def check_shape(ids: mx.array) -> None:
    """Raises `ModelError` unless ids are integers [B, L] with B, L > 0."""
    if ids.ndim != 2 or 0 in ids.shape or not mx.issubdtype(ids.dtype, mx.integer):
        raise ModelError(f"ids must be integers [B, L] with B, L > 0, got {ids.dtype} {list(ids.shape)}")


def read_ids(ids: mx.array, state: ZipState) -> HostIds:
    """Returns ids [B, L] on the host, as uint32 or, where `takes_one` allows it, as one number. Ids [B] become [B, 1].

    This is the only time that a model call waits for the device. The one id of a generation step is read without
    numpy: reading half a gigabyte of weights has evicted numpy's code from the processor's caches, and using numpy
    again would cost as much as all other work on the host. Raises `ModelError` for an id that does not fit 32 bits.
    """
    if ids.size == 1 and state.takes_one():
        one = cast(int, ids.item())
        _check_range(one, one)
        return one
    host = np.array(ids).reshape(len(ids), -1)
    if host.dtype != np.uint32:
        _check_range(int(host.min()), int(host.max()))
    return np.ascontiguousarray(host.astype(np.uint32, copy=False))


def length_of(ids: HostIds) -> int:
    """Returns L, the number of ids per sequence."""
    return 1 if isinstance(ids, int) else ids.shape[1]


def _check_range(low: int, high: int) -> None:
    """Raises `ModelError` unless the smallest and the largest id of a call fit 32 bits."""
    if low < 0 or high > 0xFFFFFFFF:
        raise ModelError(f"ids from {low} to {high} are not all 32-bit token ids")


class PositionedCache:
    """One layer's KV cache as the layer sees it during one call: `offset` holds the call's `Positions`, not a count."""

    def __init__(self, cache: Any, offset: Positions) -> None:
        self.cache, self.offset = cache, offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Adds keys and values to the cache and returns all keys and values that it then holds."""
        return self.cache.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:  # `bits` and `group_size` of a quantized cache
        return getattr(self.cache, name)


def kv_length(cache: Any) -> int:
    """Returns the number of ids in a KV cache, left padding included.

    A batch cache counts them in `_idx`, because its `offset` holds one number per sequence.
    """
    return cache._idx if hasattr(cache, "_idx") else cache.offset


def cut_offsets(kv: Sequence[Any], left_padding: Sequence[int]) -> None:
    """Sets the offsets of a batch's KV caches, which a model call has just moved on, to plain arrays [B].

    mlx-lm adds to these offsets lazily and nothing here reads them, so they would become a chain of operations that
    grows with every step. left_padding [B]: ids of padding per sequence.
    """
    if kv and hasattr(kv[0], "_idx"):
        offset = mx.array([kv[0]._idx - n for n in left_padding])
        for cache in kv:
            cache.offset = offset
