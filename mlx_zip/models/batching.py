"""Sequences that join and leave a batch between two steps: caches of single requests are merged and taken apart again.

A batch's cache has a `BatchKVCache` per layer and, for a model with hypertokens, a `ZipState` of all sequences. All
functions also take a plain model's caches. Between two calls of these functions the batch is read as any other cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_zip.errors import ModelError
from mlx_zip.layout import is_zip
from mlx_zip.models.inputs import kv_length
from mlx_zip.state import ZipState, find_state


def merge_caches(model: Any, caches: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns the cache of one batch, with the sequences of the given caches in their order.

    caches: of one sequence each, as `make_cache` of this model makes them, or batches. Codebooks go over to the batch
    (logits processors stay bound to them), so the given caches must not be used any more. Raises `ModelError`, with
    nothing changed, for no caches, a cache of another model, one that was filled with other factors of LongRoPE than
    the first, and kinds of KV caches that do not batch (quantized or of a fixed size).
    """
    if not caches:
        raise ModelError("there are no caches to merge")
    kvs = [_checked_kv(model, cache) for cache in caches]
    states = [state for cache in caches if (state := find_state(cache)) is not None]
    last = [ZipState.merge(states)] if states else []
    return [*(_merged(layer) for layer in zip(*kvs, strict=True)), *last]


def extend_cache(model: Any, batch: Sequence[Any], cache: Sequence[Any]) -> None:
    """Adds the sequences of a cache, one or a batch, to a batch's cache, after those that are there.

    The cache's codebooks go over to the batch, so the cache must not be used any more. Raises `ModelError` as
    `merge_caches` does, with nothing changed.
    """
    kv, more = _checked_kv(model, batch), _checked_kv(model, cache)
    if not all(isinstance(layer, BatchKVCache) for layer in kv):
        raise ModelError("the cache to add to is one of a single request: merge it first")
    state, other = find_state(batch), find_state(cache)
    with _all_or_nothing(batch):
        if state is not None and other is not None:
            state.extend(other)
        for layer, added in zip(kv, more, strict=True):
            layer.extend(_as_batch(added))


def filter_cache(batch: Sequence[Any], indices: Sequence[int]) -> None:
    """Keeps the sequences of a batch's cache at these indices only, in this order.

    Left padding that all of them have is forgotten. Raises `ModelError`, with nothing changed, for no index, for one
    that is out of range or occurs twice, and for left padding that has not been read yet.
    """
    kv, state = _parts(batch)
    _check_indices(kv, indices)
    held = kv[0].left_padding.tolist() if state is None else state.left_padding
    padding = [held[i] for i in indices]
    if min(padding) > kv_length(kv[0]):
        raise ModelError(f"the cache has {min(padding)} columns of left padding, and has not read them all yet")
    with _all_or_nothing(batch):
        if state is not None:
            state.filter(indices)
        for layer in kv:
            _filter(layer, indices, padding)


def extract_cache(batch: Sequence[Any], index: int) -> list[Any]:
    """Returns the cache of one sequence of a batch, which can go on alone. The batch's cache does not change.

    The codebook is a copy: logits processors stay with the batch's. Raises `ModelError` for an index that is out of
    range.
    """
    kv, state = _parts(batch)
    _check_indices(kv, [index])
    last = [] if state is None else [state.extract(index)]
    return [*(KVCache() if layer.empty() else layer.extract(index) for layer in kv), *last]


@contextmanager
def _all_or_nothing(batch: Sequence[Any]) -> Iterator[None]:
    """If something raises inside, an interrupt for example, the cache is as before: all attributes get their values."""
    before = [dict(vars(entry)) for entry in batch]
    try:
        yield
    except BaseException:
        for entry, attributes in zip(batch, before, strict=True):
            vars(entry).update(attributes)
        raise


def _checked_kv(model: Any, cache: Sequence[Any]) -> Sequence[Any]:
    """Returns the KV caches of a cache of this model. Raises `ModelError` for those that do not batch."""
    kv = model.check_cache(cache)[0] if is_zip(model) else cache
    for layer in kv:
        if type(layer) not in (KVCache, BatchKVCache):
            raise ModelError(f"KV caches of the kind {type(layer).__name__} do not batch")
    if len(kv) != len(model.layers):
        raise ModelError(f"the cache has {len(kv)} KV caches, the model {len(model.layers)} layers")
    return kv


def _parts(batch: Sequence[Any]) -> tuple[Sequence[Any], ZipState | None]:
    """Returns a batch's KV caches and its `ZipState`, None for a plain model's. Raises `ModelError` for others."""
    state = find_state(batch)
    kv = batch if state is None else batch[:-1]
    if not kv or not all(isinstance(layer, BatchKVCache) for layer in kv):
        raise ModelError("this is no cache of a batch")
    return kv, state


def _check_indices(kv: Sequence[Any], indices: Sequence[int]) -> None:
    """Raises `ModelError` unless indices name at least one sequence of a batch, each once."""
    size = kv[0].left_padding.size
    if not len(indices) or len(set(indices)) < len(indices) or not all(0 <= i < size for i in indices):
        raise ModelError(f"indices must name sequences of the batch of {size}, each once, got {list(indices)}")


def _merged(layers: Sequence[Any]) -> BatchKVCache:
    """Returns one layer's KV caches of several requests as one."""
    if all(isinstance(layer, KVCache) for layer in layers):
        return BatchKVCache.merge(layers)
    made = _as_batch(layers[0])
    for layer in layers[1:]:
        made.extend(_as_batch(layer))
    return made


def _as_batch(layer: Any) -> BatchKVCache:
    """Returns a KV cache as one of a batch, which other sequences can be added to without changing the given one."""
    if isinstance(layer, KVCache):
        return BatchKVCache.merge([layer])
    twin = BatchKVCache([])
    vars(twin).update(vars(layer))
    return twin


def _filter(layer: BatchKVCache, indices: Sequence[int], padding: Sequence[int]) -> None:
    """Keeps some sequences of one layer's KV cache. If nothing changes, nothing is copied.

    padding: the left padding of the sequences that stay.
    """
    if min(padding) or list(indices) != list(range(layer.left_padding.size)):
        layer.filter(mx.array(list(indices)))
