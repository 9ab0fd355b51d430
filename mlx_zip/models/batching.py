"""Lets sequences join and leave a batch between two steps, by merging caches and splitting them.

A batch's cache has one batch KV cache per layer and, for a model with hypertokens, a `ZipState` of all sequences. All
functions also take a plain model's caches if mlx-lm can batch them. A model is called with a batch's cache as with the
cache of a single request.

Each prompt is read into a cache of its own. KV caches are merged, extended, filtered and extracted by the methods of
mlx-lm's classes (`KVCache`, `RotatingKVCache`, `ArraysCache`, and lists of them). Two kinds that mlx-lm would batch are
refused: rotating caches of `--max-kv-size`, because mlx-lm's batch loses the first ids, which such a cache always
keeps, and unknown classes.
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
from mlx_zip.models.rows.zip_state import ZipState, find_zip_state, kv_caches

LONG_PADDING = 64  # columns of left padding that are worth removing, which copies keys and values
_SINGLE_CACHES = (KVCache, RotatingKVCache)  # caches of one sequence; an `ArraysCache` holds any number
_BATCH_CACHES = (BatchKVCache, BatchRotatingKVCache, ArraysCache)


def flatten_cache_lists(cache: Sequence[Any]) -> Iterator[Any]:
    """Yields the entries of a cache; each of mlx-lm's `CacheList`s is replaced by the entries inside it."""
    for entry in cache:
        yield from flatten_cache_lists(entry.caches) if isinstance(entry, CacheList) else (entry,)


def can_batch(kv: Sequence[Any]) -> bool:
    """Returns whether all KV caches of one sequence can be batched.

    A rotating cache that always keeps its first ids (`max_kv_size`) cannot: mlx-lm's batch would lose these ids.
    """
    return all(_entry_can_batch(entry) for entry in flatten_cache_lists(kv))


def _entry_can_batch(entry: Any) -> bool:
    if type(entry) is RotatingKVCache:
        return entry.keep == 0
    return type(entry) in (*_SINGLE_CACHES, *_BATCH_CACHES)


def merge_caches(model: Any, caches: Sequence[Sequence[Any]]) -> list[Any]:
    """Merges caches into the cache of one batch, whose sequences have the order of `caches`.

    caches: each is the cache of one sequence, made by this model's `make_cache`, or of a batch. Do not use them
    afterwards: the batch takes over their codebooks, to which logits processors stay bound. If one cache is of a batch,
    put it first, because its hyper rows are not copied then. Raises `ModelError`, leaving the caches unchanged, if the
    list is empty, a cache belongs to another model, codecs differ (start entries may) or LongRoPE's factors differ
    between caches, or a KV cache cannot be batched (see `can_batch`).
    """
    if not caches:
        raise ModelError("there are no caches to merge")
    kvs = [_batchable_kv_caches(model, cache) for cache in caches]
    states = [state for cache in caches if (state := find_zip_state(cache)) is not None]
    with restore_on_error(caches[0]):
        last = [ZipState.merge(states)] if states else []
        return [*(_merge_layer(layer) for layer in zip(*kvs, strict=True)), *last]


def merge_empty_caches(model: Any, caches: Sequence[Sequence[Any]], left_padding: Sequence[int]) -> list[Any]:
    """Merges empty caches, one per sequence, into the cache of one batch, for prompts of different lengths.

    left_padding [B]: number of padding ids before each prompt. Raises `ModelError` as `merge_caches` does.
    """
    batch = merge_caches(model, caches)
    state = find_zip_state(batch)
    for layer in flatten_cache_lists(kv_caches(batch)):
        layer.prepare(left_padding=left_padding)
    if state is not None:
        state.left_padding = list(left_padding)
    return batch


def filter_cache(batch: Sequence[Any], indices: Sequence[int]) -> None:
    """Keeps only the sequences at `indices` of a batch's cache, in the order of `indices`.

    Left padding that all kept sequences share is removed. Raises `ModelError`, leaving the cache unchanged, if
    `indices` is empty, an index is out of range or occurs twice, or the shared left padding has not all been read yet.
    """
    kv, state = _split_batch_cache(batch)
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


