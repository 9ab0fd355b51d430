"""Reads and writes the entries of a pack, in slot order. A file's suffix says which of three forms it has:

    .json   [[12, 7], [5, 5, 9], ...]: a list of lists of base ids
    .npz    arrays `entries` uint32 [P, M], each row padded after its length, and `lengths` int64 [P]
    .npy    the array `entries`; `lengths` is in a second file, NAME.lengths.npy

`mlx_zip.packs.pack` adds the tokenizer, facts and tuned rows that a .npz file may hold. `CodecParams` checks whether
entries fit a codec.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.arrays import read_npy, read_npz
from mlx_zip.errors import DataError
from mlx_zip.files import atomic_file, check_regular_file

Entry = tuple[int, ...]
SUFFIXES = (".json", ".npz", ".npy")
MAX_ID = (1 << 32) - 1
NAMES = ("entries", "lengths")  # arrays of the .npz form
_WHAT = "a pack"


def read_entries(path: str | Path) -> tuple[Entry, ...]:
    """Reads the entries of a pack, in slot order; no pickle is executed.

    Raises `DataError` naming the file if it cannot be read, or if an entry, which the message names, has fewer than two
    ids, holds an id that is not an integer from 0 to 2^32-1, or repeats an earlier entry.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: a pack is a {', '.join(SUFFIXES)} file")
    return checked_entries(path, _read_json_entries(path) if path.suffix == ".json" else _read_array_entries(path))


def write_entries(
    path: str | Path, entries: Iterable[Sequence[int]], merge_size: int, pad_id: int | None = None
) -> None:
    """Writes a pack in the form that the file's suffix says; a file that exists is replaced only by a complete one.

    merge_size: maximum length of an entry, and width of the arrays, which are padded with `pad_id` (None: 0). Raises
    `DataError` as `read_entries` does and if an entry is longer than `merge_size`, and `OSError`.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: a pack is a {', '.join(SUFFIXES)} file")
    checked = checked_entries(path, [tuple(entry) for entry in entries], merge_size)
    if path.suffix == ".json":
        with atomic_file(path) as partial:
            partial.write_text(json.dumps([list(entry) for entry in checked]) + "\n", encoding="utf-8")
        return
    rows, lengths = pad_entries(checked, merge_size, pad_id or 0)
    if path.suffix == ".npz":
        with atomic_file(path) as partial, open(partial, "wb") as file:
            np.savez(file, entries=rows, lengths=lengths)
        return
    for name, array in ((_lengths_file(path), lengths), (path, rows)):
        with atomic_file(name) as partial, open(partial, "wb") as file:
            np.save(file, array, allow_pickle=False)


def pad_entries(
    entries: Sequence[Sequence[int] | NDArray[np.uint32]], width: int, fill: int = 0
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Returns entries as arrays: uint32 [P, width], each row filled up with `fill`, and their lengths [P]."""
    rows = np.full((len(entries), width), fill, np.uint32)
    for row, entry in zip(rows, entries, strict=True):
        row[: len(entry)] = entry
    return rows, np.array([len(entry) for entry in entries], np.int64)


def _lengths_file(path: Path) -> Path:
    """Returns the path of the second file of a .npy pack, which holds the lengths of its entries."""
    return path.with_suffix(".lengths.npy")


def _read_json_entries(path: Path) -> list[tuple[Any, ...]]:
    """Reads the entries of a .json pack without checking their ids. Raises `DataError` naming the file."""
    try:
        check_regular_file(path)
        data = json.loads(path.read_text(encoding="utf-8"))
    except DataError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as {_WHAT}: {reason}") from error
    if not isinstance(data, list):
        raise DataError(f"{path} must hold a list of entries, got {type(data).__name__}")
    for at, entry in enumerate(data):
        if not isinstance(entry, list):
            raise DataError(f"{path}: entry {at} is {entry!r:.60}, not a list of base ids")
    return [tuple(entry) for entry in data]


def _read_array_entries(path: Path) -> list[tuple[int, ...]]:
    """Reads the entries of a .npz or .npy pack. Raises `DataError` naming the file."""
    if path.suffix == ".npy":
        return _unpad_entries(path, read_npy(path, _WHAT), read_npy(_lengths_file(path), f"the lengths of {path.name}"))
    arrays = read_npz(path, _WHAT, NAMES)
    if missing := set(NAMES) - arrays.keys():
        raise DataError(f"{path} has no array {' and no '.join(sorted(missing))}")
    return _unpad_entries(path, *(arrays[name] for name in NAMES))


def _unpad_entries(path: Path, entries: NDArray[Any], lengths: NDArray[Any]) -> list[tuple[int, ...]]:
    """Returns padded entries [P, M] and lengths [P] as tuples without padding. Errors as in `_check_entry_arrays`."""
    _check_entry_arrays(path, entries, lengths)
    return [tuple(row[:n]) for row, n in zip(entries.tolist(), lengths.tolist(), strict=True)]


def _check_entry_arrays(path: Path, entries: NDArray[Any], lengths: NDArray[Any]) -> None:
    """Raises `DataError` unless both are integers, entries [P, M] and lengths [P] with values 2..M."""
    if entries.dtype.kind not in "iu" or lengths.dtype.kind not in "iu":
        raise DataError(f"{path}: entries and lengths must be integers, not {entries.dtype} and {lengths.dtype}")
    if entries.ndim != 2 or lengths.shape != entries.shape[:1]:
        raise DataError(f"{path}: entries must be [P, M] and lengths [P], got {entries.shape} and {lengths.shape}")
    if len(bad := np.flatnonzero((lengths < 2) | (lengths > entries.shape[1]))):
        at = int(bad[0])
        raise DataError(f"{path}: entry {at} has length {lengths[at]}, not 2..{entries.shape[1]}")


def checked_entries(path: Path, entries: Iterable[Sequence[Any]], merge_size: int | None = None) -> tuple[Entry, ...]:
    """Returns entries as tuples of ints. merge_size: maximum length of an entry, None for any length.

    Raises `DataError` as `read_entries` does, naming `path` and the wrong entry.
    """
    checked: list[Entry] = []
    seen: dict[Entry, int] = {}  # entry -> its index
    for at, entry in enumerate(entries):
        for x in entry:
            if isinstance(x, bool) or not isinstance(x, int | np.integer) or not 0 <= x <= MAX_ID:
                raise DataError(f"{path}: entry {at} holds {x!r:.40}, which is not a base id")
        if len(entry) < 2 or (merge_size is not None and len(entry) > merge_size):
            raise DataError(f"{path}: entry {at} has {len(entry)} ids, not 2..{merge_size or 'merge_size'}")
        made = tuple(map(int, entry))
        if made in seen:
            raise DataError(f"{path}: entry {at} {made} repeats entry {seen[made]}")
        seen[made] = at
        checked.append(made)
    return tuple(checked)
