"""Loads the C library; converts ids from callers to arrays that the library reads, and compares arrays of ids.

`calls_for_one_id`, `words_of` and `ids_of` are functions of the library that are called without cffi, because cffi
would take longer than the functions' work. `native/python.c` says what they do. All but `ids_of` return None instead of
raising an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import CodecError

try:
    import mlx_zip.codec._native as native
except ModuleNotFoundError as error:
    if error.name != "mlx_zip.codec._native":
        raise
    sources = Path(__file__).parents[2]
    raise ImportError(
        f"{sources} has the sources of mlx_zip without its C extension: run `pip install -e .` there, "
        "or start Python in another folder"
    ) from error

if not hasattr(native.lib, "mlxzip_add_calls"):
    raise ImportError("mlx_zip's C extension is older than its Python code: run `pip install --no-deps -e .` again")
if native.lib.mlxzip_add_calls() != native.lib.MLXZIP_OK:
    raise MemoryError("the codec's functions could not be made: out of memory")

calls_for_one_id, words_of, ids_of = native.calls_for_one_id, native.words_of, native.ids_of

Uint32s = NDArray[np.uint32]


def as_ids(ids: Any) -> Uint32s:
    """Converts one id, a list, tuple or range of ids, or a 1-D integer array -> contiguous uint32 [n].

    A contiguous uint32 array is returned as it is. Raises `TypeError` for floats, bools and other non-integers,
    `CodecError` for more than one dimension and for ids outside 0..2^32-1.
    """
    if type(ids) is np.ndarray and ids.dtype == np.uint32 and ids.ndim == 1 and ids.flags.c_contiguous:
        return ids
    if isinstance(ids, list | tuple | range):
        if (ids := _array_from_sequence(ids)).dtype == np.uint32:
            return ids
    elif type(ids) is int:
        ids = _array_from_sequence([ids])
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, not {array.dtype}")
    if array.ndim > 1:
        raise CodecError(f"ids must be one sequence, not an array of shape {array.shape}")
    array = array.reshape(-1)
    if array.dtype == np.uint32:
        return np.ascontiguousarray(array)
    if array.size and (array.min() < 0 or array.max() >> 32):
        index = int(np.flatnonzero((array < 0) | (array > 0xFFFFFFFF))[0])
        raise CodecError(f"id {array[index]} at index {index} is outside 0..2^32-1")
    return array.astype(np.uint32)


def as_one_id(ids: Any) -> int | None:
    """Returns a numpy scalar, or the only id of a list or an array, as an int; None for anything else."""
    if isinstance(ids, np.integer):
        return int(ids)
    if type(ids) is list:
        return ids[0] if len(ids) == 1 and type(ids[0]) is int else None
    if type(ids) is np.ndarray and ids.size == 1 and ids.ndim <= 1 and ids.dtype.kind in "iu":
        return ids.item()
    return None


def common_prefix_length(some: NDArray[Any], others: NDArray[Any]) -> int:
    """Returns the length of the longest common prefix of two arrays of ids."""
    n = min(len(some), len(others))
    differ = some[:n] != others[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n


def _array_from_sequence(ids: list[Any] | tuple[Any, ...] | range) -> NDArray[Any]:
    """Converts a list, tuple or range of integers -> uint32 [n], or int64 [n] that may be out of range.

    Raises `TypeError` and `CodecError` as `as_ids` does.
    """
    if not isinstance(ids, range):
        if (words := words_of(list(ids) if isinstance(ids, tuple) else ids)) is not None:
            return np.frombuffer(words, np.uint32)
        for kind in set(map(type, ids)):
            if kind is bool or not issubclass(kind, int | np.integer):
                raise TypeError(f"ids must be integers, not {kind.__name__}")
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        index, culprit = next((i, x) for i, x in enumerate(ids) if not 0 <= x < 1 << 32)
        raise CodecError(f"id {culprit} at index {index} is outside 0..2^32-1") from None
