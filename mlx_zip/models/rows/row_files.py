"""Files of stored hyper rows: a memory-mapped index, then records; several processes may read and append.

A folder holds files `<digest>-<number>.rows`; `native/rows.h` describes their format. A file belongs to one set of rows
(one side of one model) and has room for a fixed number of records. When a file is full, the next one is begun. When the
folder exceeds its maximum size, its oldest files are deleted. A record carries a checksum and is written before the
index cell that points to it, so after a kill or a power cut at any point a torn record is not found. Writers lock the
folder; readers need no lock.

Nothing is written through a memory map, and no file in use is truncated, so a full disk raises `OSError` instead of a
signal. Full files never change. If a row is found in the oldest file of a set, it is written again to the newest.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec._native import ffi, lib

FILES_PER_SET = 4  # a file takes a quarter of the folder's maximum size at most, so that deleting one loses little
LEAST_RECORDS = 64  # a file with room for fewer records is not made
_MAGIC = b"mlxzrow1"
_HEADER = struct.Struct("<8s32sIIII")  # magic, digest, ids per key, bytes per row, cells, records; a CRC-32 follows
_FILE_NAME = re.compile(r"([0-9a-f]{32})-(\d{6,})\.rows")
_MOST_RECORDS = 1 << 30
_MAP_FLAGS = mmap.MAP_SHARED | getattr(
    mmap, "MAP_POPULATE", 0
)  # where the flag exists, first lookups cause no page faults


class DamagedFileError(Exception):
    """A file of rows whose header or cells are damaged."""


class ForeignFileError(Exception):
    """A file of rows whose header names another set than its file name."""


@dataclass(frozen=True)
class RowSet:
    """Names the rows of one side of one model, and says how a row is stored.

    digest: 32 bytes that stand for the model and the side. key_words: base ids in an entry's key. row_bytes: bytes of a
    row. dtype: MLX's type of a row's values. durable: whether rows may be kept on disk.
    """

    digest: bytes
    key_words: int
    row_bytes: int
    dtype: Any
    durable: bool = True

    @property
    def name(self) -> str:
        """The prefix of the names of the set's files."""
        return self.digest[:16].hex()


