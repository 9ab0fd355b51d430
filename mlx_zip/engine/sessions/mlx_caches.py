"""`MlxCaches`: how a session store copies, measures, saves and loads the caches of a model on MLX."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
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

from mlx_zip.codec import CodecParams
from mlx_zip.codec.params import params_from_json
from mlx_zip.engine.mlx.served import KV_BITS, KV_GROUP_SIZES, make_bounded_cache
from mlx_zip.engine.sessions.file_format import (
    NUMPY_TYPES,
    BadFileError,
    FileContents,
    FileTensor,
    ModelIdentity,
    codec_settings_text,
    pack_key_of,
    position_settings_text,
)
from mlx_zip.engine.sessions.session import Ids, Session, ids_in_book, raise_if_other_ids
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from mlx_zip.errors import EngineError
from mlx_zip.layout import decoder_config, has_hypertokens
from mlx_zip.models.rows.fingerprints import fingerprint_of_model
from mlx_zip.models.rows.zip_state import ZipState, find_zip_state
from mlx_zip.vocab.first_stage import tokenizer_fingerprint


def open_session_store(
    model: Any, tokenizer: Any, options: SessionOptions | None = None, max_kv_size: int | None = None
) -> SessionStore:
    """Returns a new store of a model's sessions. max_kv_size: see `MlxCaches`."""
    options = options or SessionOptions()
    return SessionStore(MlxCaches(model, tokenizer, options.share, max_kv_size), options)


def position_settings(model: Any) -> str:
    """Returns as text the settings, other than weights, on which the keys in a model's KV caches depend."""
    return position_settings_text(decoder_config(model), model.config if has_hypertokens(model) else None)


