"""`MlxCaches`: what a store of sessions needs to know of the caches of a model on MLX."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
)
from numpy.typing import NDArray

from mlx_zip.codec import CodecParams
from mlx_zip.codec.params_json import params_from_json
from mlx_zip.engine.mlx.served import bounded_cache
from mlx_zip.engine.sessions.files import check_held
from mlx_zip.engine.sessions.format import (
    BadFileError,
    Contents,
    Marks,
    Tensor,
    codec_mark,
    own_pack_key,
    positions_mark,
)
from mlx_zip.engine.sessions.kept import Ids, Kept, Parts
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from mlx_zip.errors import EngineError
from mlx_zip.layout import decoder_config, has_hypertokens
from mlx_zip.models.rows.fingerprints import name_of
from mlx_zip.models.rows.zip_state import ZipState, find_state
from mlx_zip.vocab.first_stage import tokenizer_fingerprint


def open_store(
    model: Any, tokenizer: Any, options: SessionOptions | None = None, max_kv_size: int | None = None
) -> SessionStore:
    """Returns a new store of a model's sessions. max_kv_size: see `MlxCaches`."""
    options = options or SessionOptions()
    return SessionStore(MlxCaches(model, tokenizer, options.share, max_kv_size), options)


def positions_of(model: Any) -> str:
    """Returns the settings, beside the weights, that the keys of a model on MLX depend on, as text."""
    return positions_mark(decoder_config(model), model.config if has_hypertokens(model) else None)


class MlxCaches:
    """The caches of one model. share: name of the part of the model that is here, "" for a whole model.

    max_kv_size: bound on the ids in a plain model's caches, None for none.

    See `Caches`. A request's cache and a kept one are of the same type: a list of mlx-lm's entries.
    """

    def __init__(self, model: Any, tokenizer: Any, share: str = "", max_kv_size: int | None = None) -> None:
        self.model, self.tokenizer, self._share = model, tokenizer, share
        self.reach = model.config.merge_size if has_hypertokens(model) else 1
        self._checks = _CacheChecks(model, max_kv_size)

    @cached_property
    def marks(self) -> Marks:
        model, name = self.model, f"{name_of(self.model)} {self._share}".strip()
        codec = codec_mark(model.config.codec_params if has_hypertokens(model) else None)
        return Marks(name, tokenizer_fingerprint(self.tokenizer), codec, positions_of(model))

    @cached_property
    def own_pack(self) -> str:
        if not has_hypertokens(self.model):
            return ""
        pack = self.model.row_source.pack
        return own_pack_key(self.model.config.codec_params.start, None if pack is None else pack.tuned_fingerprint)

    def held(self, cache: Sequence[Any], base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        held = _held_ids(cache)
        if held is not None:
            return held
        ids = np.asarray(() if base_ids is None else base_ids, dtype=np.uint32)
        for entry in cache:
            if getattr(entry, "offset", len(ids)) != len(ids):
                raise EngineError(f"the cache holds {entry.offset} ids, and {len(ids)} base ids were given for it")
        return ids, np.arange(1, 1 + len(ids), dtype=np.uint32)

    def kept(self, cache: list[Any]) -> list[Any]:
        return _settled(cache)

    def size(self, kept: list[Any]) -> tuple[int, bool]:
        return _bytes_of(kept), can_trim_prompt_cache(kept)

    def room(self, ids: int) -> int:
        return ids

    def lent(self, kept: Kept, ids: int, alone: bool, start: Any) -> list[Any]:
        cache = kept.cache if alone else forked(kept.cache, ids, len(kept.ends) - ids)
        if start is not None:
            find_state(cache).begun_with([start])  # type: ignore[union-attr]
        return cache

    def parts(self, kept: Kept) -> Parts:
        return _parts_of(kept)

    def made(self, contents: Contents, kept: Kept) -> tuple[list[Any], Any]:
        classes, states, extra = _read_parts(contents)
        cache = self._checks.made(classes, states, len(kept.ends))
        held = _held_ids(cache)
        if held is not None:
            check_held(held, kept)
        elif len(kept.ends) != len(kept.base_ids):
            raise BadFileError("its ids are not base ids")
        self._checks.check_ids(kept.base_ids)
        mx.eval(tree_map(lambda leaf: leaf if isinstance(leaf, mx.array) else None, [entry.state for entry in cache]))
        return cache, extra[2] if len(extra) > 2 else None


# ---- a cache in memory: copied cheaply, trimmed, counted

_BYTES_PER_LOGGED_ID = 12  # of a codebook


def _held_ids(cache: Sequence[Any]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]] | None:
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


def _settled(cache: Sequence[Any]) -> list[Any]:
    """Returns a cache to keep: its arrays are computed, and its `ZipState` has no rows, which a `RowStore` gives back.

    Nothing else is kept in memory for it, and the cache given must not be used any more.
    """
    kept = [entry.extract(0, rows=False) if isinstance(entry, ZipState) else entry for entry in cache]
    mx.eval([array for _, array in _arrays(kept)])
    return kept


