"""MLX's caches as the tensors of a file, and back.

The tensors and their names are those of mlx-lm's `save_prompt_cache`, so mlx-lm reads the cache of such a file. What
mlx-lm has no place for follows as if it were one more entry of the cache: base ids, the ends of ids, and the sampler's
random state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_zip.engine.caches import Parts
from mlx_zip.engine.session_caches import used_part
from mlx_zip.engine.sessions.format import BadFileError, Contents, Tensor
from mlx_zip.engine.sessions.kept import Kept

NAMES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.float16: "F16",
    mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32", mx.uint64: "U64", mx.int64: "I64",
    mx.float64: "F64", mx.complex64: "C64",
}  # fmt: skip
NUMPY = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "F16": np.float16,
    "BF16": np.uint16, "U32": np.uint32, "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64,
    "F64": np.float64, "C64": np.complex64,
}  # fmt: skip


def parts_of(kept: Kept) -> Parts:
    """Returns a session as a file holds it. Its views share the memory of the session's arrays, which MLX copies before
    it writes to them.
    """
    assert kept.cache is not None
    arrays, scalars = _as_arrays([used_part(entry).state for entry in kept.cache])
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


def read_parts(contents: Contents) -> tuple[list[str], list[Any], list[Any]]:
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
    flat = np.frombuffer(tensor.data, NUMPY[tensor.dtype]) if len(tensor.data) else np.zeros(0, NUMPY[tensor.dtype])
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
