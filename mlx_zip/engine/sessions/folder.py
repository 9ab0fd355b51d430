"""`SessionFolder`: the part of a `SessionStore` that is on disk.

Problems with the folder are logged, each kind once; only `delete` raises. Several processes may use one folder. Each
process uses the files that existed when it started and those that it writes itself. No process overwrites a file that
another process has changed.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlx_zip.engine.sessions.file_format import FileContents
from mlx_zip.engine.sessions.session import (
    Session,
    SessionCaches,
    SessionFile,
    file_stamp,
    new_session_name,
    read_session_index,
    session_as_file,
    write_session,
)
from mlx_zip.errors import EngineError, failure_reason
from mlx_zip.files import make_private, mark_folder_in_use

_ABANDONED_AFTER_S = 3600  # seconds without a change after which no process can still be writing an unfinished file
_SESSION_FILE_NAME = re.compile(r"[0-9a-f]{16}\.safetensors")
_UNFINISHED_PATTERN = ".*.safetensors.partial-*"  # names of unfinished files
RESPONSES_FOLDER = "responses"  # folder of a server's stored responses (`mlx_zip serve`), in a folder of sessions
_MOST_NAMED = 3  # maximum number of refused files that a warning names
MACHINE_FOLDER_PREFIX = "machine-"  # prefix of the folders for the sessions of a model split over several machines
log = logging.getLogger("mlx_zip")


class SessionFolder:
    """Sessions in a folder. folder: None, or a folder that cannot be used, to write no sessions.

    most_bytes: maximum bytes of one session; larger ones are not written. file_facts: as in `session_as_file`.

    A thread writes the files. It gets only bytes and never computes arrays.
    """

    def __init__(
        self, folder: Path | None, most_bytes: int, caches: SessionCaches, file_facts: Mapping[str, str]
    ) -> None:
        self.most_bytes, self.caches, self.file_facts = most_bytes, caches, file_facts
        self._queued: dict[Session, None] = {}  # to be written once the writer has room
        self._jobs: list[_WriteJob] = []  # given to the writer; the engine's thread removes and frees ended ones
        self._inbox: queue.SimpleQueue[_WriteJob | None] = queue.SimpleQueue()
        self._hurry = threading.Event()  # set while the engine's thread waits for the writer
        self._writer = threading.Thread(
            target=_write_jobs, args=(self._inbox, self._hurry), name="mlx_zip sessions", daemon=True
        )
        self._warned_kinds: set[str] = set()
        self.folder = folder or Path()
        self.is_usable = folder is not None and self._make_private_folder()
        if self.is_usable:
            self._mark_as_used()

    def read_index(self) -> list[Session]:
        """Returns the sessions in the folder, without their caches, the most recently written last."""
        if not self.is_usable:
            return []
        found, refused = list[Session](), list[str]()
        try:
            self._remove_old_unfinished_files()
            for path in list_session_files(self.folder):
                try:
                    found.append(self._read_session_index(path))
                except (EngineError, OSError) as error:  # another process may just have deleted it
                    refused.append(str(error))
        except OSError as error:
            self._warn_once("read", f"cannot be read: {failure_reason(error)}")
        if refused:
            more = f"; and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
            self._warn_once(
                "refused", f"has {len(refused)} file(s) that are not used: {'; '.join(refused[:_MOST_NAMED])}{more}"
            )
        return sorted(found, key=lambda session: session.used)

    def _read_session_index(self, path: Path) -> Session:
        """Returns the session in a file, without its cache. Raises `EngineError`, `OSError`."""
        stamp = file_stamp(path)
        session = read_session_index(path, self.caches.identity)
        session.file, session.saved = SessionFile(path, stamp), True
        session.used = path.stat().st_mtime
        return session

    def unfinished_bytes(self) -> int:
        """Returns the total bytes of unfinished files of other processes, after removing old ones."""
        if not self.is_usable:
            return 0
        try:
            self._remove_old_unfinished_files()
            others = [
                path for path in self.folder.glob(_UNFINISHED_PATTERN) if f".partial-{os.getpid()}" not in path.name
            ]
        except OSError as error:
            self._warn_once("read", f"cannot be read: {failure_reason(error)}")
            return 0
        return sum(stamp[1] for path in others if (stamp := file_stamp(path)) is not None)

    # ---- writing

    def queue_write(self, session: Session) -> None:
        """Queues a session, to be written as soon as the writer has room."""
        if self.is_usable:
            self._queued[session] = None

    def delete(self, session: Session) -> None:
        """Cancels the write of a session and deletes its file. Raises `EngineError` if the file cannot be deleted."""
        self._queued.pop(session, None)
        session.saved, session.is_dropped = False, True
        self._delete_file(session.file)

    def evict(self, session: Session) -> None:
        """Deletes a session's file to make room. A file that cannot be deleted stays, and is not used any more."""
        session.saved = False
        try:
            self._delete_file(session.file)
        except EngineError as error:
            self._warn_once("delete", str(error))

    def _delete_file(self, file: SessionFile | None) -> None:
        try:
            if file is not None:
                file.delete_if_unchanged()
        except OSError as error:
            raise EngineError(
                f"session file {file and file.path}: cannot be deleted: {failure_reason(error)}"
            ) from error

    def start_write(self, session: Session) -> bool:
        """Hands a session to the writer if queued. Returns whether the writer has it; if so, its cache may be freed."""
        if session in self._queued:
            self._hand_to_writer(session)
        return any(job.session is session for job in self._jobs)

    def cancel_write(self, session: Session) -> None:
        """Removes a session from the queue, because a longer one takes its place."""
        self._queued.pop(session, None)

    @property
    def has_pending_writes(self) -> bool:
        """Whether any session is queued, being written, or written but not yet noted as such."""
        return bool(self._queued or self._jobs)

    def write_queued(self, wait: bool = False) -> list[tuple[Session, bool]]:
        """Hands queued sessions to the writer while it has room.

        Returns the sessions whose writes ended since the last call, each with whether its write succeeded. wait: return
        only when all sessions are written.
        """
        ended = list[tuple[Session, bool]]()
        while True:
            over = [job for job in self._jobs if job.is_over.is_set()]
            self._jobs = [job for job in self._jobs if job not in over]
            ended += [(job.session, self._note_outcome(job)) for job in over]  # may queue a session again
            if self._queued and len(self._jobs) < _MOST_JOBS:
                self._hand_to_writer(next(iter(self._queued)))
            elif wait and self._jobs:
                self._hurry.set()
                self._jobs[-1].is_over.wait()
                self._hurry.clear()
            else:
                return ended

    def close(self) -> list[tuple[Session, bool]]:
        """Writes all queued sessions and ends the writer's thread. Returns what `write_queued` returns."""
        ended = self.write_queued(wait=True)
        if self._writer.is_alive():
            self._inbox.put(None)
            self._writer.join()
        return ended

    def _hand_to_writer(self, session: Session) -> None:
        del self._queued[session]
        if session.cache is None:
            return
        session.file = session.file or SessionFile(self.folder / f"{session.name}.safetensors")
        contents = session_as_file(session, self.caches, self.file_facts)
        if contents.nbytes > self.most_bytes:
            self._warn_once(
                "large", f"takes {self.most_bytes} bytes; a session of {contents.nbytes} bytes is not written"
            )
            return
        self._jobs.append(_WriteJob(session, session.file, contents))
        self._inbox.put(self._jobs[-1])
        if self._writer.ident is None:  # not yet started
            self._writer.start()

    def _note_outcome(self, job: _WriteJob) -> bool:
        """Updates a session after its write. Returns whether the session is on disk; if not, logs the reason."""
        session = job.session
        if isinstance(job.error, OSError):
            self._warn_once("write", f"cannot be written, sessions stay in memory only: {failure_reason(job.error)}")
            return False
        if job.error is not None:
            log.error("session folder %s: a session could not be written", self.folder, exc_info=job.error)
            return False
        self._warned_kinds.discard("write")
        session.saved = True
        if session.is_dropped:
            self.evict(session)
        elif session.answers_version != job.answers_version:
            self.queue_write(session)  # an answer was noted meanwhile
        return True

    # ---- the folder

    def _make_private_folder(self) -> bool:
        """Makes the folder if it is missing; returns whether it can be used and no other user can write to it."""
        why = make_private(self.folder)
        if why is not None:
            self._warn_once("folder", why)
        return why is None

    def _mark_as_used(self) -> None:
        """Marks the folder as in use until this object is gone. Removes unfinished files if no one else uses it."""
        try:
            handle = mark_folder_in_use(self.folder, lambda: _delete_files(self.folder.glob(_UNFINISHED_PATTERN)))
            weakref.finalize(self, os.close, handle)
        except OSError as error:
            self._warn_once("read", f"cannot be read: {failure_reason(error)}")

    def _remove_old_unfinished_files(self) -> None:
        """Removes unfinished files that have not changed for an hour. Raises `OSError`."""
        for path in self.folder.glob(_UNFINISHED_PATTERN):
            if (stamp := file_stamp(path)) is not None and time.time() - stamp[2] / 1e9 > _ABANDONED_AFTER_S:
                path.unlink(missing_ok=True)

    def _warn_once(self, kind: str, what: str) -> None:
        if kind not in self._warned_kinds:
            self._warned_kinds.add(kind)
            log.warning("session folder %s %s", self.folder, what)


