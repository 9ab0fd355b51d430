"""What a kept session does with a prompt cache: copies it cheaply, trims the copy, and counts what it holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache, can_trim_prompt_cache
from numpy.typing import NDArray

from mlx_zip.state import ZipState, find_state

BYTES_PER_LOGGED_ID = 12  # of a codebook


def held_ids(cache: Sequence[Any]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]] | None:
    """Returns what the `ZipState` of a cache has read, None for a plain model's cache.

    That is its base ids [n] uint32, and for each of its ids how many base tokens it and the ids before it have, uint32.
    """
    state = find_state(cache)
    if state is None:
        return None
    book = state.books[0]
    return book.base_ids(0), np.cumsum(book.logged()[1], dtype=np.uint32)


def forked(cache: Sequence[Any], ids: int, surplus: int) -> list[Any]:
    """Returns a copy of a cache, trimmed to its first `ids` ids. The cache does not change, whatever is read later.

    surplus: how many ids the cache has beyond those. Arrays are shared until the copy is written to: MLX copies an
    array on its first write if another one shares its memory.
    """
    twins = [_twin(entry) for entry in cache]
    if surplus:
        for entry in twins:
            entry.trim(surplus)
            _cut(entry, ids)
    return twins


def _twin(entry: Any) -> Any:
    """Returns a copy of a cache's entry that shares its arrays; a `ZipState` is copied without its rows."""
    if isinstance(entry, ZipState):
        return entry.extract(0, rows=False)
    twin = copy.copy(entry)
    vars(twin).update({name: _shared(value) for name, value in vars(entry).items()})
    return twin


def _shared(value: Any) -> Any:
    """Returns a tree of arrays with new arrays on the same memory. What is no array stays, cache entries are copied."""
    if isinstance(value, tuple | list) and any(hasattr(item, "is_trimmable") for item in value):
        return type(value)(_twin(item) for item in value)
    return tree_map(lambda leaf: copy.copy(leaf) if isinstance(leaf, mx.array) else leaf, value)


def _cut(entry: Any, ids: int) -> None:
    """Forgets the arrays' places beyond the first `ids` ids, so that no copy is made of them."""
    if type(entry) in (KVCache, QuantizedKVCache) and entry.keys is not None:
        entry.keys, entry.values = tree_map(lambda array: array[..., :ids, :], (entry.keys, entry.values))


def settled(cache: Sequence[Any]) -> list[Any]:
    """Returns a cache to keep: its arrays are computed, and its `ZipState` has no rows, which a `RowStore` gives back.

    Nothing else is kept in memory for it, and the cache given must not be used any more.
    """
    kept = [entry.extract(0, rows=False) if isinstance(entry, ZipState) else entry for entry in cache]
    mx.eval([array for _, array in _arrays(kept)])
    return kept


def can_trim(cache: Sequence[Any]) -> bool:
    """Returns whether a cache can be trimmed to any of its ids."""
    return can_trim_prompt_cache(list(cache))


def bytes_of(cache: Sequence[Any]) -> int:
    """Returns how many bytes a kept cache takes."""
    state = find_state(cache)
    logged = 0 if state is None else BYTES_PER_LOGGED_ID * state.books[0].mark()
    return logged + sum(array.nbytes for _, array in _arrays(cache))


def _arrays(cache: Sequence[Any]) -> Iterator[tuple[str, mx.array]]:
    """Yields the arrays of all entries but the `ZipState`, each with its place."""
    for number, entry in enumerate(cache):
        if isinstance(entry, ZipState) or entry.empty():
            continue
        for place, leaf in tree_flatten(entry.state):
            if isinstance(leaf, mx.array):
                yield f"{number}.{place}", leaf


def used_part(entry: Any) -> Any:
    """Returns a cache's entry whose arrays end where its ids end, without room for more. The entry does not change."""
    if type(entry) not in (KVCache, QuantizedKVCache) or entry.keys is None:
        return entry if isinstance(entry, ZipState) else _twin(entry)
    twin = _twin(entry)
    _cut(twin, entry.offset)
    return twin
