"""Sequences that join and leave a batch between two steps: caches of single requests are merged and taken apart again.

A batch's cache has one batch KV cache per layer and, for a model with hypertokens, a `ZipState` of all sequences. All
functions also take a plain model's caches, of the kinds that mlx-lm can batch. Models take a batch's cache like any
other.

Each prompt is read into a cache of its own. KV caches are merged, extended, filtered and extracted by the methods of
mlx-lm's classes (`KVCache`, `RotatingKVCache`, `ArraysCache`, and lists of them). Two kinds that mlx-lm would batch are
refused: caches of `--max-kv-size`, whose batch loses the ids that are always kept, and classes that we do not know.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    dynamic_roll,
    make_prompt_cache,
)

from mlx_zip.errors import ModelError
from mlx_zip.layout import has_hypertokens
from mlx_zip.models.call_inputs import kv_length
from mlx_zip.models.rows.zip_state import ZipState, find_zip_state

LONG_PADDING = 64  # common left padding of so many columns is worth a copy of keys and values to remove it
_SINGLE_CACHES = (KVCache, RotatingKVCache)  # kinds of one sequence; `ArraysCache` holds any number of them
_BATCH_CACHES = (BatchKVCache, BatchRotatingKVCache, ArraysCache)


def flatten_cache_lists(cache: Sequence[Any]) -> Iterator[Any]:
    """Yields the entries of a cache; in place of mlx-lm's `CacheList`s, the entries in them."""
    for entry in cache:
        yield from flatten_cache_lists(entry.caches) if isinstance(entry, CacheList) else (entry,)


def can_batch(kv: Sequence[Any]) -> bool:
    """Returns whether all KV caches of one sequence are of kinds that can be batched.

    A rotating cache that always keeps its first ids (`max_kv_size`) is not: mlx-lm's batch of such caches loses them.
    """
    return all(_entry_can_batch(entry) for entry in flatten_cache_lists(kv))


def _entry_can_batch(entry: Any) -> bool:
    if type(entry) is RotatingKVCache:
        return entry.keep == 0
    return type(entry) in (*_SINGLE_CACHES, *_BATCH_CACHES)


