"""A model call for one id in two parts, so that the device can begin before the host has read the id.

`run` enqueues the decoder's body. `follow` reads the id, updates the codebooks and enqueues the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_zip.models.inputs import read_ids
from mlx_zip.models.positions import positions_ahead
from mlx_zip.models.zip_model import Model
from mlx_zip.state import HostIds, ZipState


class Ahead:
    """Runs a model on one request's cache, one id per sequence at a time. `run` and `follow` together are one call."""

    def __init__(self, model: Model, cache: Sequence[Any]) -> None:
        self.model, self.cache = model, cache

    def run(self, ids: mx.array) -> mx.array | None:
        """Returns the body's output [B, 1, D] for ids [B, 1], which the host need not have read; pass it to `follow`.

        Until `follow` returns, the KV caches are one id longer than the codebooks. If `run` or `follow` raises, call
        `Model.forget` to trim them. Returns None and changes nothing if the ids may make LongRoPE switch between its
        short and long factors. Raises `ModelError`, with nothing changed, for a cache that does not fit the model.
        """
        model = self.model
        kv, state = model.check_cache(self.cache)
        model.bind_tuned(state)
        if ids.dtype == mx.uint64:  # in MLX, uint64 combined with a signed integer becomes a float
            ids = ids.astype(mx.int64)
        rule = model.config.position_mode, model.traits.long_context
        positions = positions_ahead(state, ids, *rule, model.layout, model.config.merge_size)
        if positions is None:
            return None
        hyper, table = model.layout.is_hyper(ids), model.read_table(state)
        h = model.model.embed_tokens(mx.where(hyper | (ids < 0), 0, ids))  # a negative id makes `follow` raise
        if table.rows is not None:
            slots = mx.clip(model.layout.slot(ids), 0, table.rows.shape[1] - 1)
            h = mx.where(hyper[..., None], table.take(slots).astype(h.dtype), h)
        return model.run_layers(model.scaled(h), kv, positions)

    def follow(self, h: mx.array, ids: mx.array) -> mx.array:
        """Reads ids [B, 1] and returns their logits [B, 1, W]; h [B, 1, D] is what `run(ids)` returned.

        The body runs a second time if some hypertoken among the ids had no input row during `run`, because the
        hypertoken is read for the first time or was installed by this very id. Raises what `Model.__call__` raises.
        """
        model, kv, state = self.model, self.cache[:-1], self.cache[-1]
        host_ids, before = read_ids(ids, state), [len(book) for book in state.books]
        model.session.settle()
        advance = state.advance(host_ids)
        if not self._had_input_rows(state, host_ids, before):
            for layer_cache in kv:
                layer_cache.trim(1)
            h = model.hidden(kv, state, host_ids)
        return model.joint_head(h, state, advance, causal=False)

    def _had_input_rows(self, state: ZipState, ids: HostIds, installed: Sequence[int]) -> bool:
        """Returns whether every hypertoken among ids [B, 1] had its input row before the ids were read.

        installed [B]: number of entries per sequence at that time.
        """
        column, layout = [ids] if isinstance(ids, int) else ids[:, 0].tolist(), self.model.layout
        slots = [(b, layout.slot(one)) for b, one in enumerate(column) if layout.is_hyper(one)]
        if self.model.sides_are_one:
            return all(slot < installed[b] for b, slot in slots)
        return all(slot < installed[b] and state.encoded_inputs[b, slot] for b, slot in slots)
