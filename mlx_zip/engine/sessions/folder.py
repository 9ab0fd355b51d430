"""`SessionFolder`: the part of a `SessionStore` that is on disk.

Nothing here raises because of the folder's state, except where a caller asks for one file. Each kind of failure is
logged once. Several processes may use one folder: each finds the files that were there when it began, and those that
it writes itself; none writes over a file that another has changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_zip.engine.sessions.files import SessionBytes, found_in, session_paths
from mlx_zip.engine.sessions.kept import Caches, Kept, Slot, new_name, stamp_of
from mlx_zip.errors import EngineError, failure_reason
from mlx_zip.files import make_private, mark_folder_in_use

_OLD_S = 3600  # seconds after which an unfinished file cannot be one that is being written
_UNFINISHED = ".*.safetensors.partial-*"  # names of unfinished files
RESPONSES = "responses"  # folder of a server's stored responses (`mlx_zip serve`), in a folder of sessions
_MOST_NAMED = 3  # refused files that a warning names
SHARE = "machine-"  # what names of folders begin with that one of several machines uses
log = logging.getLogger("mlx_zip")


class SessionFolder:
    """Sessions in a folder. most_bytes: a session that takes more is not written. about: see `SessionBytes`."""

    def __init__(self, folder: Path, most_bytes: int, caches: Caches, about: Mapping[str, str]) -> None:
        self.folder, self.most_bytes, self.caches, self.about = folder, most_bytes, caches, about
        self._writer = _Writer()
        self._wanted: dict[Kept, None] = {}  # to be written once there is room
        self._warned: set[str] = set()
        self.usable = self._is_usable()
        if self.usable:
            self._begin_use()

    def sessions(self) -> list[Kept]:
        """Returns the sessions in the folder, without their caches, the last written last."""
        if not self.usable:
            return []
        found, refused = list[Kept](), list[str]()
        try:
            self._remove_unfinished()
            for path in session_paths(self.folder):
                try:
                    found.append(self._indexed(path))
                except (EngineError, OSError) as error:  # another process may just have deleted it
                    refused.append(str(error))
        except OSError as error:
            self._warn("read", f"cannot be read: {failure_reason(error)}")
        if refused:
            more = f"; and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
            self._warn(
                "refused", f"has {len(refused)} file(s) that are not used: {'; '.join(refused[:_MOST_NAMED])}{more}"
            )
        return sorted(found, key=lambda kept: kept.used)

    def _indexed(self, path: Path) -> Kept:
        """Returns the session in a file, without its cache. Raises `EngineError`, `OSError`."""
        stamp = stamp_of(path)
        kept = found_in(path, self.caches.marks)
        kept.slot, kept.saved = Slot(path, stamp), True
        kept.used = path.stat().st_mtime
        return kept

    def unfinished_bytes(self) -> int:
        """Returns the bytes of files that other processes write, or have left unfinished; removes old ones."""
        if not self.usable:
            return 0
        try:
            self._remove_unfinished()
            others = [path for path in self.folder.glob(_UNFINISHED) if f".partial-{os.getpid()}" not in path.name]
        except OSError as error:
            self._warn("read", f"cannot be read: {failure_reason(error)}")
            return 0
        return sum(stamp[1] for path in others if (stamp := stamp_of(path)) is not None)

    # ---- writing

    def want(self, kept: Kept) -> None:
        """Has a session written when there is room for it."""
        if self.usable:
            self._wanted[kept] = None

    def forget(self, kept: Kept) -> None:
        """Does not write a session any more, and deletes its file. Raises `EngineError` if it cannot be deleted."""
        self._wanted.pop(kept, None)
        kept.saved, kept.gone = False, True
        self._delete(kept.slot)

    def evict(self, kept: Kept) -> None:
        """Deletes a session's file to make room. A file that cannot be deleted stays, and is not used any more."""
        kept.saved = False
        try:
            self._delete(kept.slot)
        except EngineError as error:
            self._warn("delete", str(error))

    def _delete(self, slot: Slot | None) -> None:
        """Deletes a slot's file. Raises `EngineError`."""
        try:
            if slot is not None:
                slot.delete()
        except OSError as error:
            raise EngineError(
                f"session file {slot and slot.path}: cannot be deleted: {failure_reason(error)}"
            ) from error

    def is_coming(self, kept: Kept) -> bool:
        """Returns whether a session is being written as it is, or will be; from now on its cache is not needed."""
        if kept in self._wanted:
            self._submit(kept)
        return self._writer.is_writing(kept)

    def leave(self, kept: Kept) -> None:
        """Does not write a session, because a successor will be written."""
        self._wanted.pop(kept, None)

    @property
    def pending(self) -> bool:
        """Whether anything is to be written, being written, or not noted as written."""
        return bool(self._wanted) or not self._writer.is_idle()

    def pump(self, patient: bool = False) -> list[tuple[Kept, bool]]:
        """Hands sessions to the thread while it has room. Returns those done since the last call, and if that worked.

        patient: wait until all are done.
        """
        ended = self._ended()
        while self._wanted and (patient or self._writer.has_room()):
            if not self._writer.has_room():
                self._writer.wait()
            self._submit(next(iter(self._wanted)))
            ended += self._ended()
        if patient:
            self._writer.wait()
            ended += self._ended()
            return ended + (self.pump(patient) if self._wanted else [])  # answers may have been noted meanwhile
        return ended

    def close(self) -> list[tuple[Kept, bool]]:
        """Writes what is still to be written and ends the thread; returns as `pump`."""
        ended = self.pump(patient=True)
        self._writer.close()
        return ended

    def _submit(self, kept: Kept) -> None:
        """Hands a session to the thread as it is now."""
        del self._wanted[kept]
        if kept.cache is None:
            return
        kept.slot = kept.slot or Slot(self.folder / f"{kept.name}.safetensors")
        snapshot = SessionBytes(kept, self.caches, self.about)
        if snapshot.bytes > self.most_bytes:
            self._warn("large", f"takes {self.most_bytes} bytes; a session of {snapshot.bytes} bytes is not written")
            return
        self._writer.put(_Job(kept, kept.slot, snapshot))

    def _ended(self) -> list[tuple[Kept, bool]]:
        """Returns the sessions whose jobs are done, and whether it worked."""
        return [(job.kept, self._take(job)) for job in self._writer.done()]

    def _take(self, job: _Job) -> bool:
        """Notes what came of a job; returns whether the session is on disk."""
        kept = job.kept
        if isinstance(job.error, OSError):
            self._warn("write", f"cannot be written, sessions stay in memory only: {failure_reason(job.error)}")
            return False
        if job.error is not None:
            log.error("session folder %s: a session could not be written", self.folder, exc_info=job.error)
            return False
        self._warned.discard("write")
        kept.saved = True
        if kept.gone:
            self.evict(kept)
        elif kept.notes != job.notes:
            self.want(kept)  # an answer was noted meanwhile
        return True

    # ---- the folder

    def _is_usable(self) -> bool:
        """Makes the folder if it is missing; returns whether it can be used and no other user can write to it."""
        why = make_private(self.folder)
        if why is not None:
            self._warn("folder", why)
        return why is None

    def _begin_use(self) -> None:
        """Marks the folder as used until this object is gone; if nobody else uses it, removes all unfinished files."""
        try:
            handle = mark_folder_in_use(self.folder, lambda: _remove(self.folder.glob(_UNFINISHED)))
            weakref.finalize(self, os.close, handle)
        except OSError as error:
            self._warn("read", f"cannot be read: {failure_reason(error)}")

    def _remove_unfinished(self) -> None:
        """Removes what processes that were killed long ago have left unfinished. Raises `OSError`."""
        for path in self.folder.glob(_UNFINISHED):
            if (stamp := stamp_of(path)) is not None and time.time() - stamp[2] / 1e9 > _OLD_S:
                path.unlink(missing_ok=True)

    def _warn(self, kind: str, what: str) -> None:
        """Logs a warning about the folder, the first time that this kind of failure occurs."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("session folder %s %s", self.folder, what)


def folders_of(folder: Path) -> list[Path]:
    """Returns a folder of sessions, and those in it that machines keep their shares of a split model's sessions in."""
    return [folder, *(path for path in sorted(folder.glob(f"{SHARE}*")) if path.is_dir() and not path.is_symlink())]