def list_session_files(folder: Path) -> Iterator[Path]:
    """Yields the session files in a folder, sorted by name. Raises `OSError`."""
    return (path for path in sorted(folder.iterdir()) if _SESSION_FILE_NAME.fullmatch(path.name))


def with_machine_folders(folder: Path) -> list[Path]:
    """Returns `folder`, and the folders in it that hold sessions of models split over several machines."""
    return [
        folder,
        *(path for path in sorted(folder.glob(f"{MACHINE_FOLDER_PREFIX}*")) if path.is_dir() and not path.is_symlink()),
    ]


def purge_session_folder(folder: Path) -> tuple[int, int]:
    """Deletes the sessions of all models and machines in a folder, and the stored responses; then all empty folders.

    Returns the number of deleted files and their total bytes. Raises `OSError`.
    """
    counts = [_purge_single_folder(one) for one in reversed(with_machine_folders(folder))]
    return sum(count for count, _ in counts), sum(size for _, size in counts)


def _purge_single_folder(folder: Path) -> tuple[int, int]:
    others = (*folder.glob(_UNFINISHED_PATTERN), *folder.glob(f"{RESPONSES_FOLDER}/*.json"))
    paths = [path for path in (*list_session_files(folder), *others) if path.is_file() or path.is_symlink()]
    size = sum(stamp[1] for path in paths if (stamp := file_stamp(path)) is not None)
    _delete_files(paths)
    for one in (folder / RESPONSES_FOLDER, folder):
        if one.is_dir() and not any(one.iterdir()):
            one.rmdir()
    return len(paths), size


