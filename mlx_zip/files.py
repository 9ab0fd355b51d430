"""Writes files and folders whole or not at all: under a temporary name first, then flushed to disk and renamed.

With `exit_on_signals`, temporary files are also removed when a signal ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, MlxZipError, errors_as, failure_reason

_INTEGERS = re.compile(r"(?<=\[)\n[\s\d,-]+\n\s*(?=\])")  # a list of integers in indented JSON
_NO_FULL_SYNC = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)  # file systems without F_FULLFSYNC
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EBADF)  # EBADF: a folder on NFS


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Context manager: yields a temporary path to write to; on success, flushes the file and renames it to `path`.

    If `path` is a symbolic link, the file that it points to is replaced. On any error, removes the temporary file and
    leaves what was at `path`. Raises `OSError`, which names the file, if writing fails or `path` is a device or a
    folder.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a file that could be replaced", str(path))
    partial = _temporary_path(path)
    try:
        yield partial
        flush_to_disk(partial)
        partial.replace(path)
        flush_to_disk(path.parent)
    except OSError as error:
        if error.filename == str(partial):
            error.filename = str(path)
        if error.errno is None:  # NumPy's error for a full disk; a file name would hide its message
            raise OSError(errno.EIO, f"the disk may be full ({error})", str(path)) from error
        error.filename = error.filename or str(path)  # the system names no file when the disk is full
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, replace: bool = True) -> Iterator[Path]:
    """Context manager: yields a temporary folder to fill; on success, flushes it to disk and renames it to `path`.

    replace: whether to replace an existing folder at `path`; if False, `FileExistsError` is raised instead. On any
    error, removes the temporary folder and the parent folders that were made for it, and leaves what was at `path`.
    Raises `OSError`.
    """
    partial = _temporary_path(path)
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    new_parents = [parent for parent in path.absolute().parents if not os.path.lexists(parent)]
    if path.exists() and not path.is_dir():
        raise OSError(errno.ENOTDIR, "is a file, not a folder", str(path))
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process that had this process's id
        partial.mkdir(parents=True)
        yield partial
        flush_folder_to_disk(partial)
        if os.path.lexists(path):
            if not replace:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            path.rename(old)
        partial.rename(path)
        flush_to_disk(path.parent)
    finally:
        if old.exists() and not path.exists():  # the new folder could not be renamed to `path`
            old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        if old.is_symlink():
            old.unlink()
        shutil.rmtree(old, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # not empty: it holds the folder that was written
                parent.rmdir()


def _temporary_path(path: Path) -> Path:
    """Returns a path next to `path` that no other process or thread uses."""
    main = threading.current_thread() is threading.main_thread()
    thread = "" if main else f"-{threading.get_native_id()}"
    return path.with_name(f".{path.name}.partial-{os.getpid()}{thread}")


def open_private(path: Path, buffering: int = -1) -> Any:
    """Opens a binary file to write, empty and readable by its owner only. Follows no link. Raises `OSError`."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = open(handle, "wb", buffering=buffering)  # noqa: SIM115  (the caller closes it)
    os.fchmod(handle, 0o600)
    return file


