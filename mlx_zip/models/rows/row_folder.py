"""The part of a row store that is on disk: finds rows in a folder's files, and writes new rows to them.

The state of the folder never raises an error here: a folder that cannot be read or written is not used from then on,
and the reason is logged once. A lookup may miss a row but never returns a wrong one. A folder holds pieces of people's
texts, so it is used only on request. `keys` [N, words] are entries' base ids, `data` [N, bytes] their rows.

The folder was kept because it saves more than 10 % of a request's time compared with rows in memory alone. With the
bundled model on two quiet x86-64 cores, repeating a request in a new process took (medians of five alternating runs):
for a chat of three turns, 3.46 s with memory alone and 2.53 s with the folder; for reading a document of 1,182 ids,
4.63 s and 3.13 s.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import failure_reason
from mlx_zip.files import make_private, try_lock_folder
from mlx_zip.models.rows.row_files import (
    FILES_PER_SET,
    DamagedFileError,
    ForeignFileError,
    RowFile,
    RowSet,
    create_row_file,
    file_number,
    list_partial_files,
    list_row_files,
    status_if_exists,
    sum_disk_usage,
    sum_file_sizes,
)

FLUSH_ROWS = 64  # new rows that are collected before a write
PENDING_BYTES = 8 << 20  # maximum bytes of new rows that wait in memory while another process is writing
PATIENCE_S = 2.0  # seconds that the last write waits for another process
log = logging.getLogger("mlx_zip")

RowKeys = NDArray[np.uint32]
RowBytes = NDArray[np.uint8]


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
                self._keep_for_later(last=patience_s > 0)
                return
            time.sleep(0.001)

    def close(self) -> None:
        """Writes new rows and closes the files."""
        self.flush(PATIENCE_S)
        for files in self._files.values():
            for file in files:
                file.close()
        self._files.clear()

    def _keep_for_later(self, last: bool) -> None:
        """Keeps new rows in memory for the next write; drops them after the last write, or if they are too many."""
        self._flush_at = self._new_rows + FLUSH_ROWS
        if last or self._new_bytes > PENDING_BYTES:
            self._warn_once("busy", f"is held by another process; {self._new_rows} new rows are not kept")
            self._drop_new_rows()

    def _drop_new_rows(self) -> None:
        self._new.clear()
        self._new_rows, self._new_bytes, self._flush_at = 0, 0, FLUSH_ROWS

    # ---- the folder

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
        excess = sum_file_sizes(paths) + needed - self.limit
        if excess <= 0:
            return
        ages = {path: status for path in paths if (status := status_if_exists(path)) is not None and path != keep}
        for path in sorted(ages, key=lambda path: ages[path].st_mtime_ns):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= ages[path].st_size

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