def _delete_files(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


# ---- the writer's thread

_MOST_JOBS = 5  # sessions that are being written or wait for it; each takes the memory of a KV cache
_DELAY_S = 0.02  # wait before a write, so that an answer noted right after its request is written too


@dataclass(eq=False)
class _WriteJob:
    """A session to be written to a file. answers_version: the version of the answers that were written. error: the
    exception that made the write fail, else None.
    """

    session: Session
    file: SessionFile
    contents: FileContents
    answers_version: int = -1
    error: BaseException | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Writes the session. If another process has replaced the session's file, writes a file of another name."""
        file = self.file
        try:
            if not file.is_unchanged():
                file.path, file.stamp = file.path.with_name(f"{new_session_name()}.safetensors"), None
            self.answers_version, answers = self.session.answers_version, dict(self.session.answers)
            write_session(file.path, self.contents, answers)
            file.stamp = file_stamp(file.path)
        except BaseException as error:  # is logged in the engine's thread
            self.error = error


def _write_jobs(inbox: queue.SimpleQueue[_WriteJob | None], hurry: threading.Event) -> None:
    """Runs jobs until None arrives."""
    while (job := inbox.get()) is not None:
        hurry.wait(_DELAY_S)
        job.run()
        over = job.is_over
        del job  # before the engine's thread learns of the end, so that this thread never frees the arrays
        over.set()