def _bytes_of(cache: Sequence[Any]) -> int:
    """Returns how many bytes a kept cache takes."""
    state = find_state(cache)
    logged = 0 if state is None else _BYTES_PER_LOGGED_ID * state.books[0].mark()
    return logged + sum(array.nbytes for _, array in _arrays(cache))


def _arrays(cache: Sequence[Any]) -> Iterator[tuple[str, mx.array]]:
    """Yields the arrays of all entries but the `ZipState`, each with its place."""
    for number, entry in enumerate(cache):
        if isinstance(entry, ZipState) or entry.empty():
            continue
        for place, leaf in tree_flatten(entry.state):
            if isinstance(leaf, mx.array):
                yield f"{number}.{place}", leaf


def _used_part(entry: Any) -> Any:
    """Returns a cache's entry whose arrays end where its ids end, without room for more. The entry does not change."""
    if type(entry) not in (KVCache, QuantizedKVCache) or entry.keys is None:
        return entry if isinstance(entry, ZipState) else _twin(entry)
    twin = _twin(entry)
    _cut(twin, entry.offset)
    return twin


# ---- a cache as the tensors of a file, and back
#
# The tensors and their names are those of mlx-lm's `save_prompt_cache`, so mlx-lm reads the cache of such a file. What
# mlx-lm has no place for follows as if it were one more entry of the cache: base ids, the ends of ids, and the
# sampler's random state.

NAMES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.float16: "F16",
    mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32", mx.uint64: "U64", mx.int64: "I64",
    mx.float64: "F64", mx.complex64: "C64",
}  # fmt: skip
_NUMPY = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "F16": np.float16,
    "BF16": np.uint16, "U32": np.uint32, "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64,
    "F64": np.float64, "C64": np.complex64,
}  # fmt: skip


def _parts_of(kept: Kept) -> Parts:
    """Returns a session as a file holds it. Its views share the memory of the session's arrays, which MLX copies before
    it writes to them.
    """
    assert kept.cache is not None
    arrays, scalars = _as_arrays([_used_part(entry).state for entry in kept.cache])
    classes = [type(entry).__name__ for entry in kept.cache]
    extra = [kept.base_ids, kept.ends, *([] if kept.random_state is None else [kept.random_state])]
    index = {f"{len(classes)}.{i}": mx.array(array) for i, array in enumerate(extra)}
    mx.eval([*index.values(), *arrays.values()])
    tensors = {name: host_view(array) for name, array in {**index, **arrays}.items()}
    metadata: Any = tree_flatten(["", classes, scalars])
    return Parts(tensors, dict(metadata[1:]))  # the first is the place of the session's facts


def _as_arrays(states: list[Any]) -> tuple[dict[str, mx.array], list[Any]]:
    """Returns the states of a cache's entries as arrays by place, and the places of other values, as mlx-lm does."""
    arrays: dict[str, mx.array] = {}
    scalars: list[Any] = [""]
    for place, leaf in tree_flatten(states):
        if isinstance(leaf, mx.array):
            arrays[place] = leaf
        elif isinstance(leaf, str):
            scalars.append((place, "string"))
            arrays[place] = mx.array([ord(character) for character in leaf])
        else:
            scalars.append((place, "none" if leaf is None else "scalar"))
            arrays[place] = mx.array([] if leaf is None else leaf)
    return arrays, scalars


def host_view(array: mx.array) -> tuple[str, np.ndarray]:
    """Returns the type of a computed array, as safetensors calls it, and a view of its memory."""
    dtype = NAMES[array.dtype]
    return dtype, np.array(array.view(mx.uint16) if dtype == "BF16" else array, copy=False)  # numpy has no bfloat16


def _read_parts(contents: Contents) -> tuple[list[str], list[Any], list[Any]]:
    """Returns the classes of a cache's entries, their states, and what follows them: base ids, ends, random state.

    Raises `BadFileError`, and other errors for what is no cache.
    """
    tree: Any = tree_unflatten(list(contents.metadata.items()))
    _, classes, scalars = tree
    arrays: dict[str, Any] = {place: array_of(tensor) for place, tensor in contents.tensors.items()}
    for place, kind in scalars[1:]:
        arrays[place] = _plain(arrays[place], kind)
    *states, extra = _unflattened(arrays)
    return classes, states, extra


def _unflattened(arrays: Mapping[str, Any]) -> list[Any]:
    """Returns arrays by place as the tree that they were flattened from."""
    tree: Any = tree_unflatten(list(arrays.items()))
    return list(tree)


def array_of(tensor: Tensor) -> mx.array:
    """Returns a tensor of a file as an array."""
    flat = np.frombuffer(tensor.data, _NUMPY[tensor.dtype]) if len(tensor.data) else np.zeros(0, _NUMPY[tensor.dtype])
    array = mx.array(flat.reshape(tensor.shape))
    return array.view(mx.bfloat16) if tensor.dtype == "BF16" else array


