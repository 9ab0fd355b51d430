"""A step ahead of the host: the decoder's body runs on an id that the host has not read yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_zip.models.parts import kv_length, read_ids
from mlx_zip.models.rope import Positions
from mlx_zip.state import HostIds, ZipState


class Ahead(nn.Module):
    """The part of the model that does so; names without a definition here are the model's."""

    model: Any
    config: Any
    traits: Any
    layout: Any
    sides_are_one: bool
    _rows: Any
    check_cache: Callable[..., Any]
    run_layers: Callable[..., mx.array]
    _hidden: Callable[..., mx.array]
    _head: Callable[..., mx.array]
    _scaled: Callable[[mx.array], mx.array]
    _compressed: Callable[..., Positions]
    _read_table: Callable[[ZipState], Any]

    def run_ahead(self, ids: mx.array, cache: Sequence[Any]) -> mx.array | None:
        """The body's output [B, 1, D] for ids [B, 1] that may still be on the device; `follow` makes logits of it.

        Until then the KV caches are one id ahead of the codebooks, also when this ends in an exception: `forget` takes
        that back. None, and nothing done, where LongRoPE may change its factors. Raises `ModelError` for a cache that
        does not fit, before anything changes.
        """
        kv, state = self.check_cache(cache)
        self._rows.bind_tuned(state)
        if ids.dtype == mx.uint64:  # of which MLX makes floats where it meets a number with a sign
            ids = ids.astype(mx.int64)
        positions = self._positions_ahead(state, ids)
        if positions is None:
            return None
        hyper, table = self.layout.is_hyper(ids), self._read_table(state)
        h = self.model.embed_tokens(mx.where(hyper | (ids < 0), 0, ids))  # `follow` refuses those
        if table.rows is not None:
            slots = mx.clip(self.layout.slot(ids), 0, table.rows.shape[1] - 1)
            h = mx.where(hyper[..., None], table.take(slots).astype(h.dtype), h)
        return self.run_layers(self._scaled(h), kv, positions)

    def _positions_ahead(self, state: ZipState, ids: mx.array) -> Positions | None:
        """Where ids [B, 1] stand that the state does not know yet; None where LongRoPE may change its factors."""
        if self.config.position_mode == "compressed":
            positions = self._compressed(state, state.offset, state.offset + 1)
            return positions if positions.long == state.long_rope else None
        context, done = self.traits.long_context, state.base_lengths()
        longest = int(done.max()) + self.config.merge_size  # base ids after any id that may come
        if context is not None and not (int(done.max()) + 1 > context if state.long_rope else longest <= context):
            return None
        hyper = self.layout.is_hyper(ids)
        column = mx.where(hyper, mx.clip(self.layout.slot(ids), 0, self.config.codebook_size - 1) + 1, 0)
        spans = mx.take_along_axis(mx.array(state.spans()), column, axis=1)
        return Positions(index=mx.array(done)[:, None] + spans - 1, long=state.long_rope)

    def follow(self, h: mx.array, ids: mx.array, cache: Sequence[Any]) -> mx.array:
        """The logits [B, 1, W] behind `run_ahead(ids, cache)`, which gave h [B, 1, D].

        Here the ids are read. The body runs again for an id that had no input row yet: one that is read for the first
        time, or that installs itself. Errors are those of a call.
        """
        kv, state = cache[:-1], cache[-1]
        host_ids, before = read_ids(ids, state), [len(book) for book in state.books]
        self._rows.settle()
        advance = state.advance(host_ids)
        if not self._had_rows(state, host_ids, before):
            for one in kv:
                one.trim(1)
            h = self._hidden(kv, state, host_ids)
        return self._head(h, state, advance, causal=False)

    def _had_rows(self, state: ZipState, ids: HostIds, installed: Sequence[int]) -> bool:
        """Whether every hypertoken among ids [B, 1] had its input row when `installed` [B] entries existed."""
        column = [ids] if isinstance(ids, int) else ids[:, 0].tolist()
        slots = [(b, self.layout.slot(one)) for b, one in enumerate(column) if self.layout.is_hyper(one)]
        return all(slot < installed[b] and (self.sides_are_one or state.encoded_inputs[b, slot]) for b, slot in slots)

    def forget(self, cache: Sequence[Any], offset: int) -> None:
        """Takes back what the codebooks and KV caches of a cache, or some of them, have read beyond `offset` ids."""
        cache[-1].trim(cache[-1].offset - offset)
        for one in cache[:-1]:
            one.trim(max(0, kv_length(one) - offset))
