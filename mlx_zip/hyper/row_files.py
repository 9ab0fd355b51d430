"""Files of stored hyper rows: an index that is mapped, records behind it, appended to and shared by processes.

A folder holds `<digest>-<number>.rows`; `native/rows.h` says what is in one. A file belongs to one set of rows (one
side of one model) and is filled up to a fixed number of records; then the next is begun, and the oldest of the folder
go when its bytes exceed the bound. A record is written before the cell that names it and carries a checksum: a process
may be killed, and a machine lose power, at any point: what is torn is not found. Writers take turns by a lock on the
folder, which readers do not need.
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

FILES_PER_SET = 4  # of the folder's bytes one file takes a quarter at most, so that little is lost when one goes
LEAST_RECORDS = 64
_MAGIC = b"mlxzrow1"
_HEADER = struct.Struct("<8s32sIIII")  # magic, digest, ids per key, bytes per row, cells, records; then a CRC-32
_NAME = re.compile(r"([0-9a-f]{32})-(\d{6,})\.rows")
_MOST_RECORDS = 1 << 30
_MAP = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # where there is that flag: no faults at first lookups


class DamagedFileError(Exception):
    """A file of rows whose header or cells are not whole."""


class ForeignFileError(Exception):
    """A file of rows that bears another set's name."""


@dataclass(frozen=True)
class RowSet:
    """Rows that may stand for each other: of one side of one model. digest: 32 bytes; keys of `key_words` base ids."""

    digest: bytes
    key_words: int
    row_bytes: int

    @property
    def name(self) -> str:
        """How its files' names begin."""
        return self.digest[:16].hex()


class RowFile:
    """One file of a set, open and mapped. Raises `OSError`, `DamagedFileError` or `ForeignFileError`."""

    handle = -1

    def __init__(self, path: Path, rows: RowSet) -> None:
        self.path, self.rows = path, rows
        self.handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.cells, self.capacity = _read_header(self.handle, rows)
            self.shape = _shape(rows, self.cells)
            self.stride = lib.mlxzip_rows_stride(self.shape)
            self._check()
            try:
                self._map = mmap.mmap(self.handle, self.records_at, flags=_MAP, prot=mmap.PROT_READ)
            except ValueError as error:  # it was cut a moment ago
                raise DamagedFileError(str(error)) from error
            self._cells = ffi.from_buffer("uint8_t[]", self._map)
            self._scratch = ffi.new("uint8_t[]", self.stride)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the file; the map goes with the object."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    __del__ = close

    @property
    def records_at(self) -> int:
        """Where records begin."""
        return lib.MLXZIP_ROWS_HEADER + 8 * self.cells

    @property
    def is_linked(self) -> bool:
        """Whether the file still has its name."""
        return os.fstat(self.handle).st_nlink > 0

    def _check(self) -> None:
        """Asked before each use of the map: reading it where the file has been cut off would be a signal."""
        if os.fstat(self.handle).st_size < self.records_at:
            raise DamagedFileError(self.path)

    def find(self, keys: NDArray[np.uint32], found: NDArray[np.bool_], rows: NDArray[np.uint8]) -> int:
        """Fills `rows` [N, bytes] and `found` [N] for those keys [N, words] not yet found; returns damaged records.

        Raises `DamagedFileError` when the file was cut so short that its cells are gone.
        """
        self._check()
        return lib.mlxzip_rows_find(
            self.shape, self._cells, self.handle, _words(keys), len(keys), _bytes(found), _bytes(rows), self._scratch
        )

    def room(self) -> int:
        """Records that still fit."""
        return max(0, self.capacity - self._count())

    def _count(self) -> int:
        """Records there are, a torn last one included."""
        return -(-(os.fstat(self.handle).st_size - self.records_at) // self.stride)

    def append(self, keys: NDArray[np.uint32], rows: NDArray[np.uint8]) -> int:
        """Writes new rows, the folder being locked; returns how many found a cell. Raises `OSError`."""
        data = np.empty(len(keys) * self.stride, np.uint8)
        lib.mlxzip_rows_seal(self.shape, _words(keys), _bytes(rows), len(keys), _bytes(data))
        self._check()
        first, value, placed = self._count(), ffi.new("uint64_t *"), 0
        if first + len(keys) >= 1 << 32:
            return 0
        handle = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _write(handle, data.data, self.records_at + first * self.stride)
            for i in range(len(keys)):
                key = _words(keys[i : i + 1])
                at = lib.mlxzip_rows_cell(self.shape, self._cells, key, first + i, value)
                if at < self.cells:
                    _write(handle, memoryview(value[0].to_bytes(8, "little")), lib.MLXZIP_ROWS_HEADER + 8 * at)
                    placed += 1
        finally:
            os.close(handle)
        return placed


def create_file(folder: Path, rows: RowSet, number: int, folder_bytes: int) -> RowFile | None:
    """A new empty file of a set, the folder being locked; None when a row is too large for the bound.

    It gets its name only when it is whole. Raises `OSError`.
    """
    stride = lib.mlxzip_rows_stride(_shape(rows, 1))
    capacity = min((folder_bytes // FILES_PER_SET - lib.MLXZIP_ROWS_HEADER) // (stride + 32), _MOST_RECORDS)
    if capacity < LEAST_RECORDS:
        return None
    cells = 1 << (2 * capacity - 1).bit_length()  # half full at most; at 8 bytes each, 32 per record at most
    packed = _HEADER.pack(_MAGIC, rows.digest, rows.key_words, rows.row_bytes, cells, capacity)
    header = packed + zlib.crc32(packed).to_bytes(4, "little")
    path = folder / f"{rows.name}-{number:06d}.rows"
    partial = folder / f".{path.name}.partial"
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _write(handle, memoryview(header), 0)
        os.ftruncate(handle, lib.MLXZIP_ROWS_HEADER + 8 * cells)
        os.rename(partial, path)
    finally:
        os.close(handle)
        partial.unlink(missing_ok=True)
    return RowFile(path, rows)


def files_in(folder: Path) -> list[Path]:
    """Files of rows in a folder, by set and number. Raises `OSError`."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def leftovers_in(folder: Path) -> list[Path]:
    """What killed processes left of files they were about to create."""
    return [path for path in folder.iterdir() if path.name.startswith(".") and _NAME.match(path.name[1:])]


def number_of(path: Path) -> int:
    """The number in a file's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[2])


def total_bytes(paths: Iterable[Path]) -> int:
    """Bytes of the files that are still there, cells not yet used included."""
    return sum(status.st_size for status in map(status_of, paths) if status is not None)


def disk_bytes(paths: Iterable[Path]) -> int:
    """Bytes that the files take up on disk, which gives none to cells not yet used."""
    found = [status for status in map(status_of, paths) if status is not None]
    return sum(min(status.st_size, 512 * status.st_blocks) for status in found)


def status_of(path: Path) -> os.stat_result | None:
    """The file's status, None when another process has removed it meanwhile."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _read_header(handle: int, rows: RowSet) -> tuple[int, int]:
    """(cells, capacity) of a file of this set."""
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


def _write(handle: int, data: memoryview, at: int) -> None:
    """All of it, or an `OSError`."""
    while data:
        written = os.pwrite(handle, data, at)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, at = data[written:], at + written


def _shape(rows: RowSet, cells: int) -> Any:
    return ffi.new("mlxzip_rows_shape *", [rows.key_words, rows.row_bytes, cells])


def _words(array: NDArray[np.uint32]) -> Any:
    return ffi.from_buffer("uint32_t[]", array)


def _bytes(array: NDArray[Any]) -> Any:
    return ffi.from_buffer("uint8_t[]", array)
