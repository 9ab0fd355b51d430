"""`CacheChecks`: builds a cache from parts read from a file, if they are those of this model's caches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from mlx_zip.codec import CodecParams
from mlx_zip.codec.params_json import params_from_json
from mlx_zip.engine.sessions.format import BadFileError
from mlx_zip.generate import bounded_cache
from mlx_zip.layout import is_zip
from mlx_zip.request import base_config
from mlx_zip.state import ZipState
from mlx_zip.vocab.starts import same_but_start

QUANTIZED = {"bits": (2, 3, 4, 5, 6, 8), "group_size": (32, 64, 128)}
LENGTH_AXIS = 2  # of keys and values
OTHER_SHAPE = "the arrays of its cache are not those of this model"


class CacheChecks:
    """What a model's caches consist of. max_kv_size: bound on a plain model's ids in them, None for none."""

    def __init__(self, model: Any, max_kv_size: int | None = None) -> None:
        self.model, self._max_kv_size = model, max_kv_size

    @cached_property
    def _like(self) -> list[Any]:
        """A cache that has read one id; its arrays have types and shapes, but are never computed."""
        model = self.model
        own = {} if not is_zip(model) or model.is_plain else {"pack": ()}
        if self._max_kv_size is not None:
            cache = bounded_cache(model, self._max_kv_size)
        else:
            cache = model.make_cache(**own) if is_zip(model) else make_prompt_cache(model)
        model(mx.array([[0]]), cache=cache)
        return cache

    def check_ids(self, base_ids: np.ndarray) -> None:
        """Raises `BadFileError` for ids that are no base ids of a plain model; a codebook refuses them by itself."""
        limit = None if is_zip(self.model) else base_config(self.model).get("vocab_size")
        if limit is not None and len(base_ids) and int(base_ids.max()) >= limit:
            raise BadFileError(f"it holds the id {int(base_ids.max())}, base ids are below {limit}")

    def made(self, classes: Sequence[str], states: Sequence[Any], ids: int) -> list[Any]:
        """Returns the cache with these parts, one per entry, which must hold `ids` ids.

        Raises `BadFileError` if this model has other caches, and other errors for parts that do not fit together.
        """
        if len(classes) != len(self._like) or len(states) != len(classes):
            raise BadFileError(f"its cache has {len(classes)} entries, this model's has {len(self._like)}")
        return [
            self._entry(name, state, like, ids) for name, state, like in zip(classes, states, self._like, strict=True)
        ]

    def _entry(self, name: str, state: Any, like: Any, ids: int) -> Any:
        """Returns one entry of a cache. like: that of a cache of this model."""
        if isinstance(like, ZipState):
            return self._state(name, state, ids)
        if name == QuantizedKVCache.__name__ and type(like) is KVCache:
            return _quantized(QuantizedKVCache.from_state(state), like, ids)
        if name != type(like).__name__:
            raise BadFileError(f"its cache has a {name!r:.40} where this model has a {type(like).__name__}")
        if isinstance(like, CacheList):
            parts = zip(state, like.caches, strict=True)
            return CacheList(*(self._entry(inner, part, one, ids) for (part, inner), one in parts))
        return _checked(type(like).from_state(state), like, ids)

    def _state(self, name: str, parts: Any, ids: int) -> ZipState:
        """Returns a `ZipState`, after its codec was found to be the model's."""
        own: CodecParams = self.model.config.codec_params
        if name != ZipState.__name__:
            raise BadFileError(f"its cache has a {name!r:.40} where this model has its codebook")
        params = params_from_json(parts[1])
        if not isinstance(params, CodecParams) or not same_but_start(params, own):
            raise BadFileError("its codebook has other codec parameters than the loaded model's")
        state = ZipState.from_state(parts)
        if state.left_padding != [0] or state.offset != ids:
            raise BadFileError("its codebook holds another number of ids than its cache")
        return state


def _quantized(entry: QuantizedKVCache, like: KVCache, ids: int) -> QuantizedKVCache:
    """Returns a quantized KV cache if it holds `ids` ids of the widths and types of `like`."""
    bits, group = entry.bits, entry.group_size
    if bits not in QUANTIZED["bits"] or group not in QUANTIZED["group_size"] or type(entry.offset) is not int:
        raise BadFileError("its cache is quantized in an unknown way")
    for parts, one in ((entry.keys, like.keys), (entry.values, like.values)):
        assert one is not None
        batch, heads, _, width = one.shape
        wanted = [(width * bits // 32, mx.uint32), (width // group, one.dtype), (width // group, one.dtype)]
        if [(part.shape, part.dtype) for part in parts or ()] != [
            ((batch, heads, ids, n), dtype) for n, dtype in wanted
        ]:
            raise BadFileError(OTHER_SHAPE)
    return _with_ids(entry, ids)


def _checked(entry: Any, like: Any, ids: int) -> Any:
    """Returns an entry if its arrays have the types and shapes of `like`, but for the number of ids."""
    found, wanted = dict(tree_flatten(entry.state)), dict(tree_flatten(like.state))
    if found.keys() != wanted.keys():
        raise BadFileError(OTHER_SHAPE)
    for place, leaf in found.items():
        other = wanted[place]
        if type(leaf) is not type(other):
            raise BadFileError(OTHER_SHAPE)
        if isinstance(leaf, mx.array) and (leaf.dtype != other.dtype or _but_length(leaf) != _but_length(other)):
            raise BadFileError(OTHER_SHAPE)
    if type(entry) is KVCache and (entry.keys is None or entry.keys.shape[LENGTH_AXIS] != ids):
        raise BadFileError(OTHER_SHAPE)
    if isinstance(entry, RotatingKVCache):
        _check_rotating(entry, like, ids)
    return _with_ids(entry, ids)


def _check_rotating(entry: RotatingKVCache, like: RotatingKVCache, ids: int) -> None:
    """Raises `BadFileError` if a rotating cache is not as long as one that has read `ids` ids could be."""
    length = entry.keys.shape[LENGTH_AXIS]  # type: ignore[union-attr]
    same = (entry.keep, entry.max_size) == (like.keep, like.max_size)
    if not same or not 0 <= entry._idx <= length or length < min(ids, entry.max_size):
        raise BadFileError(OTHER_SHAPE)


def _but_length(array: mx.array) -> list[int]:
    """Returns an array's shape without the axis of ids."""
    return [n for axis, n in enumerate(array.shape) if axis != LENGTH_AXIS or array.ndim != 4]


def _with_ids(entry: Any, ids: int) -> Any:
    """Returns an entry if it holds `ids` ids."""
    if getattr(entry, "offset", ids) != ids:
        raise BadFileError(f"a KV cache in it holds {entry.offset} ids, not {ids}")
    return entry