def restore_columns(batch: Sequence[Any], kept: Sequence[int]) -> None:
    """Restores the first columns that the last call added to a batch's cache and that `trim` has removed since.

    kept [B]: number of these columns that each sequence keeps, at least 1. The codebooks must have read the ids of
    these columns (`ZipState.push_to_sequence`). A sequence that keeps fewer columns than another gets left padding, and
    its keys and values are shifted. `LONG_PADDING` or more columns of left padding in all sequences are removed.
    """
    kv, state = _split_batch_cache(batch)
    most = max(kept)
    shift = mx.array([[most - one] for one in kept])
    for layer in kv:
        if min(kept) < most:
            layer.keys, layer.values = (dynamic_roll(x, shift, axis=2) for x in (layer.keys, layer.values))
        layer._idx += most
        layer.left_padding = layer.left_padding + shift[:, 0]
        layer.offset = layer._idx - layer.left_padding
    if state is not None:
        state.pad_sequences(kept)
    if min(_left_padding(kv) if state is None else state.left_padding) >= LONG_PADDING:
        filter_cache(batch, range(len(kept)))


def extract_cache(batch: Sequence[Any], index: int) -> list[Any]:
    """Returns a copy of one sequence of a batch's cache, as the cache of a single request.

    The batch's cache does not change, and logits processors stay bound to the batch's codebook. Raises `ModelError` if
    `index` is out of range.
    """
    kv, state = _split_batch_cache(batch)
    _raise_unless_indices(kv, [index])
    last = [] if state is None else [state.extract(index)]
    return [*(_extract_layer(layer, index) for layer in kv), *last]


@contextmanager
def restore_on_error(batch: Sequence[Any]) -> Iterator[None]:
    """Context manager: restores all attributes of the cache's entries if the block raises, also on an interrupt."""
    entries = list(flatten_cache_lists(batch))
    before = [dict(vars(entry)) for entry in entries]
    try:
        yield
    except BaseException:
        for entry, attributes in zip(entries, before, strict=True):
            vars(entry).update(attributes)
        raise


def _batchable_kv_caches(model: Any, cache: Sequence[Any]) -> Sequence[Any]:
    """Returns the KV caches of `cache`. Raises `ModelError` if one cannot be batched or `cache` is of another model."""
    kv = model.split_cache(cache)[0] if has_hypertokens(model) else cache
    for layer in flatten_cache_lists(kv):
        if not _entry_can_batch(layer):
            raise ModelError(f"KV caches of the kind {type(layer).__name__} do not batch")
    count = len(model.layers) if has_hypertokens(model) else len(make_prompt_cache(model))
    if len(kv) != count:
        raise ModelError(f"the cache has {len(kv)} KV caches, this model's have {count}")
    return kv


def _split_batch_cache(batch: Sequence[Any]) -> tuple[Sequence[Any], ZipState | None]:
    """Returns a batch's KV caches and `ZipState` (None: plain model). Raises `ModelError` for another cache."""
    state, kv = find_zip_state(batch), kv_caches(batch)
    if not kv or not all(isinstance(layer, _BATCH_CACHES) for layer in flatten_cache_lists(kv)):
        raise ModelError("this is no cache of a batch")
    return kv, state


def _batch_size(layer: Any) -> int:
    return layer.batch_size if isinstance(layer, ArraysCache) else layer.left_padding.size


def _left_padding(kv: Sequence[Any]) -> list[int]:
    """Returns the left padding of each sequence of a plain model's batch; 0 for all if no layer is a `BatchKVCache`."""
    for layer in flatten_cache_lists(kv):
        if type(layer) is BatchKVCache:
            return layer.left_padding.tolist()  # type: ignore[return-value]
    return [0] * _batch_size(next(flatten_cache_lists(kv)))


def _raise_unless_indices(kv: Sequence[Any], indices: Sequence[int]) -> None:
    size = _batch_size(next(flatten_cache_lists(kv)))
    if not len(indices) or len(set(indices)) < len(indices) or not all(0 <= i < size for i in indices):
        raise ModelError(f"indices must name sequences of the batch of {size}, each once, got {list(indices)}")


def _merge_layer(layers: Sequence[Any]) -> Any:
    """Merges one layer's KV caches, of several requests or batches, into one batch's."""
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
    """Returns `layer` as a batch's KV cache. Extending the result does not change `layer`."""
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
    """Keeps the sequences at `indices` of one layer's KV cache. If nothing changes, nothing is copied.

    padding: left padding of the sequences that are kept.
    """
    if isinstance(layer, CacheList):
        for one in layer.caches:
            _filter_layer(one, indices, padding)
        return
    shifts = type(layer) is BatchKVCache and min(padding) > 0
    if shifts or list(indices) != list(range(_batch_size(layer))):
        layer.filter(mx.array(list(indices)))
