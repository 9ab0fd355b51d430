"""`DraftedPass`: one pass of the model over the last id and proposed ones, whose logits are taken one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_zip.engine.drafts import MOST_PROPOSED, Drafter
from mlx_zip.engine.mlx.served import Served
from mlx_zip.models.batching import flatten_cache_lists
from mlx_zip.models.rows.zip_state import ZipState, find_zip_state


class DraftedPass:
    """Ids that were proposed and read behind the last id, and the logits after each of them.

    The cache of the request holds the last id and no proposed one: codebook and KV caches are trimmed at once. The keys
    and values stay in memory behind the end of the KV caches, and a proposed id that is chosen moves the end over its
    own. So between two ids the cache is as without a draft, and whoever trims, copies or saves it need not know of one.
    `logits` [1, W] are those after the last id.
    """

    def __init__(self, served: Served, cache: list[Any], drafter: Drafter, last: int, proposed: Sequence[int]) -> None:
        self._cache, self._drafter, self._proposed, self._taken = cache, drafter, list(proposed), 0
        self._state = find_zip_state(cache)
        drafter.note_pass(len(proposed))
        self._logits = self._read(served, mx.array([[last, *proposed]], mx.uint32))
        self._add_to_cache(last)

    def _read(self, served: Served, ids: mx.array) -> mx.array:
        """Returns logits [1, L, W] of ids [1, L], and notes the body's output. The cache then ends where it did before.

        The codebook that the request follows is not told: to whoever looks at it, it would have been rewound.
        """
        state = self._state
        if state is None:
            held = [(entry, entry.offset) for entry in _kv_entries(self._cache, None)]
            try:
                logits, self._h = served.read(ids, self._cache)
                return logits
            finally:  # an interrupt may have come between two layers
                for entry, offset in held:
                    entry.trim(entry.offset - offset)
        book, before = state.books[0], state.offset
        state.books[0] = book.copy()
        try:
            logits, self._h = served.read(ids, self._cache, causal=True)
            self._encoded = state.encoded_rows()
            served.model.trim_cache(self._cache, before)
        finally:
            state.books[0] = book
        return logits

    @property
    def logits(self) -> mx.array:
        """The logits [1, W] after the last id that the cache holds."""
        return self._logits[:, self._taken]

    @property
    def h(self) -> mx.array | None:
        """The body's output [1, 1, D] that `logits` come from, None if no draft head is used."""
        return None if self._h is None else self._h[:, self._taken : self._taken + 1]

    def proposes(self, chosen: int) -> bool:
        """Returns whether an id is the next one that was proposed."""
        return self._taken < len(self._proposed) and self._proposed[self._taken] == chosen

    def follow(self, chosen: int) -> bool:
        """Has the cache hold the id that was chosen, if it is the next proposed one; returns whether it is."""
        if not self.proposes(chosen):
            return False
        self._add_to_cache(chosen)
        self._taken += 1
        return True

    def _add_to_cache(self, one: int) -> None:
        """Moves the cache's end over an id that the pass has read."""
        if self._state is not None:
            self._state.advance(one)
            self._state.mark_encoded_again(self._encoded)
        for entry in _kv_entries(self._cache, self._state):
            entry.offset += 1

    def end(self) -> None:
        """Tells the drafter that the draft is over: all ids were accepted, or the next one was refused."""
        self._drafter.note_end(len(self._proposed), self._taken)


def draft_room(served: Served, cache: Sequence[Any]) -> int:
    """Returns how many ids may be proposed to a model on this cache.

    0 on several machines, for caches that cannot be trimmed as if nothing had been read (windows, states), and so many
    that KV caches are quantized after the same id as without a draft.
    """
    kv = _kv_entries(cache, find_zip_state(cache))
    if served.machines is not None or not all(type(entry) in (KVCache, QuantizedKVCache) for entry in kv):
        return 0
    if served.options.kv_bits is None or type(kv[0]) is QuantizedKVCache:
        return MOST_PROPOSED
    return max(0, served.options.quantized_kv_start - kv[0].offset - 2)


def _kv_entries(cache: Sequence[Any], state: ZipState | None) -> list[Any]:
    """Returns the KV caches of a request's cache."""
    return list(flatten_cache_lists(cache if state is None else cache[:-1]))