class MlxCaches:
    """`SessionCaches` of one model on MLX. Requests' caches and sessions' caches are lists of mlx-lm's cache entries.

    share: name of the part of the model that is on this machine, "" for a whole model. max_kv_size: maximum number of
    ids in a plain model's cache, None for no bound.
    """

    def __init__(self, model: Any, tokenizer: Any, share: str = "", max_kv_size: int | None = None) -> None:
        self.model, self.tokenizer, self._share, self._max_kv_size = model, tokenizer, share, max_kv_size
        self.merge_size = model.config.merge_size if has_hypertokens(model) else 1

    @cached_property
    def identity(self) -> ModelIdentity:
        model, name = self.model, f"{fingerprint_of_model(self.model)} {self._share}".strip()
        codec = codec_settings_text(model.config.codec_params if has_hypertokens(model) else None)
        return ModelIdentity(name, tokenizer_fingerprint(self.tokenizer), codec, position_settings(model))

    @cached_property
    def own_pack_key(self) -> str:
        if not has_hypertokens(self.model):
            return ""
        pack = self.model.row_source.pack
        return pack_key_of(self.model.config.codec_params.start, None if pack is None else pack.tuned_fingerprint)

    def held_ids(self, cache: Sequence[Any], base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        state = find_zip_state(cache)
        if state is not None:
            return ids_in_book(state.books[0])
        ids = np.asarray(() if base_ids is None else base_ids, dtype=np.uint32)
        for entry in cache:
            if getattr(entry, "offset", len(ids)) != len(ids):
                raise EngineError(f"the cache holds {entry.offset} ids, and {len(ids)} base ids were given for it")
        return ids, np.arange(1, 1 + len(ids), dtype=np.uint32)

    def prepare_to_keep(self, cache: list[Any]) -> list[Any]:
        kept = [entry.extract(0, rows=False) if isinstance(entry, ZipState) else entry for entry in cache]
        mx.eval([array for _, array in _arrays_by_place(kept)])
        return kept  # without hyper rows, which the `RowStore` can supply again

    def measure(self, kept: list[Any]) -> tuple[int, bool]:
        return _cache_bytes(kept), can_trim_prompt_cache(kept)

    def count_fitting_ids(self, ids: int) -> int:
        return ids

    def cache_for_request(self, session: Session, ids: int, move: bool, start: Any) -> list[Any]:
        cache = session.cache if move else copy_prefix(session.cache, ids, len(session.ends) - ids)
        if start is not None:
            find_zip_state(cache).bind_start_packs([start])  # type: ignore[union-attr]
        return cache

    def file_contents(self, session: Session) -> FileContents:
        # The views share the memory of the session's arrays, which MLX copies before it writes to them.
        assert session.cache is not None
        arrays, scalars = _states_as_arrays([_without_spare_room(entry).state for entry in session.cache])
        classes = [type(entry).__name__ for entry in session.cache]
        extra = [session.base_ids, session.ends, *([] if session.random_state is None else [session.random_state])]
        index = {f"{len(classes)}.{i}": mx.array(array) for i, array in enumerate(extra)}
        mx.eval([*index.values(), *arrays.values()])
        tensors = {name: view_on_host(array) for name, array in {**index, **arrays}.items()}
        metadata: Any = tree_flatten(["", classes, scalars])
        return FileContents(dict(metadata[1:]), tensors)  # the first is the place of the session's facts

    def cache_from_file(self, contents: FileContents, session: Session) -> tuple[list[Any], Any]:
        classes, states, extra = _classes_and_states(contents)
        cache = self._build_cache(classes, states, len(session.ends))
        state = find_zip_state(cache)
        if state is not None:
            raise_if_other_ids(ids_in_book(state.books[0]), session)
        elif len(session.ends) != len(session.base_ids):
            raise BadFileError("its ids are not base ids")
        self._raise_unless_base_ids(session.base_ids)
        mx.eval(tree_map(lambda leaf: leaf if isinstance(leaf, mx.array) else None, [entry.state for entry in cache]))
        return cache, extra[2] if len(extra) > 2 else None

    # ---- building a cache from a file, with checks that this model can have made it

    @cached_property
    def _example_cache(self) -> list[Any]:
        """A cache that has read one id. Its arrays show dtypes and shapes; they are never evaluated."""
        model = self.model
        own = {} if not has_hypertokens(model) or model.is_plain else {"pack": ()}
        if self._max_kv_size is not None:
            cache = make_bounded_cache(model, self._max_kv_size)
        else:
            cache = model.make_cache(**own) if has_hypertokens(model) else make_prompt_cache(model)
        model(mx.array([[0]]), cache=cache)
        return cache

    def _raise_unless_base_ids(self, base_ids: np.ndarray) -> None:
        """Raises `BadFileError` if a plain model lacks one of these ids. With hypertokens, the codebook checks ids."""
        limit = None if has_hypertokens(self.model) else decoder_config(self.model).get("vocab_size")
        if limit is not None and len(base_ids) and int(base_ids.max()) >= limit:
            raise BadFileError(f"it holds the id {int(base_ids.max())}, base ids are below {limit}")

    def _build_cache(self, classes: Sequence[str], states: Sequence[Any], ids: int) -> list[Any]:
        """Builds a cache that holds `ids` ids. classes, states: the class name and the state of each entry.

        Raises `BadFileError` if this model's caches are different, and other errors if the parts do not fit together.
        """
        if len(classes) != len(self._example_cache) or len(states) != len(classes):
            raise BadFileError(f"its cache has {len(classes)} entries, this model's has {len(self._example_cache)}")
        return [
            self._build_entry(name, state, example, ids)
            for name, state, example in zip(classes, states, self._example_cache, strict=True)
        ]

    def _build_entry(self, name: str, state: Any, example: Any, ids: int) -> Any:
        """Builds one entry of a cache. example: the entry at this place in a cache of this model."""
        if isinstance(example, ZipState):
            return self._build_zip_state(name, state, ids)
        if name == QuantizedKVCache.__name__ and type(example) is KVCache:
            return _checked_quantized_entry(QuantizedKVCache.from_state(state), example, ids)
        if name != type(example).__name__:
            raise BadFileError(f"its cache has a {name!r:.40} where this model has a {type(example).__name__}")
        if isinstance(example, CacheList):
            parts = zip(state, example.caches, strict=True)
            return CacheList(*(self._build_entry(inner, part, one, ids) for (part, inner), one in parts))
        return _checked_entry(type(example).from_state(state), example, ids)

    def _build_zip_state(self, name: str, parts: Any, ids: int) -> ZipState:
        """Builds a `ZipState`. Raises `BadFileError` if its codec is not the model's, or it does not hold `ids` ids."""
        own: CodecParams = self.model.config.codec_params
        if name != ZipState.__name__:
            raise BadFileError(f"its cache has a {name!r:.40} where this model has its codebook")
        params = params_from_json(parts[1])
        if not isinstance(params, CodecParams) or not params.is_equal_except_start(own):
            raise BadFileError("its codebook has other codec parameters than the loaded model's")
        state = ZipState.from_state(parts)
        if state.left_padding != [0] or state.offset != ids:
            raise BadFileError("its codebook holds another number of ids than its cache")
        return state


# ---- a cache in memory: copying without copying arrays, trimming, counting bytes

_BYTES_PER_LOGGED_ID = 12  # of a codebook


def copy_prefix(cache: Sequence[Any], ids: int, surplus: int) -> list[Any]:
    """Returns a copy of a cache, trimmed to its first `ids` ids. Use of the copy does not change the original.

    surplus: number of ids that `cache` has beyond these. The copy shares arrays with the original until it is written
    to: MLX copies an array on its first write if another array shares its memory.
    """
    twins = [_copy_entry(entry) for entry in cache]
    if surplus:
        for entry in twins:
            entry.trim(surplus)
            _cut_arrays(entry, ids)
    return twins


def _copy_entry(entry: Any) -> Any:
    """Returns a copy of a cache entry that shares the entry's arrays. A `ZipState` is copied without hyper rows."""
    if isinstance(entry, ZipState):
        return entry.extract(0, rows=False)
    twin = copy.copy(entry)
    vars(twin).update({name: _share_arrays(value) for name, value in vars(entry).items()})
    return twin


def _share_arrays(value: Any) -> Any:
    """Copies a tree of values. Arrays in the copy share memory with the originals until they are written to."""
    if isinstance(value, tuple | list) and any(hasattr(item, "is_trimmable") for item in value):
        return type(value)(_copy_entry(item) for item in value)
    return tree_map(lambda leaf: copy.copy(leaf) if isinstance(leaf, mx.array) else leaf, value)


def _cut_arrays(entry: Any, ids: int) -> None:
    """Slices an entry's arrays to their first `ids` ids, so that a later copy leaves out all others."""
    if type(entry) in (KVCache, QuantizedKVCache) and entry.keys is not None:
        entry.keys, entry.values = tree_map(lambda array: array[..., :ids, :], (entry.keys, entry.values))


def _cache_bytes(cache: Sequence[Any]) -> int:
    state = find_zip_state(cache)
    logged = 0 if state is None else _BYTES_PER_LOGGED_ID * state.books[0].mark()
    return logged + sum(array.nbytes for _, array in _arrays_by_place(cache))


def _arrays_by_place(cache: Sequence[Any]) -> Iterator[tuple[str, mx.array]]:
    """Yields (path in the tree of states, array) for all entries but the `ZipState`."""
    for number, entry in enumerate(cache):
        if isinstance(entry, ZipState) or entry.empty():
            continue
        for place, leaf in tree_flatten(entry.state):
            if isinstance(leaf, mx.array):
                yield f"{number}.{place}", leaf


def _without_spare_room(entry: Any) -> Any:
    """Returns a copy of a cache entry whose keys and values end with the last id. A `ZipState` is returned itself."""
    if type(entry) not in (KVCache, QuantizedKVCache) or entry.keys is None:
        return entry if isinstance(entry, ZipState) else _copy_entry(entry)
    twin = _copy_entry(entry)
    _cut_arrays(twin, entry.offset)
    return twin


# ---- a cache as the tensors of a file, and back
#
# The tensors and their names are those of mlx-lm's `save_prompt_cache`, so mlx-lm can read the cache in a session file.
# Base ids, the ends of ids and the sampler's random state, for which mlx-lm has no place, are stored as if they were
# one more entry of the cache.

SAFETENSORS_TYPES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.float16: "F16",
    mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32", mx.uint64: "U64", mx.int64: "I64",
    mx.float64: "F64", mx.complex64: "C64",
}  # fmt: skip


