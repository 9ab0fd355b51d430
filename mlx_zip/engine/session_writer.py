"""`SessionWriter`: writes sessions' files in a thread of its own, which gets bytes only and never computes arrays."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from mlx_zip.engine.sessions.files import Snapshot
from mlx_zip.engine.sessions.kept import Kept, Slot, new_name, stamp_of

ROOM = 4  # sessions that may wait to be written; each takes the memory of a KV cache
LINGER_S = 0.02  # before a write, so that the answer noted right after a request is written along


@dataclass(eq=False)
class Job:
    """A session to be written to its slot. notes: the session's `notes` as they were written. error: why it failed."""

    kept: Kept
    slot: Slot
    snapshot: Snapshot
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


class SessionWriter:
    """The thread. Jobs that are done are handed back, so that their arrays are freed in the engine's thread."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._done: deque[Job] = deque()
        self._change = threading.Condition()
        self._hurry = threading.Event()
        self._running: Job | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def has_room(self) -> bool:
        """Returns whether one more job may be put."""
        return len(self._waiting) < ROOM

    def is_writing(self, kept: Kept) -> bool:
        """Returns whether a session waits to be written, or is being written, as it is."""
        with self._change:
            return any(job.kept is kept for job in (*self._waiting, *self._done, self._running) if job is not None)

    def is_idle(self) -> bool:
        """Returns whether there is no job, not even one that is done and not handed back."""
        with self._change:
            return self._running is None and not self._waiting and not self._done

    def put(self, job: Job) -> None:
        """Has a session written soon."""
        with self._change:
            self._waiting.append(job)
            self._change.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mlx_zip sessions", daemon=True)
            self._thread.start()

    def done(self) -> list[Job]:
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
            self._hurry.wait(LINGER_S)
            job.run()
            with self._change:
                self._done.append(job)
                self._running = None
                self._change.notify_all()
            del job
