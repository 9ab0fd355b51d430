"""Manages the folder in which data are prepared: the settings, and which shards are finished.

During preparation the folder holds the settings (`prepare.json`) and a record of each finished shard. At the end the
index replaces both. A shard's record is written after the shard's arrays, so a shard with a record is always complete.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.files import read_json_object, remove_unfinished_files, try_lock_folder, write_json
from mlx_zip.training.prepare.shards import (
    INDEX_FILE,
    PreparedShards,
    read_array,
    read_shard_arrays,
    shard_array_path,
    write_index,
    write_shard_arrays,
)

SETTINGS_FILE, POOL_FILE = "prepare.json", "pool.npy"
_POOL_FILES = {POOL_FILE, "pool.lengths.npy"}
_COUNT_KEYS = ("name", "samples", "ids", "base_ids", "bytes", "source")
_RECORD_KEYS = {*_COUNT_KEYS, "records", "windowed", "skipped", "notes"}
_INDEX_KEYS = {"shards", "totals", "skipped", "records", "windowed", "sources"}


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