def _states_as_arrays(states: list[Any]) -> tuple[dict[str, mx.array], list[Any]]:
    """Returns a cache's states as arrays by path in the tree, and (path, kind) of each value that was not an array."""
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


def view_on_host(array: mx.array) -> FileTensor:
    """Returns an evaluated array as a tensor for a file, which is a NumPy view of the array's memory."""
    dtype = SAFETENSORS_TYPES[array.dtype]
    view = np.array(array.view(mx.uint16) if dtype == "BF16" else array, copy=False)  # numpy has no bfloat16
    return FileTensor(dtype, view.shape, view)


def _classes_and_states(contents: FileContents) -> tuple[list[str], list[Any], list[Any]]:
    """Returns the classes of a cache's entries, the entries' states, and [base ids, ends, random state if any].

    Raises `BadFileError` or another error if the contents are not those of a cache.
    """
    tree: Any = tree_unflatten(list(contents.metadata.items()))
    _, classes, scalars = tree
    arrays: dict[str, Any] = {place: array_from_tensor(tensor) for place, tensor in contents.tensors.items()}
    for place, kind in scalars[1:]:
        arrays[place] = _value_of_array(arrays[place], kind)
    *states, extra = tree_unflatten(list(arrays.items()))
    return classes, states, extra


def array_from_tensor(tensor: FileTensor) -> mx.array:
    array = mx.array(np.ndarray(tensor.shape, NUMPY_TYPES[tensor.dtype], tensor.data))
    return array.view(mx.bfloat16) if tensor.dtype == "BF16" else array


