"""The part of a row store that is on disk: finds rows in a folder's files, and writes new rows to them.

A folder holds files `<digest>-<number>.rows`: a memory-mapped index, then records (format: `native/rows.h`). A file
belongs to one set of rows (one side of one model) and has room for a fixed number of records. When a file is full, the
next one is begun. When the folder exceeds its maximum size, its oldest files are deleted. A record carries a checksum
and is written before the index cell that points to it, so after a kill or a power cut at any point a torn record is not
found. Several processes may read and append: writers lock the folder; readers need no lock.

Nothing is written through a memory map, and no file in use is truncated, so a full disk raises `OSError` instead of a
signal. Full files never change. If a row is found in the oldest file of a set, it is written again to the newest.

The state of the folder never raises an error in `RowFolder`: a folder that cannot be read or written is not used from
then on, and the reason is logged once. A lookup may miss a row but never returns a wrong one. A folder holds pieces of
people's texts, so it is used only on request. `keys` [N, words] are entries' base ids, `data` [N, bytes] their rows.

The folder was kept because it saves more than 10 % of a request's time compared with rows in memory alone. With the
bundled model on two quiet x86-64 cores, repeating a request in a new process took (medians of five alternating runs):
for a chat of three turns, 3.46 s with memory alone and 2.53 s with the folder; for reading a document of 1,182 ids,
4.63 s and 3.13 s.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec._native import ffi, lib
from mlx_zip.errors import failure_reason
from mlx_zip.files import make_private, try_lock_folder

FILES_PER_SET = 4  # a file takes a quarter of the folder's maximum size at most, so that deleting one loses little
LEAST_RECORDS = 64  # a file with room for fewer records is not made
_MAGIC = b"mlxzrow1"
_HEADER = struct.Struct("<8s32sIIII")  # magic, digest, ids per key, bytes per row, cells, records; a CRC-32 follows
_FILE_NAME = re.compile(r"([0-9a-f]{32})-(\d{6,})\.rows")
_MOST_RECORDS = 1 << 30
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # the latter, on Linux, spares page faults
FLUSH_ROWS = 64  # new rows that are collected before a write
PENDING_BYTES = 8 << 20  # maximum bytes of new rows that wait in memory while another process is writing
PATIENCE_S = 2.0  # seconds that the last write waits for another process
log = logging.getLogger("mlx_zip")

RowKeys = NDArray[np.uint32]
RowBytes = NDArray[np.uint8]


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

    def find_rows(self, keys: RowKeys, found: NDArray[np.bool_], rows: RowBytes) -> int:
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

    def append(self, keys: RowKeys, rows: RowBytes) -> None:
        """Writes new rows: keys [N, words], rows [N, bytes]. The folder must be locked. Raises `OSError`."""
        data = np.empty(len(keys) * self.stride, np.uint8)
        lib.mlxzip_rows_seal(self.shape, _c_words(keys), _c_bytes(rows), len(keys), _c_bytes(data))
        self._raise_if_too_short()
        first, value = self._count_records(), ffi.new("uint64_t *")
        if first + len(keys) >= 1 << 32:
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _write_all(handle, data.data, self.records_at + first * self.stride)
            for i in range(len(keys)):
                key = _c_words(keys[i : i + 1])
                at = lib.mlxzip_rows_cell(self.shape, self._cells, key, first + i, value)
                if at < self.cells:
                    _write_all(handle, memoryview(value[0].to_bytes(8, "little")), lib.MLXZIP_ROWS_HEADER + 8 * at)
        finally:
            os.close(handle)


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


def _c_words(array: RowKeys) -> Any:
    return ffi.from_buffer("uint32_t[]", array)


def _c_bytes(array: NDArray[Any]) -> Any:
    return ffi.from_buffer("uint8_t[]", array)


# ---- the folder


class RowFolder:
    """Rows in a folder of about `limit` bytes at most. Each kind of failure is logged once."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._files: dict[RowSet, list[RowFile]] = {}  # newest first
        self._new: dict[RowSet, list[tuple[RowKeys, RowBytes]]] = {}  # rows not written yet
        self._new_rows = self._new_bytes = 0
        self._flush_at = FLUSH_ROWS
        self._warned: set[str] = set()  # kinds of failures that were logged
        problem = make_private(folder)
        self.readable = self.writable = problem is None
        if problem is not None:
            self._warn_once("folder", problem)

    def find_rows(self, rows: RowSet, keys: RowKeys) -> tuple[NDArray[np.bool_], RowBytes]:
        """Looks up keys [N, words] of a set; returns found [N] and the rows [N, bytes], valid where found is true."""
        found, data = np.zeros(len(keys), np.bool_), np.empty((len(keys), rows.row_bytes), np.uint8)
        if not self.readable:
            return found, data
        if rows not in self._files:
            self._reopen_row_files(rows)
        for age, file in enumerate(list(self._files[rows])):
            before = found.copy() if age == FILES_PER_SET - 1 else None
            self._find_in_file(file, keys, found, data)
            if before is not None and (late := found & ~before).any():
                self.add(rows, keys[late], data[late])  # in the oldest file, which is deleted next: write them again
            if found.all():
                break
        return found, data

    def add(self, rows: RowSet, keys: RowKeys, data: RowBytes) -> None:
        """Adds new rows: keys [N, words], data [N, bytes]. Writes new rows once there are `FLUSH_ROWS` of them."""
        if not self.writable:
            return
        self._new.setdefault(rows, []).append((keys, data))
        self._new_rows += len(keys)
        self._new_bytes += data.nbytes
        if self._new_rows >= self._flush_at:
            self.flush()

    def flush(self, patience_s: float = 0.0) -> None:
        """Writes new rows. Gives up if another process keeps the folder locked for `patience_s` seconds."""
        until = time.monotonic() + patience_s
        while self._new and self.writable:
            try:
                with try_lock_folder(self.folder) as mine:
                    if mine:
                        self._write_new_rows()
            except (OSError, DamagedFileError, ForeignFileError) as error:
                self.writable = False
                self._drop_new_rows()
                self._warn_once("write", f"cannot be written, new rows are not kept: {failure_reason(error)}")
            if not self._new:
                return
            if time.monotonic() >= until:
                self._flush_at = self._new_rows + FLUSH_ROWS
                if patience_s > 0 or self._new_bytes > PENDING_BYTES:  # the last write, or too many to keep in memory
                    self._warn_once("busy", f"is held by another process; {self._new_rows} new rows are not kept")
                    self._drop_new_rows()
                return
            time.sleep(0.001)

    def close(self) -> None:
        """Writes new rows and closes the files."""
        self.flush(PATIENCE_S)
        for files in self._files.values():
            for file in files:
                file.close()
        self._files.clear()

    def _drop_new_rows(self) -> None:
        self._new.clear()
        self._new_rows, self._new_bytes, self._flush_at = 0, 0, FLUSH_ROWS

    # ---- reading

    def _reopen_row_files(self, rows: RowSet) -> list[RowFile]:
        """Opens the files of a set that exist now and returns them, newest first."""
        known = {file.path: file for file in self._files.get(rows, ())}
        try:
            paths = [path for path in list_row_files(self.folder) if path.name.startswith(rows.name)]
            known = {path: file for path, file in known.items() if path in paths and file.is_linked}
        except OSError as error:
            self.readable = self.writable = False
            self._warn_once("folder", f"cannot be read: {failure_reason(error)}")
            paths = []
        opened = [known[path] if path in known else self._open_row_file(path, rows) for path in reversed(paths)]
        self._files[rows] = [file for file in opened if file is not None]
        return self._files[rows]

    def _open_row_file(self, path: Path, rows: RowSet) -> RowFile | None:
        """Opens a file. If it cannot be used, logs why and returns None; a damaged file is also deleted."""
        try:
            return RowFile(path, rows)
        except FileNotFoundError:  # another process has just deleted it
            return None
        except OSError as error:
            self._warn_once("read", f"has a file that cannot be read: {failure_reason(error)}")
        except ForeignFileError:
            self._warn_once(
                "foreign", f"has a file with rows of another model under this one's name; it is not used: {path.name}"
            )
        except DamagedFileError:
            self._delete_damaged(path)
        return None

    def _delete_damaged(self, path: Path) -> None:
        """Deletes a file that is so damaged that no row can be found in it."""
        self._warn_once("damage", f"is damaged: {path.name} cannot be read; its rows are encoded again")
        try:
            path.unlink(missing_ok=True)
        except OSError:  # a read-only folder: the file stays, so each new process logs it again
            self.writable = False

    def _find_in_file(self, file: RowFile, keys: RowKeys, found: NDArray[np.bool_], data: RowBytes) -> None:
        """Does what `RowFile.find_rows` does; logs a failure, and stops using a file that cannot be read."""
        try:
            if file.find_rows(keys, found, data):
                self._warn_once("damage", f"is damaged: rows in {file.path.name} are missing; they are encoded again")
        except DamagedFileError:
            self._files[file.rows].remove(file)
            self._delete_damaged(file.path)
        except OSError as error:
            self._files[file.rows].remove(file)
            self._warn_once("read", f"has a file that cannot be read: {failure_reason(error)}")

    # ---- writing; the folder is locked

    def _write_new_rows(self) -> None:
        """Writes all new rows, set by set. Raises `OSError`, `DamagedFileError` or `ForeignFileError`."""
        for rows in list(self._new):
            batches = self._new[rows]
            keys, data = (np.concatenate(part) for part in zip(*batches, strict=True))
            self._append_rows(rows, keys, data)
            del self._new[rows]
        self._drop_new_rows()

    def _append_rows(self, rows: RowSet, keys: RowKeys, data: RowBytes) -> None:
        """Writes rows of one set to the set's newest file, and to new files when that file is full."""
        files = self._reopen_row_files(rows)
        there, scratch = np.zeros(len(keys), np.bool_), np.empty_like(data)
        for file in list(files[: FILES_PER_SET - 1]):  # leave out rows that another process has written meanwhile
            self._find_in_file(file, keys, there, scratch)
        keys, data = keys[~there], data[~there]
        while len(keys):
            if not files or not files[0].count_free_records():
                self._create_next_file(rows)
            n = min(files[0].count_free_records(), len(keys))
            self._delete_oldest_files(n * files[0].stride, files[0].path)
            files[0].append(keys[:n], data[:n])
            keys, data = keys[n:], data[n:]

    def _create_next_file(self, rows: RowSet) -> None:
        """Makes the next file of a set and deletes partial files. Raises `OSError`."""
        for path in list_partial_files(self.folder):
            path.unlink(missing_ok=True)
        numbers = [file_number(path) for path in list_row_files(self.folder) if path.name.startswith(rows.name)]
        made = create_row_file(self.folder, rows, max(numbers, default=0) + 1, self.limit)
        if made is None:
            raise OSError(f"{self.limit} bytes are too few for rows of {rows.row_bytes} bytes")
        self._files[rows].insert(0, made)

    def _delete_oldest_files(self, needed: int, keep: Path) -> None:
        """Deletes the least recently written files until `needed` more bytes fit."""
        paths = list_row_files(self.folder)
        found = {path: status for path in paths if (status := status_if_exists(path)) is not None}
        excess = sum(status.st_size for status in found.values()) + needed - self.limit  # unused index cells count
        for path in sorted(found, key=lambda path: found[path].st_mtime_ns):
            if excess <= 0:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                excess -= found[path].st_size

    def _warn_once(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("row store %s %s", self.folder, what)


def purge_row_folder(folder: Path) -> tuple[int, int]:
    """Deletes a folder's files of rows, and the folder if nothing else is in it; returns (files deleted, bytes freed).

    Processes that have the files open keep using them. Raises `OSError`.
    """
    paths = [*list_row_files(folder), *list_partial_files(folder)]
    size = sum_disk_usage(paths)
    for path in paths:
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    return len(paths), size