def _plain(array: mx.array, kind: str) -> Any:
    """Returns what an array stands for: a "scalar", a "string" or "none". Raises `BadFileError` for another kind."""
    if kind == "scalar":
        return array.item()
    if kind == "string":
        return "".join(map(chr, array.tolist()))  # type: ignore[arg-type]
    if kind == "none":
        return None
    raise BadFileError(f"it has a value of the unknown kind {kind!r:.40}")


# ---- whether the parts read from a file are those of this model's caches

_QUANTIZED = {"bits": (2, 3, 4, 5, 6, 8), "group_size": (32, 64, 128)}
_LENGTH_AXIS = 2  # of keys and values
_OTHER_SHAPE = "the arrays of its cache are not those of this model"


class _CacheChecks:
    """What a model's caches consist of. max_kv_size: bound on a plain model's ids in them, None for none."""

    def __init__(self, model: Any, max_kv_size: int | None = None) -> None:
        self.model, self._max_kv_size = model, max_kv_size

    @cached_property
    def _like(self) -> list[Any]:
        """A cache that has read one id; its arrays have types and shapes, but are never computed."""
        model = self.model
        own = {} if not has_hypertokens(model) or model.is_plain else {"pack": ()}
        if self._max_kv_size is not None:
            cache = bounded_cache(model, self._max_kv_size)
        else:
            cache = model.make_cache(**own) if has_hypertokens(model) else make_prompt_cache(model)
        model(mx.array([[0]]), cache=cache)
        return cache

    def check_ids(self, base_ids: np.ndarray) -> None:
        """Raises `BadFileError` for ids that are no base ids of a plain model; a codebook refuses them by itself."""
        limit = None if has_hypertokens(self.model) else decoder_config(self.model).get("vocab_size")
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
        if not isinstance(params, CodecParams) or not params.same_but_start(own):
            raise BadFileError("its codebook has other codec parameters than the loaded model's")
        state = ZipState.from_state(parts)
        if state.left_padding != [0] or state.offset != ids:
            raise BadFileError("its codebook holds another number of ids than its cache")
        return state


def _quantized(entry: QuantizedKVCache, like: KVCache, ids: int) -> QuantizedKVCache:
    """Returns a quantized KV cache if it holds `ids` ids of the widths and types of `like`."""
    bits, group = entry.bits, entry.group_size
    if bits not in _QUANTIZED["bits"] or group not in _QUANTIZED["group_size"] or type(entry.offset) is not int:
        raise BadFileError("its cache is quantized in an unknown way")
    for parts, one in ((entry.keys, like.keys), (entry.values, like.values)):
        assert one is not None
        batch, heads, _, width = one.shape
        wanted = [(width * bits // 32, mx.uint32), (width // group, one.dtype), (width // group, one.dtype)]
        if [(part.shape, part.dtype) for part in parts or ()] != [
            ((batch, heads, ids, n), dtype) for n, dtype in wanted
        ]:
            raise BadFileError(_OTHER_SHAPE)
    return _with_ids(entry, ids)


def _checked(entry: Any, like: Any, ids: int) -> Any:
    """Returns an entry if its arrays have the types and shapes of `like`, but for the number of ids."""
    found, wanted = dict(tree_flatten(entry.state)), dict(tree_flatten(like.state))
    if found.keys() != wanted.keys():
        raise BadFileError(_OTHER_SHAPE)
    for place, leaf in found.items():
        other = wanted[place]
        if type(leaf) is not type(other):
            raise BadFileError(_OTHER_SHAPE)
        if isinstance(leaf, mx.array) and (leaf.dtype != other.dtype or _but_length(leaf) != _but_length(other)):
            raise BadFileError(_OTHER_SHAPE)
    if type(entry) is KVCache and (entry.keys is None or entry.keys.shape[_LENGTH_AXIS] != ids):
        raise BadFileError(_OTHER_SHAPE)
    if isinstance(entry, RotatingKVCache):
        _check_rotating(entry, like, ids)
    return _with_ids(entry, ids)


def _check_rotating(entry: RotatingKVCache, like: RotatingKVCache, ids: int) -> None:
    """Raises `BadFileError` if a rotating cache is not as long as one that has read `ids` ids could be."""
    length = entry.keys.shape[_LENGTH_AXIS]  # type: ignore[union-attr]
    same = (entry.keep, entry.max_size) == (like.keep, like.max_size)
    if not same or not 0 <= entry._idx <= length or length < min(ids, entry.max_size):
        raise BadFileError(_OTHER_SHAPE)


def _but_length(array: mx.array) -> list[int]:
    """Returns an array's shape without the axis of ids."""
    return [n for axis, n in enumerate(array.shape) if axis != _LENGTH_AXIS or array.ndim != 4]


def _with_ids(entry: Any, ids: int) -> Any:
    """Returns an entry if it holds `ids` ids."""
    if getattr(entry, "offset", ids) != ids:
        raise BadFileError(f"a KV cache in it holds {entry.offset} ids, not {ids}")
    return entry