def _value_of_array(array: mx.array, kind: str) -> Any:
    """Returns the value that an array encodes. Raises `BadFileError` unless `kind` is "scalar", "string" or "none"."""
    if kind == "scalar":
        return array.item()
    if kind == "string":
        return "".join(map(chr, array.tolist()))  # type: ignore[arg-type]
    if kind == "none":
        return None
    raise BadFileError(f"it has a value of the unknown kind {kind!r:.40}")


# ---- checks of entries from a file

_LENGTH_AXIS = 2  # of keys and values
_OTHER_SHAPE_MESSAGE = "the arrays of its cache are not those of this model"


def _checked_quantized_entry(entry: QuantizedKVCache, example: KVCache, ids: int) -> QuantizedKVCache:
    """Returns `entry`. Raises `BadFileError` unless it holds `ids` ids with the head width and dtype of `example`."""
    bits, group = entry.bits, entry.group_size
    if bits not in KV_BITS or group not in KV_GROUP_SIZES or type(entry.offset) is not int:
        raise BadFileError("its cache is quantized in an unknown way")
    for parts, one in ((entry.keys, example.keys), (entry.values, example.values)):
        assert one is not None
        batch, heads, _, width = one.shape
        wanted = [(width * bits // 32, mx.uint32), (width // group, one.dtype), (width // group, one.dtype)]
        if [(part.shape, part.dtype) for part in parts or ()] != [
            ((batch, heads, ids, n), dtype) for n, dtype in wanted
        ]:
            raise BadFileError(_OTHER_SHAPE_MESSAGE)
    return _checked_id_count(entry, ids)


def _checked_entry(entry: Any, example: Any, ids: int) -> Any:
    """Returns `entry`. Raises `BadFileError` unless it holds `ids` ids, in arrays otherwise like those of `example`."""
    found, wanted = dict(tree_flatten(entry.state)), dict(tree_flatten(example.state))
    if found.keys() != wanted.keys():
        raise BadFileError(_OTHER_SHAPE_MESSAGE)
    for place, leaf in found.items():
        other = wanted[place]
        if type(leaf) is not type(other):
            raise BadFileError(_OTHER_SHAPE_MESSAGE)
        if isinstance(leaf, mx.array) and (
            leaf.dtype != other.dtype or _shape_without_length(leaf) != _shape_without_length(other)
        ):
            raise BadFileError(_OTHER_SHAPE_MESSAGE)
    if type(entry) is KVCache and (entry.keys is None or entry.keys.shape[_LENGTH_AXIS] != ids):
        raise BadFileError(_OTHER_SHAPE_MESSAGE)
    if isinstance(entry, RotatingKVCache):
        _raise_unless_rotating_fits(entry, example, ids)
    return _checked_id_count(entry, ids)


def _raise_unless_rotating_fits(entry: RotatingKVCache, example: RotatingKVCache, ids: int) -> None:
    """Raises `BadFileError` if a rotating cache is too short for `ids` ids, or has another size than `example`."""
    length = entry.keys.shape[_LENGTH_AXIS]  # type: ignore[union-attr]
    same = (entry.keep, entry.max_size) == (example.keep, example.max_size)
    if not same or not 0 <= entry._idx <= length or length < min(ids, entry.max_size):
        raise BadFileError(_OTHER_SHAPE_MESSAGE)


def _shape_without_length(array: mx.array) -> list[int]:
    return [n for axis, n in enumerate(array.shape) if axis != _LENGTH_AXIS or array.ndim != 4]


def _checked_id_count(entry: Any, ids: int) -> Any:
    if getattr(entry, "offset", ids) != ids:
        raise BadFileError(f"a KV cache in it holds {entry.offset} ids, not {ids}")
    return entry