class RowFile:
    """One file of a set, open and memory-mapped. Raises `OSError`, `DamagedFileError` or `ForeignFileError`.

    cells: number of index cells. capacity: number of records that may be written. stride: bytes per record. The map is
    made once per open file, because on a Mac each map that Python makes flushes the disk's cache.
    """

    handle = -1

    def __init__(self, path: Path, rows: RowSet) -> None:
        self.path, self.rows = path, rows
        self.handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.cells, self.capacity = _read_header(self.handle, rows)
            self.shape = _c_shape(rows, self.cells)
            self.stride = lib.mlxzip_rows_stride(self.shape)
            self._raise_if_too_short()
            try:
                self._map = mmap.mmap(self.handle, self.records_at, flags=_MAP_FLAGS, prot=mmap.PROT_READ)
            except ValueError as error:  # the file was truncated since `_raise_if_too_short`
                raise DamagedFileError(str(error)) from error
            self._cells = ffi.from_buffer("uint8_t[]", self._map)
            self._scratch = ffi.new("uint8_t[]", self.stride)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; the memory map is freed with the object."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    __del__ = close

    @property
    def records_at(self) -> int:
        """The offset in the file, in bytes, at which records begin."""
        return lib.MLXZIP_ROWS_HEADER + 8 * self.cells

    @property
    def is_linked(self) -> bool:
        """Whether the file has not been deleted."""
        return os.fstat(self.handle).st_nlink > 0

    def _raise_if_too_short(self) -> None:
        """Raises `DamagedFileError` if the file is too short for its index: reading the map would end in SIGBUS."""
        if os.fstat(self.handle).st_size < self.records_at:
            raise DamagedFileError(self.path)

    def find_rows(self, keys: NDArray[np.uint32], found: NDArray[np.bool_], rows: NDArray[np.uint8]) -> int:
        """Looks up the keys [N, words] for which `found` [N] is false, and returns how many records were damaged.

        For each key that is found, sets `found` to true and writes the row to `rows` [N, bytes]. Raises
        `DamagedFileError` if the file is too short for its index.
        """
        self._raise_if_too_short()
        return lib.mlxzip_rows_find(
            self.shape,
            self._cells,
            self.handle,
            _c_words(keys),
            len(keys),
            _c_bytes(found),
            _c_bytes(rows),
            self._scratch,
        )

    def count_free_records(self) -> int:
        """Returns how many more records fit."""
        return max(0, self.capacity - self._count_records())

    def _count_records(self) -> int:
        """Returns how many records there are, a torn last one included."""
        return -(-(os.fstat(self.handle).st_size - self.records_at) // self.stride)

    def append(self, keys: NDArray[np.uint32], rows: NDArray[np.uint8]) -> int:
        """Writes new rows; returns the number of them that can be found, because the index had room for them.

        keys [N, words], rows [N, bytes]. The folder must be locked. Raises `OSError`.
        """
        data = np.empty(len(keys) * self.stride, np.uint8)
        lib.mlxzip_rows_seal(self.shape, _c_words(keys), _c_bytes(rows), len(keys), _c_bytes(data))
        self._raise_if_too_short()
        first, value, placed = self._count_records(), ffi.new("uint64_t *"), 0
        if first + len(keys) >= 1 << 32:
            return 0
        handle = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _write_all(handle, data.data, self.records_at + first * self.stride)
            for i in range(len(keys)):
                key = _c_words(keys[i : i + 1])
                at = lib.mlxzip_rows_cell(self.shape, self._cells, key, first + i, value)
                if at < self.cells:
                    _write_all(handle, memoryview(value[0].to_bytes(8, "little")), lib.MLXZIP_ROWS_HEADER + 8 * at)
                    placed += 1
        finally:
            os.close(handle)
        return placed


def create_row_file(folder: Path, rows: RowSet, number: int, folder_bytes: int) -> RowFile | None:
    """Makes and returns a new empty file of a set; returns None if the rows are too large for the folder's limit.

    number: the number in the file's name. folder_bytes: the folder's maximum size. The folder must be locked. The file
    gets its name only when it is complete. Raises `OSError`.
    """
    stride = lib.mlxzip_rows_stride(_c_shape(rows, 1))
    capacity = min((folder_bytes // FILES_PER_SET - lib.MLXZIP_ROWS_HEADER) // (stride + 32), _MOST_RECORDS)
    if capacity < LEAST_RECORDS:
        return None
    cells = 1 << (2 * capacity - 1).bit_length()  # at most half full, so at most 32 bytes of cells per record
    packed = _HEADER.pack(_MAGIC, rows.digest, rows.key_words, rows.row_bytes, cells, capacity)
    header = packed + zlib.crc32(packed).to_bytes(4, "little")
    path = folder / f"{rows.name}-{number:06d}.rows"
    partial = folder / f".{path.name}.partial"
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _write_all(handle, memoryview(header), 0)
        os.ftruncate(handle, lib.MLXZIP_ROWS_HEADER + 8 * cells)
        os.rename(partial, path)
    finally:
        os.close(handle)
        partial.unlink(missing_ok=True)
    return RowFile(path, rows)


def list_row_files(folder: Path) -> list[Path]:
    """Returns the files of rows in a folder, sorted by set and number. Raises `OSError`."""
    return sorted(path for path in folder.iterdir() if _FILE_NAME.fullmatch(path.name))


def list_partial_files(folder: Path) -> list[Path]:
    """Returns the partial files that killed processes have left in a folder."""
    return [path for path in folder.iterdir() if path.name.startswith(".") and _FILE_NAME.match(path.name[1:])]


def file_number(path: Path) -> int:
    """Returns the number in a file's name."""
    match = _FILE_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[2])


def sum_file_sizes(paths: Iterable[Path]) -> int:
    """Returns the sum of the sizes of the files that still exist; unused index cells count."""
    return sum(status.st_size for status in map(status_if_exists, paths) if status is not None)


def sum_disk_usage(paths: Iterable[Path]) -> int:
    """Returns the bytes that the files take up on disk; unused index cells take none."""
    found = [status for status in map(status_if_exists, paths) if status is not None]
    return sum(min(status.st_size, 512 * status.st_blocks) for status in found)


def status_if_exists(path: Path) -> os.stat_result | None:
    """Returns the file's status, or None if the file does not exist any more."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _read_header(handle: int, rows: RowSet) -> tuple[int, int]:
    """Returns (number of index cells, maximum number of records) from the header of a file.

    Raises `DamagedFileError`, or `ForeignFileError` if the file belongs to another set.
    """
    data = os.pread(handle, _HEADER.size + 4, 0)
    packed, crc = data[: _HEADER.size], data[_HEADER.size :]
    if len(data) < _HEADER.size + 4 or zlib.crc32(packed) != int.from_bytes(crc, "little"):
        raise DamagedFileError
    magic, digest, key_words, row_bytes, cells, capacity = _HEADER.unpack(packed)
    if magic != _MAGIC or (digest, key_words, row_bytes) != (rows.digest, rows.key_words, rows.row_bytes):
        raise ForeignFileError
    if cells < 1 or cells & (cells - 1):
        raise DamagedFileError
    return cells, capacity


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(handle, data, at)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, at = data[written:], at + written


def _c_shape(rows: RowSet, cells: int) -> Any:
    return ffi.new("mlxzip_rows_shape *", [rows.key_words, rows.row_bytes, cells])


def _c_words(array: NDArray[np.uint32]) -> Any:
    return ffi.from_buffer("uint32_t[]", array)


def _c_bytes(array: NDArray[Any]) -> Any:
    return ffi.from_buffer("uint8_t[]", array)
