"""A step in two parts: the decoder's body runs on an id that the host has not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_zip.models.inputs import read_ids
from mlx_zip.models.positions import positions_ahead
from mlx_zip.models.zip_model import Model
from mlx_zip.state import HostIds, ZipState


class Ahead:
    """The steps of a model on one request's cache. Each is `run` and then `follow`, together one model call."""

    def __init__(self, model: Model, cache: Sequence[Any]) -> None:
        self.model, self.cache = model, cache

    def run(self, ids: mx.array) -> mx.array | None:
        """The body's output [B, 1, D] for ids [B, 1], which may still be on the device; `follow` makes logits of it.

        From here to `follow` the KV caches are one id longer than the codebooks, also when this raises;
        `Model.forget` trims them. Returns None, with nothing done, where LongRoPE may change its factors. Raises
        `ModelError` for a cache that does not fit, before anything changes.
        """
        model = self.model
        kv, state = model.check_cache(self.cache)
        model.bind_tuned(state)
        if ids.dtype == mx.uint64:  # MLX makes floats of uint64 and a signed number
            ids = ids.astype(mx.int64)
        rule = model.config.position_mode, model.traits.long_context
        positions = positions_ahead(state, ids, *rule, model.layout, model.config.merge_size)
        if positions is None:
            return None
        hyper, table = model.layout.is_hyper(ids), model.read_table(state)
        h = model.model.embed_tokens(mx.where(hyper | (ids < 0), 0, ids))  # `follow` refuses negative ids
        if table.rows is not None:
            slots = mx.clip(model.layout.slot(ids), 0, table.rows.shape[1] - 1)
            h = mx.where(hyper[..., None], table.take(slots).astype(h.dtype), h)
        return model.run_layers(model.scaled(h), kv, positions)

    def follow(self, h: mx.array, ids: mx.array) -> mx.array:
        """The logits [B, 1, W] of h [B, 1, D], which `run(ids)` returned. Reads the ids; raises what a call raises.

        The body runs again for an id that had no input row yet: one that is read for the first time, or that installs
        itself.
        """
        model, kv, state = self.model, self.cache[:-1], self.cache[-1]
        host_ids, before = read_ids(ids, state), [len(book) for book in state.books]
        model.session.settle()
        advance = state.advance(host_ids)
        if not self._had_rows(state, host_ids, before):
            for one in kv:
                one.trim(1)
            h = model.hidden(kv, state, host_ids)
        return model.joint_head(h, state, advance, causal=False)

    def _had_rows(self, state: ZipState, ids: HostIds, installed: Sequence[int]) -> bool:
        """Whether every hypertoken among ids [B, 1] had its input row when `installed` [B] entries existed."""
        column, layout = [ids] if isinstance(ids, int) else ids[:, 0].tolist(), self.model.layout
        slots = [(b, layout.slot(one)) for b, one in enumerate(column) if layout.is_hyper(one)]
        if self.model.sides_are_one:
            return all(slot < installed[b] for b, slot in slots)
        return all(slot < installed[b] and state.encoded_inputs[b, slot] for b, slot in slots)