def purge(folder: Path) -> tuple[int, int]:
    """Deletes a folder's sessions, of all models and machines, its stored responses, and folders that are empty then.

    Returns how many files were deleted and their bytes. Raises `OSError`.
    """
    counts = [_purge_one(one) for one in reversed(folders_of(folder))]
    return sum(count for count, _ in counts), sum(size for _, size in counts)


def _purge_one(folder: Path) -> tuple[int, int]:
    """Does what `purge` does in one folder."""
    others = (*folder.glob(_UNFINISHED), *folder.glob(f"{RESPONSES}/*.json"))
    paths = [path for path in (*session_paths(folder), *others) if path.is_file() or path.is_symlink()]
    size = sum(stamp[1] for path in paths if (stamp := stamp_of(path)) is not None)
    _remove(paths)
    for one in (folder / RESPONSES, folder):
        if one.is_dir() and not any(one.iterdir()):
            one.rmdir()
    return len(paths), size


def _remove(paths: Iterable[Path]) -> None:
    """Deletes files; one that is gone is no error. Raises `OSError`."""
    for path in paths:
        path.unlink(missing_ok=True)


# ---- the thread that writes, which gets bytes only and never computes arrays

_ROOM = 4  # sessions that may wait to be written; each takes the memory of a KV cache
_LINGER_S = 0.02  # before a write, so that the answer noted right after a request is written along


