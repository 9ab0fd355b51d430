"""Reads and writes folders of prepared samples: memory-mapped arrays, one codebook per sample.

A finished folder holds `index.json` and, for each shard, these .npy files with the concatenated samples:

    NAME.ids.npy    uint32 [ids]         compressed ids
    NAME.mask.npy   bool   [ids]         whether the loss counts the id
    NAME.ends.npy   int64  [samples]     end of each sample in ids and mask (exclusive index)
    NAME.base.npy   int64  [samples]     number of base ids of each sample
    NAME.bytes.npy  int64  [samples]     number of UTF-8 bytes of each sample's text
    NAME.start.npy  int32  [samples, K]  rows of the pool that form the sample's starting codebook (only with a pool)

Codebooks are not stored, because they follow from the ids. Every file is written atomically, and the index last.

During preparation the folder holds the settings (`prepare.json`) and a record of each finished shard, which the index
replaces. A shard's record is written after the shard's arrays, so a shard with a record is always complete.
"""

from __future__ import annotations

import json
import shutil
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import CodecError, DataError, errors_as
from mlx_zip.files import atomic_file, read_json_object, remove_unfinished_files, try_lock_folder, write_json
from mlx_zip.packs.entries import Entry

VERSION = 1
INDEX_FILE = "index.json"
SETTINGS_FILE, POOL_FILE = "prepare.json", "pool.npy"
_POOL_FILES = {POOL_FILE, "pool.lengths.npy"}
_COUNT_KEYS = ("name", "samples", "ids", "base_ids", "bytes", "source")
_RECORD_KEYS = {*_COUNT_KEYS, "records", "windowed", "skipped", "notes"}
_INDEX_KEYS = {"shards", "totals", "skipped", "records", "windowed", "sources"}
_PREPARE_AGAIN = "delete the folder and prepare the data again"
ARRAY_TYPES = {"ids": np.uint32, "mask": np.bool_, "ends": np.int64, "base": np.int64, "bytes": np.int64}


@dataclass(frozen=True)
class Sample:
    """One training sample: a window of base ids, or the window's compressed ids.

    ids uint32 [n]: the ids. mask bool [n]: whether the loss counts an id. base_ids, n_bytes: number of base ids
    and UTF-8 bytes of the sample. start: entries that the sample's codebook begins with, in slot order; None: the
    codec's own. plain: whether the sample is read without hypertokens, with an empty codebook.
    """

    ids: Uint32s
    mask: NDArray[np.bool_]
    base_ids: int
    n_bytes: int
    start: tuple[Entry, ...] | None = None
    plain: bool = False

    def params(self, params: CodecParams) -> CodecParams:
        """Returns `params` with this sample's starting codebook. Raises `CodecError` if the two do not fit together."""
        if self.plain:
            return replace(params, codebook_size=0, start=None)
        return params if self.start is None else replace(params, start=self.start)


def can_have_entries(params: CodecParams) -> bool:
    """Returns whether codebooks of a codec can have entries: codebook size above 0 and merge size above 1."""
    return params.codebook_size > 0 and params.merge_size > 1


def write_shard(
    folder: Path, name: str, samples: Sequence[Sample], starts: NDArray[np.int32] | None = None
) -> dict[str, Any]:
    """Writes the files of one shard and returns the record for the index. Raises `OSError` if writing fails.

    starts [samples, K]: pool rows that the samples' codebooks begin with, None without a pool.
    """
    counts = np.array([(len(one.ids), one.base_ids, one.n_bytes) for one in samples], np.int64).reshape(-1, 3)
    arrays: dict[str, Any] = {
        "ids": np.concatenate([*(one.ids for one in samples), np.empty(0, np.uint32)]),
        "mask": np.concatenate([*(one.mask for one in samples), np.empty(0, np.bool_)]),
        "ends": np.cumsum(counts[:, 0]),
        "base": counts[:, 1].copy(),
        "bytes": counts[:, 2].copy(),
    }
    return write_shard_arrays(folder, name, arrays if starts is None else {**arrays, "start": starts})


