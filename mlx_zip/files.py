"""Files and folders that appear whole or not at all: written beside, flushed to disk, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError

_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EBADF)  # the last: NFS, of a folder


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to; on success that file is flushed and takes the name `path`.

    A link stays, what it leads to is replaced. On any error the file beside is removed and what was at `path` stays.
    Raises what writing raises (`OSError`, which names a file), and that for what is no file, a device, say.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a file that could be replaced", str(path))
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        if error.errno is None:  # NumPy's of a full disk is a message alone, which a name beside it would hide
            raise OSError(errno.EIO, str(error), str(path)) from error
        error.filename = error.filename or str(path)  # a full disk names none
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Gives a folder beside `path` to fill; on success it is flushed and takes the place of `path`, old content too.

    On any error it is removed and what was at `path` stays. Raises what writing raises (`OSError`).
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process that had our id
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        sync(path.parent)
    finally:
        if old.exists() and not path.exists():  # nothing took its place
            old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def remove_partials(folder: Path) -> None:
    """Removes what killed processes left half-written in a folder, which nobody else uses: see `sole_user`."""
    for left in (*folder.glob(".*.partial-*"), *folder.glob(".*.old-*")):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[bool]:
    """Holds a folder until the block ends, or the process does; gives False when another process holds it.

    Nothing is written. On a file system that knows no locks everyone gets True. Raises `OSError`.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _locked(handle)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def sync_tree(folder: Path) -> None:
    """Flushes a folder and all in it to disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))


def sync(path: Path) -> None:
    """Flushes one file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_out(path: Path, what: str = "", suffix: str = "") -> None:
    """Raises `DataError` where no file can be written: another suffix than `what` has, no such folder, one that is
    not ours to write to, a folder there.

    It writes nothing; for a look before long work.
    """
    if suffix and path.suffix != suffix:
        raise DataError(f"{path}: {what} is a {suffix} file")
    if not path.absolute().parent.is_dir():
        raise DataError(f"{path}: no such folder")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise DataError(f"{path}: its folder cannot be written to")
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is a folder or device, not a file")


def check_in(path: Path) -> None:
    """Raises `DataError` for a folder, a device or a pipe, which could be read for ever; a file may be missing."""
    with contextlib.suppress(OSError):  # of a name that is too long, say: reading tells
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is a folder or device, not a file")


def write_json(path: Path, data: Any) -> None:
    """Sorted, indented, one newline at the end; whole or not at all."""
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    with whole_file(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
