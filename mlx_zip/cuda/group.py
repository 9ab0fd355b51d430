"""`CudaGroup`: all requests that take steps, as rows of one batch; and the reading of their prompts.

A step has the parts that `mlx_zip.engine.group` describes. There is one group only, which requests join when their
prompts have been read, so nothing is ever merged or split.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mlx_zip.codec.ids import Uint32s
from mlx_zip.cuda.choosing import Choosing, is_plain
from mlx_zip.cuda.seats import Seats
from mlx_zip.engine.interface import Progress
from mlx_zip.engine.job import Chosen, Job
from mlx_zip.errors import MlxZipError, PromptTooLongError

log = logging.getLogger(__name__)


class CudaGroup:
    """The requests of one engine that take steps. pad_id: an id that canonical decoding never excludes."""

    def __init__(self, seats: Seats, pad_id: int) -> None:
        self.jobs: list[Job] = []
        self._seats, self._batch, self._pad_id = seats, seats.batch, pad_id
        self._chosen: list[Job] = []  # requests whose next ids were chosen and not followed
        self._ids: list[int] = []  # of all rows
        self._choosing: Choosing | None = None
        self._waits = False  # whether `finish` must choose

    def join(self, others: Sequence[object]) -> None:
        """Does nothing: there is one group."""

    def take_in(self, job: Job) -> CudaGroup:
        """Takes in a request whose prompt was read, and returns the group.

        If no other request is in the middle of a step, the first id is chosen now.
        """
        self.jobs.append(job)
        if not self._chosen:
            try:
                self._choose()
            except BaseException:
                self.jobs.remove(job)
                self._chosen = []
                self._seats.followed()
                raise
        return self

    # ---- one step

    def begin(self) -> None:
        """Does nothing: the body has begun when the ids were chosen."""

    def read(self) -> None:
        """Waits for the chosen ids and has each request count its own. A request that fails at it gets an `error`."""
        self._ids = self._batch.ids() if self._chosen else []
        for job in self._chosen:
            if job.error is not None:
                continue
            if job.handle.cancelled:
                job.reason = "cancelled"
                continue
            try:
                job.outgrown = job.outgrown or self._batch.room(job.cache.row) <= 1
                job.take(self._read(job.cache.row))
            except Exception as error:
                job.error = error

    def _read(self, row: int) -> Chosen:
        """Returns what was chosen for a row."""
        return Chosen(self._ids[row]) if self._choosing is None else self._choosing.read(row, self._ids[row])

    def settle(self) -> list[Job]:
        """Has the codebooks read the chosen ids; takes out the requests that have ended or failed, and returns them."""
        if self._chosen:
            self._follow()
        self._seats.followed()
        for job in self.jobs:
            if job.reason is None and job.error is None and job.handle.cancelled and job not in self._chosen:
                job.reason = "cancelled"  # before its first id
        leaving = [job for job in self.jobs if job.reason is not None or job.error is not None]
        self.jobs, chosen, self._chosen = [job for job in self.jobs if job not in leaving], self._chosen, []
        for job in leaving:
            self._leave(job, job in chosen)
        return leaving

    def _follow(self) -> None:
        """Has the codebooks read the chosen ids."""
        by_row = {job.cache.row: job for job in self._chosen}
        for row, error in self._batch.follow(self._ids).items():
            job = by_row[row]
            job.error, job.whole = job.error or error, isinstance(error, MlxZipError)
            self._chosen.remove(job)  # it has not read its id

    def _leave(self, job: Job, has_read: bool) -> None:
        """Gives up a request's row, and keeps a snapshot of it if the request is to be kept.

        has_read: whether the row has read the last chosen id, which was not delivered if the request was cancelled.
        """
        seat = job.cache
        if job.error is not None and not isinstance(job.error, MlxZipError):
            job.whole = False
        try:
            if job.keep and job.whole:
                if has_read and (job.reason == "cancelled" or job.error is not None):
                    self._batch.trim(seat.row, seat.book.mark() - 1)
                self._seats.keep(seat)
        except Exception:  # the answer was delivered: only the session is lost
            log.exception("a session could not be kept")
            job.whole = False
        finally:
            self._seats.leave(seat)

    def launch(self) -> None:
        """Starts the choice of the next ids, unless a constraint must look at them one by one."""
        self._waits = any(job.submission.constraint is not None for job in self.jobs)
        if not self._waits:
            self._choose()

    def finish(self) -> None:
        """Chooses the next ids if `launch` did not."""
        if self._waits:
            self._choose()

    def _choose(self) -> None:
        """Chooses the next id of every request and starts the body over them; the ids stay on the device.

        So the device has work while the host delivers the ids before them.
        """
        plain = all(is_plain(job) for job in self.jobs)
        self._choosing = None if plain else Choosing({job.cache.row: job for job in self.jobs}, self._pad_id)
        self._seats.chosen, self._waits = True, False
        self._chosen = list(self.jobs)
        self._batch.choose(self._choosing)
        self._batch.begin()

    def drop(self) -> None:
        """Gives up the requests' rows, after a step has failed."""
        jobs, self.jobs, self._chosen, self._choosing, self._waits = self.jobs, [], [], None, False
        for job in jobs:
            self._seats.leave(job.cache)
        self._seats.followed()

    # ---- what only groups that are merged need

    @property
    def length(self) -> int:
        """Ids of the longest request."""
        return max(job.held_ids for job in self.jobs)

    def key(self) -> None:
        """Returns None: this group is not merged with others."""

    def switching(self) -> list[int]:
        """Returns no rows: all of them can go on together."""
        return []

    def split(self, rows: Sequence[int]) -> list[Job]:
        """Returns no requests."""
        return []


class CudaReading:
    """A request whose prompt is being read. group: what the request joins then."""

    def __init__(self, seats: Seats, group: CudaGroup, job: Job) -> None:
        self.job = job
        self._batch, self._group, self._done = seats.batch, group, 0
        self._ids: Uint32s = job.prompt_ids

    @property
    def left(self) -> int:
        """How many ids of the prompt are still to be read."""
        return len(self._ids) - self._done

    def read(self, at_most: int) -> tuple[int, CudaGroup | None]:
        """Reads up to `at_most` ids. Returns how many, and at the end the group that the request has joined.

        Raises `PromptTooLongError` if the batch has no room for the prompt and an answer, and what the model raises.
        """
        row, begin = self.job.cache.row, self._done
        if (room := self._batch.room(row)) <= self.left:
            tokens, why = len(self.job.checked.base_ids), f"the KV caches have room for {self._batch.capacity} ids"
            raise PromptTooLongError.of(tokens, self.job.fitting(room - 1), why)
        end = min(begin + at_most, len(self._ids))
        self._batch.read(row, self._ids[begin:end], more=end < len(self._ids))
        self._done = end
        self.job.send(Progress(end, len(self._ids)))
        return end - begin, self._group.take_in(self.job) if end == len(self._ids) else None