def write_shard_arrays(folder: Path, name: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Writes the arrays of one shard, by part; returns and raises what `write_shard` does."""
    for part, array in arrays.items():
        with atomic_file(shard_array_path(folder, name, part)) as partial, open(partial, "wb") as file:
            np.save(file, array, allow_pickle=False)
    sums = {"base_ids": int(arrays["base"].sum()), "bytes": int(arrays["bytes"].sum())}
    return {"name": name, "samples": len(arrays["ends"]), "ids": len(arrays["ids"]), **sums}


def read_shard_arrays(folder: Path, name: str, samples: int, with_pool: bool) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a shard of `samples` samples, memory-mapped, by part.

    with_pool: whether samples begin with entries of a pool, so that there is a part `start`. Raises `DataError` if an
    array cannot be read, or if the arrays do not fit together.
    """
    arrays = {part: read_array(shard_array_path(folder, name, part), dtype) for part, dtype in ARRAY_TYPES.items()}
    if with_pool:
        arrays["start"] = read_array(shard_array_path(folder, name, "start"), np.int32, ndim=2)
    ends = arrays["ends"]
    total = int(ends[-1]) if len(ends) else 0
    lengths = {"ids": total, "mask": total}
    fits = all(len(array) == lengths.get(part, samples) for part, array in arrays.items())
    if not fits or np.any(np.diff(ends, prepend=0) < 0):
        raise DataError(f"{folder / name}: the arrays of this shard do not fit together; {_PREPARE_AGAIN}")
    return arrays


def shard_array_path(folder: Path, name: str, part: str) -> Path:
    """Returns the path of one array of a shard. part: a key of `ARRAY_TYPES`, or "start"."""
    return folder / f"{name}.{part}.npy"


def make_codec_record(params: CodecParams) -> dict[str, Any]:
    """Returns the codec's parameters for the index, without the starting codebook and the policy."""
    record = asdict(replace(params, start=None))
    del record["start"], record["policy"]
    return {**record, "disabled_ids": list(params.disabled_ids)}


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Writes `index.json`, which makes the folder readable for `PreparedShards`."""
    write_json(Path(folder) / INDEX_FILE, {"version": VERSION, **index})


class PreparedShards:
    """The samples of a prepared folder, memory-mapped: `len(shards)`, `shards[i] -> Sample`.

    index: the content of index.json. params: the codec. context: maximum base ids per sample. lengths, base_ids: number
    of ids and of base ids in every sample. starts: number of pool entries in every sample's starting codebook. These
    arrays are int64 [len(self)]. Raises `DataError` if the folder is not prepared data, is unfinished, or holds files
    that do not fit together.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        file, again = self.folder / INDEX_FILE, f"; {_PREPARE_AGAIN}"
        if not file.exists():
            raise DataError(f"{folder} is not prepared data, or unfinished: `mlx_zip prepare` makes it")
        self.index = read_json_object(file, again)
        if self.index.get("version") != VERSION:
            raise DataError(f"{file} is not version {VERSION} of prepared data{again}")
        with errors_as(DataError, str(file), KeyError, TypeError, ValueError, CodecError, end=again):
            params = CodecParams(**self.index["codec"])
            # one canonical form for all codecs without a codebook, so that they compare equal
            self.params = params if can_have_entries(params) else replace(params, codebook_size=0, merge_size=1)
            self.context = _check_index_count("context", self.index["context"], least=1)
            records = [
                (str(record["name"]), _check_index_count("samples", record["samples"]))
                for record in self.index["shards"]
            ]
        made_with = self.index.get("tokenizer")
        if made_with is not None and not isinstance(made_with, dict):
            raise DataError(f"{file}: tokenizer is {made_with!r:.40}{again}")
        pool = self.index.get("pool")
        self._pool = None if pool is None else _read_pool_arrays(self.folder, str(pool), self.params.merge_size)
        self._shards = [read_shard_arrays(self.folder, *record, self._pool is not None) for record in records]
        self._ends = list(accumulate(samples for _, samples in records))
        none = np.empty(0, np.int64)
        self.lengths = np.concatenate([none, *(np.diff(shard["ends"], prepend=0) for shard in self._shards)])
        self.base_ids = np.concatenate([none, *(shard["base"] for shard in self._shards)])
        width = self._shards[0]["start"].shape[1] if self._shards and self._pool is not None else 0
        self.starts = np.full(len(self), width, np.int64)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(i)
        number = bisect_right(self._ends, i)
        shard = self._shards[number]
        j = i - (self._ends[number - 1] if number else 0)
        begin, end = (int(shard["ends"][j - 1]) if j else 0), int(shard["ends"][j])
        start = None
        if self._pool is not None:
            rows = shard["start"][j]
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(self._pool):
                raise DataError(
                    f"{self.folder}: sample {i} starts with an entry that is not in the pool; {_PREPARE_AGAIN}"
                )
            start = tuple(self._pool[row] for row in rows.tolist())
        ids, mask = np.array(shard["ids"][begin:end]), np.array(shard["mask"][begin:end])
        return Sample(ids, mask, int(shard["base"][j]), int(shard["bytes"][j]), start)


def is_prepared_folder(folder: Path) -> bool:
    """Returns whether `folder` contains an index of prepared data. The data themselves may be damaged."""
    path = folder / INDEX_FILE
    if not path.is_file():
        return False
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(index, dict) and bool(index.keys() & {"shards", "codec", "totals"})


def _check_index_count(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, not a whole number of {least} or more")
    return value


def read_array(path: Path, dtype: Any, ndim: int = 1) -> NDArray[Any]:
    """Returns the array of a .npy file, memory-mapped. Raises `DataError` if it is damaged or of another type."""
    faults = (OSError, ValueError, EOFError, tokenize.TokenError)  # the last: a damaged header
    with errors_as(DataError, f"{path} cannot be read", *faults, end=f"; {_PREPARE_AGAIN}"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype != dtype:
        found = f"{array.ndim} dimensions of {array.dtype}" if isinstance(array, np.ndarray) else "an archive"
        raise DataError(f"{path} holds {found}, not {ndim} of {np.dtype(dtype)}; {_PREPARE_AGAIN}")
    return array


def _read_pool_arrays(folder: Path, name: str, width: int) -> list[tuple[int, ...]]:
    rows = read_array(folder / name, np.uint32, ndim=2)
    lengths = read_array((folder / name).with_suffix(".lengths.npy"), np.int64)
    if rows.shape != (len(lengths), width) or np.any((lengths < 2) | (lengths > width)):
        raise DataError(f"{folder / name}: the pool of start entries is damaged; {_PREPARE_AGAIN}")
    return [tuple(row[:n]) for row, n in zip(rows.tolist(), lengths.tolist(), strict=True)]


# ---- a folder that is being prepared


class PreparedFolder:
    """A folder to prepare data in. Call its methods within a `with` block of `open`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._made = folder, not folder.exists()

    @contextmanager
    def open(self, settings: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Context manager: makes or continues the folder, and locks other processes out until the block ends.

        Yields the index if the data are finished, else None. If the folder holds unfinished data of other settings
        without a finished shard, these data are removed, so that a failed run does not block the next run; a line on
        stderr says so.

        Raises `DataError` if the folder holds other files, holds shards of other settings, is in use by another process
        or holds damaged data, and `OSError` if it cannot be written.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise DataError(f"{self.folder} is a file, not a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        with try_lock_folder(self.folder) as alone:
            if not alone:
                raise DataError(
                    f"another process prepares data in {self.folder}; wait for it, or choose another (--out)"
                )
            yield self._begin_or_continue(json.loads(json.dumps(settings)))

    def _begin_or_continue(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the index if the data are finished, else None; see `open`."""
        remove_unfinished_files(self.folder)
        index = self._read_json(self.folder / INDEX_FILE)
        begun = self._read_json(self.folder / SETTINGS_FILE) if index is None else index.get("settings")
        if begun is None:
            if any(self.folder.iterdir()) or index is not None:
                raise DataError(f"{self.folder} holds other files; choose another folder for the prepared data (--out)")
            write_json(self.folder / SETTINGS_FILE, settings)
            return None
        if (difference := _describe_settings_difference(begun, settings)) and index is not None:
            raise DataError(f"{self.folder} holds data prepared with {difference}: choose another folder (--out)")
        if difference and any(self.folder.glob("shard-*.json")):
            raise DataError(
                f"{self.folder} holds unfinished data prepared with {difference}: give the same settings to go on with "
                "it, or choose another folder (--out)"
            )
        if difference:
            print(f"{self.folder}: removed unfinished data of other settings ({difference})", file=sys.stderr)
            self._remove_unnamed_files({"shards": []})
            write_json(self.folder / SETTINGS_FILE, settings)
            return None
        if index is not None:
            if not index.keys() >= _INDEX_KEYS:
                raise DataError(f"{self.folder / INDEX_FILE} is damaged; delete the folder and prepare again")
            PreparedShards(self.folder)
            self._remove_unnamed_files(index)
        return index

    def _read_json(self, path: Path) -> dict[str, Any] | None:
        return read_json_object(path, "; delete the folder and prepare again") if path.exists() else None

    def record(self, name: str) -> dict[str, Any] | None:
        """Returns a shard's record, None if the shard is not finished. Raises `DataError` if the record is damaged."""
        path = self.folder / f"{name}.json"
        found = self._read_json(path)
        if found is not None and not (found.keys() >= _RECORD_KEYS and found["name"] == name):
            raise DataError(f"{path} is damaged; delete the folder and prepare again")
        return found

    def base_ids(self, record: Mapping[str, Any]) -> NDArray[np.int64]:
        """Returns the number of base ids of each sample of a finished shard. record: the shard's record."""
        if not record["samples"]:
            return np.empty(0, np.int64)
        file = shard_array_path(self.folder, record["name"], "base")
        found = np.array(read_array(file, np.int64))  # a memory map would keep the file open
        if len(found) != record["samples"]:
            raise DataError(f"{file} is not what its record says; delete the folder and prepare again")
        return found

    def keep_first_samples(self, record: Mapping[str, Any], samples: int, with_pool: bool) -> dict[str, Any]:
        """Returns the record of a shard with the first `samples` samples of a finished shard. record: that shard's.

        If these are not all samples of the shard, writes a new shard. with_pool: whether samples begin with entries of
        a pool.
        """
        if samples == record["samples"]:
            return {key: record[key] for key in _COUNT_KEYS}
        name = record["name"]
        arrays = read_shard_arrays(self.folder, name, record["samples"], with_pool)
        ids = int(arrays["ends"][samples - 1])
        kept = {part: array[: ids if part in ("ids", "mask") else samples] for part, array in arrays.items()}
        return write_shard_arrays(self.folder, f"{name}-{samples}", kept) | {"source": record["source"]}

    def close(self, index: dict[str, Any]) -> dict[str, Any]:
        """Writes the index, removes files that the index does not name, and returns the index as read from disk."""
        write_index(self.folder, index)
        index = self._read_json(self.folder / INDEX_FILE) or {}
        self._remove_unnamed_files(index)
        return index

    def discard_without_samples(self) -> None:
        """Removes all written files, unless there is a finished shard with samples, which a later run can use."""
        names = (path.stem for path in self.folder.glob("shard-*.json"))
        if self.folder.exists() and not any((self.record(name) or {}).get("samples") for name in names):
            self.discard()

    def discard(self) -> None:
        """Removes all written files, and also the folder if `open` made the folder."""
        self._remove_unnamed_files({"shards": []})
        if self._made:
            shutil.rmtree(self.folder)

    def _remove_unnamed_files(self, index: Mapping[str, Any]) -> None:
        """Removes all files that `prepare` wrote and the index does not name. Other files stay."""
        named = {record["name"] for record in index["shards"]}
        pool = _POOL_FILES if index.get("pool") else set()
        for path in self.folder.iterdir():
            ours = path.name.startswith("shard-") or path.name in {SETTINGS_FILE, *_POOL_FILES}
            if ours and path.name not in pool and (path.suffix == ".json" or path.name.split(".")[0] not in named):
                path.unlink()


def _describe_settings_difference(begun: Any, settings: Mapping[str, Any]) -> str:
    old, new = dict(_flatten_settings(begun)), dict(_flatten_settings(settings))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            was, now = (f"{side.get(key)!r:.80}" for side in (old, new))
            return f"{key} {was}, which is now {now}"
    return ""


def _flatten_settings(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if pairs is None:
        yield key or "settings", value
        return
    for name, part in pairs:
        yield from _flatten_settings(part, f"{key}.{name}" if key else str(name))