@dataclass(eq=False)
class _Job:
    """A session to be written to its slot. notes: the session's `notes` as they were written. error: why it failed."""

    kept: Kept
    slot: Slot
    snapshot: SessionBytes
    notes: int = -1
    error: BaseException | None = None

    def run(self) -> None:
        """Writes the session. If another process has replaced its file, the session gets a file of another name."""
        slot = self.slot
        try:
            if not slot.is_ours():
                slot.path, slot.stamp = slot.path.with_name(f"{new_name()}.safetensors"), None
            self.notes, answers = self.kept.notes, dict(self.kept.answers)
            self.snapshot.write(slot.path, answers)
            slot.stamp = stamp_of(slot.path)
        except BaseException as error:  # is logged in the engine's thread
            self.error = error


class _Writer:
    """Writes in a thread of its own. Done jobs are handed back, so that the engine's thread frees their arrays."""

    def __init__(self) -> None:
        self._waiting: deque[_Job] = deque()
        self._done: deque[_Job] = deque()
        self._change = threading.Condition()
        self._hurry = threading.Event()
        self._running: _Job | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def has_room(self) -> bool:
        """Returns whether one more job may be put."""
        return len(self._waiting) < _ROOM

    def is_writing(self, kept: Kept) -> bool:
        """Returns whether a session waits to be written, or is being written, as it is."""
        with self._change:
            return any(job.kept is kept for job in (*self._waiting, *self._done, self._running) if job is not None)

    def is_idle(self) -> bool:
        """Returns whether there is no job, not even one that is done and not handed back."""
        with self._change:
            return self._running is None and not self._waiting and not self._done

    def put(self, job: _Job) -> None:
        """Has a session written soon."""
        with self._change:
            self._waiting.append(job)
            self._change.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mlx_zip sessions", daemon=True)
            self._thread.start()

    def done(self) -> list[_Job]:
        """Returns the jobs that are done since the last call."""
        with self._change:
            done, self._done = self._done, deque()
        return list(done)

    def wait(self) -> None:
        """Waits until all jobs are done."""
        self._hurry.set()
        with self._change:
            self._change.wait_for(lambda: not self._waiting and self._running is None)
        self._hurry.clear()

    def close(self) -> None:
        """Waits until all jobs are done, and ends the thread."""
        self.wait()
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        """Runs one job after the other until the writer is closed."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                self._running = job = self._waiting.popleft()
            self._hurry.wait(_LINGER_S)
            job.run()
            with self._change:
                self._done.append(job)
                self._running = None
                self._change.notify_all()
            del job
