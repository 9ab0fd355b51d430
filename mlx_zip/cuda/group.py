"""`CudaGroup` holds all requests that take steps, as rows of one batch; `CudaReading` reads a request's prompt.

A step has the parts that `mlx_zip.engine.mlx.group` describes. There is only one group, which a request joins when its
prompt has been read, so groups are never merged or split. If any request may have a draft, the body waits until the
host knows the chosen ids of all requests, so that one call of the body can read the drafts too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from mlx_zip.codec.ids import Uint32s
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.sampling import RowChooser
from mlx_zip.engine.drafts import Draft, expects_draft, shared_pass_costs
from mlx_zip.engine.interface import Progress
from mlx_zip.engine.parts import Group, Reading
from mlx_zip.engine.pass_costs import PassClock
from mlx_zip.engine.request import Chosen, Request, propose_drafts
from mlx_zip.errors import MlxZipError, PromptTooLongError

log = logging.getLogger(__name__)


class CudaGroup(Group):
    """The requests of one engine that take steps. Methods without a docstring: see `mlx_zip.engine.mlx.group`.

    pad_id: an id that canonical decoding never excludes. ahead: for requests with drafters, False makes the body always
    wait until the host has read the chosen ids; True makes the body wait only if a draft is expected.
    """

    def __init__(self, batch: Batch, pad_id: int, ahead: bool = True) -> None:
        self.requests: list[Request] = []
        self._ahead = ahead
        self._batch, self._pad_id = batch, pad_id
        self._chosen: list[Request] = []  # requests whose chosen ids the codebooks have not read yet
        self._ids: list[int] = []  # the chosen ids, by row
        self._chooser: RowChooser | None = None
        self._must_wait = False  # whether `finish_choosing` chooses the next ids, because a request has a constraint
        self._waits = False  # whether the body has to wait for the ids, because drafts may follow them
        self._clock = PassClock()

    def take_in(self, request: Request) -> CudaGroup:
        """Adds a request whose prompt was read, and returns the group.

        Chooses the request's first id now, unless other requests are in the middle of a step.
        """
        self.requests.append(request)
        if not self._chosen:
            try:
                self._choose_next_ids()
            except BaseException:
                self.requests.remove(request)
                self._chosen = []
                self._batch.unlock_rows()
                raise
        return self

    # ---- one step

    def hand_ids_to_requests(self) -> None:
        self._ids = self._batch.wait_for_ids() if self._chosen else []
        self._record_pass_time()
        for request in self._chosen:
            if request.error is not None:
                continue
            if request.cancelled:
                request.reason = "cancelled"
                continue
            try:
                request.outgrown = request.outgrown or self._batch.room_left(request.cache.row) <= 1
                request.count_chosen(self._chosen_id_of_row(request.cache.row))
            except Exception as error:
                request.error = error

    def _record_pass_time(self) -> None:
        costs = shared_pass_costs([request.drafter for request in self.requests])
        self._clock.note_pass_end(costs, 0 if costs is None else self.length)

    def _chosen_id_of_row(self, row: int) -> Chosen:
        id_, draft = self._ids[row], self._batch.draft(row)
        chosen = Chosen(id_) if self._chooser is None else self._chooser.chosen(row, id_)
        chosen.from_draft = draft is not None and draft.proposes(id_)
        return chosen

    def remove_ended(self) -> list[Request]:
        """Reads the chosen ids into the codebooks; removes and returns the requests that have ended or failed."""
        if self._chosen:
            self._update_codebooks()
        self._batch.unlock_rows()
        for request in self.requests:
            if request.reason is None and request.error is None and request.cancelled and request not in self._chosen:
                request.reason = "cancelled"  # before its first id
        leaving = [request for request in self.requests if request.reason is not None or request.error is not None]
        self.requests, chosen, self._chosen = (
            [request for request in self.requests if request not in leaving],
            self._chosen,
            [],
        )
        for request in leaving:
            self._release_row(request, request in chosen)
        return leaving

    def _update_codebooks(self) -> None:
        by_row = {request.cache.row: request for request in self._chosen}
        self._clock.ids, self._clock.rows = 1, len(self._chosen)
        drafts = self._propose_drafts() if self._waits else {}
        for row, error in self._batch.update_codebooks(self._ids, drafts).items():
            request = by_row[row]
            request.error, request.whole = request.error or error, isinstance(error, MlxZipError)
            self._chosen.remove(request)  # its row has not read the chosen id

    def _propose_drafts(self) -> dict[int, Draft]:
        """Returns new drafts by row, for the ids after the chosen ones. Ends drafts whose next id was not chosen."""
        reading = list[Request]()
        for request in self._chosen:
            row = request.cache.row
            draft = self._batch.draft(row)
            if draft is None or not draft.proposes(self._ids[row]):
                reading.append(request)
                if draft is not None:
                    draft.end()
        if not reading:
            self._clock.ids = 0
            return {}
        began, rows = time.perf_counter(), [request.cache.row for request in reading]
        drafts = propose_drafts(reading, [self._ids[row] for row in rows], list(map(self._max_draft_length, reading)))
        self._clock.exclude_seconds(time.perf_counter() - began)
        self._clock.ids = 1 + max(0 if draft is None else len(draft.ids) for draft in drafts)
        self._clock.rows = len(reading)
        return {row: draft for row, draft in zip(rows, drafts, strict=True) if draft is not None}

    def _max_draft_length(self, request: Request) -> int:
        return 0 if request.error is not None else self._batch.max_draft_length(request.cache.row)

    def _expects_drafts(self) -> bool:
        """Returns whether the next id of any request may be part of a draft or be followed by a draft."""
        if not any(request.drafter for request in self.requests):
            return False
        drafters = [request.drafter if self._max_draft_length(request) else None for request in self.requests]
        if not self._ahead or any(self._batch.draft(request.cache.row) is not None for request in self.requests):
            return True
        return expects_draft(drafters, self.length)

    def _release_row(self, request: Request, has_read: bool) -> None:
        """Releases a request's row, after taking a snapshot if the request's session is to be kept.

        has_read: whether the row has read the last chosen id, which is trimmed if the request was cancelled or failed.
        """
        sequence = request.cache
        if request.error is not None and not isinstance(request.error, MlxZipError):
            request.whole = False
        try:
            if request.keep and request.whole:
                if has_read and (request.reason == "cancelled" or request.error is not None):
                    self._batch.trim_sequence(sequence.row, sequence.book.mark() - 1)
                self._batch.keep(sequence)
        except Exception:  # the answer was delivered: only the session is lost
            log.exception("a session could not be kept")
            request.whole = False
        finally:
            self._batch.release(sequence)

    def launch_pass(self) -> None:
        """Chooses the next ids; if a request has a constraint, leaves the choice to `finish_choosing`."""
        self._must_wait = any(request.submission.constraint is not None for request in self.requests)
        if not self._must_wait:
            self._choose_next_ids()

    def finish_choosing(self) -> None:
        if self._must_wait:
            self._choose_next_ids()

    def _choose_next_ids(self) -> None:
        """Chooses the next id of every request and starts the body over these ids, which stay on the device.

        So the device has work while the host delivers the previous ids.
        """
        plain = all(request.takes_best_id for request in self.requests)
        self._chooser = (
            None if plain else RowChooser({request.cache.row: request for request in self.requests}, self._pad_id)
        )
        self._batch.rows_locked, self._must_wait = True, False
        self._chosen = list(self.requests)
        self._batch.choose_ids(self._chooser)
        self._waits = self._expects_drafts()
        self._batch.start_body(self._waits)

    def drop_requests(self) -> None:
        """Removes all requests and releases their rows, after a step has failed."""
        requests, self.requests, self._chosen, self._chooser, self._must_wait = self.requests, [], [], None, False
        for request in requests:
            self._batch.release(request.cache)
        self._batch.unlock_rows()

    @property
    def length(self) -> int:
        """Number of ids that the longest request holds."""
        return max(request.held_ids for request in self.requests)


class CudaReading(Reading):
    """A request whose prompt is being read. group: the group that the request joins when its prompt has been read."""

    def __init__(self, batch: Batch, group: CudaGroup, request: Request) -> None:
        self.request = request
        self._batch, self._group, self._read_count = batch, group, 0
        self._ids: Uint32s = request.prompt_ids

    @property
    def left(self) -> int:
        """How many ids of the prompt are still to be read."""
        return len(self._ids) - self._read_count

    def read(self, at_most: int, others: Sequence[object] = ()) -> tuple[int, CudaGroup | None]:
        """Reads up to `at_most` ids of the prompt. Returns how many, and the group if the prompt is done, else None.

        Raises `PromptTooLongError` if the batch lacks room for the prompt and one more id, and what `Batch.read`
        raises.
        """
        row, begin = self.request.cache.row, self._read_count
        if (room := self._batch.room_left(row)) <= self.left:
            tokens, why = len(self.request.checked.base_ids), f"the KV caches have room for {self._batch.capacity} ids"
            raise PromptTooLongError.of(tokens, self.request.prompt_tokens_fitting(room - 1), why)
        end = min(begin + at_most, len(self._ids))
        self._batch.read(row, self._ids[begin:end], more=end < len(self._ids))
        self._read_count = end
        self.request.send(Progress(end, len(self._ids)))
        return end - begin, self._group.take_in(self.request) if end == len(self._ids) else None
