"""`LongRopeRefill`: fills a request's KV caches again from its id log when LongRoPE's factors change.

LongRoPE uses one set of factors for all positions, chosen by the last position. When a call changes the set, the keys
in the KV caches are wrong, and all ids must be read again. A caller can do this before the call, in chunks, so that
other requests can use the device in between and no call computes with all ids at once.

The old keys stay until all new keys are computed, so a session stays usable if its request is cancelled meanwhile; KV
caches take twice the memory during that time. A prompt that ends in the long context is read with the long factors from
its first chunk on, and so only once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.models.batching import restore_on_error
from mlx_zip.models.call_inputs import kv_length, positions_of_log, set_plain_offsets
from mlx_zip.models.rows.zip_state import ZipState


class LongRopeRefill:
    """Computes a request's keys and values again, in new KV caches, with LongRoPE's long factors or its short ones.

    model: a `Model`. kv, state: the request's KV caches and `ZipState`, which do not change before
    `install_refilled_caches`, so a refill can be abandoned. long: whether to use the long factors. total: number of ids
    per sequence to read, left padding included. filled: the new KV caches.
    """

    def __init__(self, model: Any, kv: Sequence[Any], state: ZipState, long: bool) -> None:
        self._model, self._kv, self._state, self._long = model, kv, state, long
        self.filled = [_empty_copy(cache) for cache in kv]
        self.done, self.total = 0, state.offset
        self._h: mx.array | None = None  # embeddings [B, total, D]

    @property
    def ids_left(self) -> int:
        """Number of ids per sequence that are still to be read."""
        return self.total - self.done

    def read_next(self, at_most: int) -> mx.array:
        """Reads up to `at_most` ids per sequence; returns the body's output [B, L, D] for them, not yet computed."""
        model, state = self._model, self._state
        embeddings = self._h
        if embeddings is None:
            model.row_source.store_unsubmitted_rows()
            model.bind_tuned_rows(state)
            model.fill_outputs(state)  # `embed` reads input rows from this table if both sides have the same rows
            self._log = state.padded_id_log(model.config.pad_id)
            embeddings = self._h = model.embed(state, self._log)
        begin, end = self.done, min(self.done + at_most, self.total)
        positions = positions_of_log(state, self._log, begin, end, model.config.position_mode, self._long)
        h = model.run_layers(embeddings[:, begin:end], self.filled, positions, state.submit)
        set_plain_offsets(self.filled, state.left_padding)
        self.done = end
        return h

    def install_refilled_caches(self) -> None:
        """Puts the new keys and values into the request's KV caches. All ids must have been read.

        If this raises, also on an interrupt, all KV caches are restored, because all layers must use the same factors.
        """
        with restore_on_error([*self._kv, self._state]):
            for cache, filled in zip(self._kv, self.filled, strict=True):
                vars(cache).update(vars(filled))
            self._state.long_rope = self._long


def plan_rope_factors(
    model: Any, cache: Sequence[Any], ids: np.ndarray
) -> tuple[dict[str, bool], LongRopeRefill | None]:
    """Returns the arguments that choose LongRoPE's factors in calls that read ids [B, L] next; {} without LongRoPE.

    Also returns the refill to finish before these calls if the cache was filled with the other factors, else None.
    Raises `CodecError` if the model would refuse an id.
    """
    if model.traits.long_context is None:
        return {}, None
    kv, state = model.split_cache(cache)
    long = model.call_needs_long_factors(state, ids)
    again = state.offset and long != state.long_rope
    return {"long": long}, LongRopeRefill(model, kv, state, long) if again else None


def _empty_copy(cache: Any) -> Any:
    twin = copy.copy(cache)
    twin.trim(kv_length(twin))
    twin.keys = twin.values = None
    return twin