def make_private(folder: Path) -> str | None:
    """Makes `folder`, readable by its owner only, and its parent folder, if they are missing.

    Returns None, or why `folder` must not be used: it cannot be made or read, or other users can write to it.
    """
    try:
        for one in (folder.parent, folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return f"cannot be used: {failure_reason(error)}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (os.geteuid(), 0):
        return "is not used: other users can write to it; use a folder of your own (chmod 700)"
    return None


def remove_unfinished_files(folder: Path) -> None:
    """Removes unfinished files that killed processes left in a folder. Call it only while holding the folder's lock."""
    for left in (*folder.glob(".*.partial-*"), *folder.glob(".*.old-*")):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def try_lock_folder(folder: Path) -> Iterator[bool]:
    """Context manager: locks a folder while the block runs; yields False if another process holds the lock, else True.

    Writes no file. If the file system has no locks, always yields True. Raises `OSError`.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _try_lock(handle)
    finally:
        os.close(handle)


def mark_folder_in_use(folder: Path, if_alone: Callable[[], None]) -> int:
    """Marks a folder as used by this process; returns a handle, and closing the handle removes the mark.

    If no other process has marked the folder, first calls `if_alone`, but never on a file system without locks. Raises
    `OSError`.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(BlockingIOError):  # other processes use the folder
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if_alone()
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (*_NO_LOCKS, errno.EWOULDBLOCK):
            os.close(handle)
            raise
    return handle


def _try_lock(handle: int) -> bool:
    """Locks an open folder. Returns False if another process holds the lock, True also if locks are not supported."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def flush_folder_to_disk(folder: Path) -> None:
    """Flushes a folder and everything in it to disk; on a Mac, also the disk's own cache, once at the end."""
    for root, _, files in os.walk(folder):
        for name in files:
            flush_to_disk(Path(root, name), full=False)
        flush_to_disk(Path(root), full=False)
    flush_to_disk(folder)


def flush_to_disk(path: Path, full: bool = True) -> None:
    """Flushes one file or folder to disk.

    On a Mac, `os.fsync` leaves the data in the disk's own cache, where a power cut destroys them. full: whether to
    flush that cache too (F_FULLFSYNC), if the system and the file system support it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        if not (full and _flush_disk_cache(handle)):
            os.fsync(handle)
    finally:
        os.close(handle)


def expand_home(name: str | os.PathLike[str]) -> Path:
    """Returns a path with a leading ~ or ~USER replaced by the home folder. A ~USER of an unknown user is kept.

    Raises `DataError` for a value that is not a path.
    """
    if not isinstance(name, str | os.PathLike):
        raise DataError(f"a path must be text, got {name!r:.80}")
    return Path(os.path.expanduser(name))


def data_folder() -> Path:
    """Returns the folder for this user's data, such as typed lines. The folder may not exist yet.

    On a Mac ~/Library/Application Support/mlx_zip, elsewhere mlx_zip in $XDG_DATA_HOME or in ~/.local/share.
    """
    return _user_folder("~/Library/Application Support", "XDG_DATA_HOME", "~/.local/share")


def cache_folder() -> Path:
    """Returns the folder for files that mlx_zip can make again, such as converted models. The folder may not exist yet.

    On a Mac ~/Library/Caches/mlx_zip, elsewhere mlx_zip in $XDG_CACHE_HOME or in ~/.cache.
    """
    return _user_folder("~/Library/Caches", "XDG_CACHE_HOME", "~/.cache")


def _user_folder(on_mac: str, variable: str, otherwise: str) -> Path:
    """Returns mlx_zip's folder in `on_mac` on a Mac, elsewhere in the folder that `variable` names or `otherwise`."""
    if sys.platform == "darwin":
        return expand_home(on_mac) / "mlx_zip"
    given = os.environ.get(variable, "")
    return (Path(given) if os.path.isabs(given) else expand_home(otherwise)) / "mlx_zip"


def _flush_disk_cache(handle: int) -> bool:
    """Flushes an open file and the cache of its disk; returns False if the system cannot flush the cache."""
    command = getattr(fcntl, "F_FULLFSYNC", None)  # Macs only
    if command is None:
        return False
    try:
        fcntl.fcntl(handle, command)
    except OSError as error:
        if error.errno not in _NO_FULL_SYNC:
            raise
        return False
    return True


def check_writable(path: Path, what: str = "", suffix: str = "") -> None:
    """Raises `DataError` if no file can be written at `path`, before long work. Leaves no file.

    what: the kind of file, for the message. suffix: the suffix that `path` must have, "" for any.
    """
    if suffix and path.suffix != suffix:
        raise DataError(f"{path}: {what} is a {suffix} file")
    with errors_as(DataError, f"{path} cannot be written", OSError):
        if not path.absolute().parent.is_dir():
            raise DataError(f"{path}: no such folder")
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is a folder or device, not a file")
        partial = _temporary_path(Path(os.path.realpath(path)))  # as `atomic_file` will make it
        partial.touch()
        partial.unlink()


def check_regular_file(path: Path) -> None:
    """Raises `DataError` if there is a folder, device or pipe at `path`; a missing file is not an error here.

    Reading a device or pipe may never end.
    """
    with contextlib.suppress(OSError):  # for example for a name that is too long; reading the file will raise it again
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is a folder or device, not a file")


def read_json_object(
    path: Path, hint: str = "", raises: type[MlxZipError] = DataError, constants: bool = False
) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises an error of the class `raises` if the file cannot be read as one.

    hint: end of the error's message. constants: whether NaN and Infinity are accepted; they are not JSON, but some
    models' configs contain them.
    """
    try:
        check_regular_file(path)
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=None if constants else refuse_json_constant)
    except DataError as error:
        raise raises(f"{error}{hint}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise raises(f"{path} cannot be read: {failure_reason(error)}{hint}") from error
    if not isinstance(found, dict):
        raise raises(f"{path} holds no JSON object{hint}")
    return found


def refuse_json_constant(text: str) -> float:
    """Raises `ValueError`; Python's JSON reader calls this for NaN and Infinity, which it accepts by default."""
    raise ValueError(f"{text} is no number of JSON")


def write_json(path: Path, data: Any) -> None:
    """Writes JSON with sorted keys and an indent of two, whole or not at all; equal data give equal bytes.

    A list of integers is written on one line. A lone surrogate, as in a path that is not UTF-8, becomes a JSON escape.
    Raises `OSError`, and `ValueError` for NaN and infinity.
    """
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    with atomic_file(path) as partial:
        text = _INTEGERS.sub(lambda found: " ".join(found[0].split()), text)
        partial.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Context manager: makes SIGTERM and SIGHUP raise `SystemExit`, so that unfinished files are removed as on Ctrl-C.

    Leaves a signal alone if a handler is already installed for it.
    """

    def exit_process(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, exit_process)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def exit_with_parent_process() -> None:
    """Starts a thread that ends this process as soon as the process that started it through `multiprocessing` ends."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