def merge_caches(model: Any, caches: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns the cache of one batch, with the sequences of the given caches in their order.

    caches: of one sequence each, as `make_cache` of this model makes them, or batches. The batch takes over the
    codebooks (logits processors stay bound to them), so the given caches must not be used any more. Raises
    `ModelError`, with nothing changed, for no caches, a cache of another model, one that was filled with other factors
    of LongRoPE than the first, and kinds of KV caches that cannot be batched (see `can_batch`).
    """
    if not caches:
        raise ModelError("there are no caches to merge")
    kvs = [_kv_that_batches(model, cache) for cache in caches]
    states = [state for cache in caches if (state := find_zip_state(cache)) is not None]
    last = [ZipState.merge(states)] if states else []
    return [*(_merge_layer(layer) for layer in zip(*kvs, strict=True)), *last]


def merge_unread(model: Any, caches: Sequence[Sequence[Any]], left_padding: Sequence[int]) -> list[Any]:
    """Returns the cache of one batch, with sequences that have read nothing yet, for prompts of different lengths.

    caches: of one sequence each. left_padding [B]: per sequence, how many of its first ids will be padding. Raises
    `ModelError` as `merge_caches` does.
    """
    batch = merge_caches(model, caches)
    state = find_zip_state(batch)
    for layer in flatten_cache_lists(batch if state is None else batch[:-1]):
        layer.prepare(left_padding=left_padding)
    if state is not None:
        state.left_padding = list(left_padding)
    return batch


def extend_cache(model: Any, batch: Sequence[Any], cache: Sequence[Any]) -> None:
    """Appends the sequences of a cache, one or a batch, to a batch's cache.

    The batch takes over the cache's codebooks, so the cache must not be used any more. Raises `ModelError` as
    `merge_caches` does, with nothing changed.
    """
    kv, more = _kv_that_batches(model, batch), _kv_that_batches(model, cache)
    if any(isinstance(layer, _SINGLE_CACHES) for layer in flatten_cache_lists(kv)):
        raise ModelError("the cache to add to is one of a single request: merge it first")
    state, other = find_zip_state(batch), find_zip_state(cache)
    with restore_on_error(batch):
        if state is not None and other is not None:
            state.extend(other)
        for layer, added in zip(kv, more, strict=True):
            layer.extend(_to_batch_of_one(added))


def filter_cache(batch: Sequence[Any], indices: Sequence[int]) -> None:
    """Keeps the sequences of a batch's cache at these indices only, in this order.

    Left padding that all of them share is removed. Raises `ModelError`, with nothing changed, for no index, for one
    that is out of range or occurs twice, and for left padding that has not been read yet.
    """
    kv, state = _kv_and_state(batch)
    _raise_unless_indices(kv, indices)
    held = _left_padding(kv) if state is None else state.left_padding
    padding = [held[i] for i in indices]
    read = next((kv_length(layer) for layer in flatten_cache_lists(kv) if type(layer) is BatchKVCache), min(padding))
    if min(padding) > read:
        raise ModelError(f"the cache has {min(padding)} columns of left padding, and has not read them all yet")
    with restore_on_error(batch):
        if state is not None:
            state.filter(indices)
        for layer in kv:
            _filter_layer(layer, indices, padding)


def keep_columns(batch: Sequence[Any], kept: Sequence[int]) -> None:
    """Puts columns back into a batch's cache that a call has read and `trim` has then removed.

    kept [B]: how many of the first of these columns each sequence keeps, at least one; its codebook has read their ids
    already (`ZipState.push_to_row`). In sequences that keep fewer than others, keys and values are shifted and left
    padding is added. Left padding that all sequences share is removed when it is long (`LONG_PADDING`).
    """
    kv, state = _kv_and_state(batch)
    most = max(kept)
    shift = mx.array([[most - one] for one in kept])
    for layer in kv:
        if min(kept) < most:
            layer.keys, layer.values = (dynamic_roll(x, shift, axis=2) for x in (layer.keys, layer.values))
        layer._idx += most
        layer.left_padding = layer.left_padding + shift[:, 0]
        layer.offset = layer._idx - layer.left_padding
    if state is not None:
        state.pad_rows(kept)
    if min(_left_padding(kv) if state is None else state.left_padding) >= LONG_PADDING:
        filter_cache(batch, range(len(kept)))


def extract_cache(batch: Sequence[Any], index: int) -> list[Any]:
    """Returns the cache of one sequence of a batch, for use alone. The batch's cache does not change.

    The codebook is a copy: logits processors stay with the batch's. Raises `ModelError` for an index that is out of
    range.
    """
    kv, state = _kv_and_state(batch)
    _raise_unless_indices(kv, [index])
    last = [] if state is None else [state.extract(index)]
    return [*(_extract_layer(layer, index) for layer in kv), *last]


@contextmanager
def restore_on_error(batch: Sequence[Any]) -> Iterator[None]:
    """Context manager: if the block raises, also on an interrupt, all attributes of the cache are restored."""
    entries = list(flatten_cache_lists(batch))
    before = [dict(vars(entry)) for entry in entries]
    try:
        yield
    except BaseException:
        for entry, attributes in zip(entries, before, strict=True):
            vars(entry).update(attributes)
        raise


def _kv_that_batches(model: Any, cache: Sequence[Any]) -> Sequence[Any]:
    """Returns the KV caches of a cache of this model. Raises `ModelError` if one of them cannot be batched."""
    kv = model.check_cache(cache)[0] if has_hypertokens(model) else cache
    for layer in flatten_cache_lists(kv):
        if not _entry_can_batch(layer):
            raise ModelError(f"KV caches of the kind {type(layer).__name__} do not batch")
    count = len(model.layers) if has_hypertokens(model) else len(make_prompt_cache(model))
    if len(kv) != count:
        raise ModelError(f"the cache has {len(kv)} KV caches, this model's have {count}")
    return kv


def _kv_and_state(batch: Sequence[Any]) -> tuple[Sequence[Any], ZipState | None]:
    """Returns a batch's KV caches and its `ZipState` (None for a plain model). Raises `ModelError` for other caches."""
    state = find_zip_state(batch)
    kv = batch if state is None else batch[:-1]
    if not kv or not all(isinstance(layer, _BATCH_CACHES) for layer in flatten_cache_lists(kv)):
        raise ModelError("this is no cache of a batch")
    return kv, state


def _batch_size(layer: Any) -> int:
    return layer.batch_size if isinstance(layer, ArraysCache) else layer.left_padding.size


def _left_padding(kv: Sequence[Any]) -> list[int]:
    """Returns the left padding of a plain model's batch, 0 where no layer's keys are padded."""
    for layer in flatten_cache_lists(kv):
        if type(layer) is BatchKVCache:
            return layer.left_padding.tolist()  # type: ignore[return-value]
    return [0] * _batch_size(next(flatten_cache_lists(kv)))


def _raise_unless_indices(kv: Sequence[Any], indices: Sequence[int]) -> None:
    size = _batch_size(next(flatten_cache_lists(kv)))
    if not len(indices) or len(set(indices)) < len(indices) or not all(0 <= i < size for i in indices):
        raise ModelError(f"indices must name sequences of the batch of {size}, each once, got {list(indices)}")


def _merge_layer(layers: Sequence[Any]) -> Any:
    """Returns one layer's KV caches of several requests or batches as one batch's."""
    if isinstance(layers[0], CacheList):
        inner = zip(*(layer.caches for layer in layers), strict=True)
        return CacheList(*(_merge_layer(parts) for parts in inner))
    if all(isinstance(layer, _SINGLE_CACHES) for layer in layers):
        return type(layers[0]).merge(layers)
    made = _to_batch_of_one(layers[0])
    for layer in layers[1:]:
        made.extend(_to_batch_of_one(layer))
    return made


def _to_batch_of_one(layer: Any) -> Any:
    """Returns a KV cache as a batch's. Extending the result does not change the given cache."""
    if isinstance(layer, CacheList):
        return CacheList(*map(_to_batch_of_one, layer.caches))
    if isinstance(layer, _SINGLE_CACHES):
        return type(layer).merge([layer])
    return copy.copy(layer)


def _extract_layer(layer: Any, index: int) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*(_extract_layer(one, index) for one in layer.caches))
    if isinstance(layer, ArraysCache):
        made = ArraysCache(len(layer.cache))
        made.cache = [None if one is None else mx.contiguous(one[index : index + 1]) for one in layer.cache]
        return made
    if layer.empty():
        return RotatingKVCache(layer.max_size) if isinstance(layer, BatchRotatingKVCache) else KVCache()
    return layer.extract(index)


def _filter_layer(layer: Any, indices: Sequence[int], padding: Sequence[int]) -> None:
    """Keeps some sequences of one layer's KV cache. If nothing changes, nothing is copied.

    padding: the left padding of the sequences that stay.
    """
    if isinstance(layer, CacheList):
        for one in layer.caches:
            _filter_layer(one, indices, padding)
        return
    shifts = type(layer) is BatchKVCache and min(padding) > 0
    if shifts or list(indices) != list(range(_batch_size(layer))):
        layer.filter(mx.array(list(indices)))
