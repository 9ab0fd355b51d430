"""`CudaGroup` holds all requests that take steps, as rows of one batch; `CudaReading` reads a request's prompt.

A step has the parts that `mlx_zip.engine.mlx.group` describes. There is only one group, which a request joins when its
prompt has been read, so groups are never merged or split. If any request may have a draft, the body waits until the
host knows the chosen ids of all requests, so that one call of the body can read the drafts too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mlx_zip.codec.ids import Uint32s
from mlx_zip.cuda.batch import RowHandles
from mlx_zip.cuda.kernels.head import HeadOutput
from mlx_zip.cuda.sampling import exclude_ids
from mlx_zip.cuda.transfers import Download, to_device
from mlx_zip.engine.drafts import Draft, expects_draft
from mlx_zip.engine.interface import Progress
from mlx_zip.engine.pass_costs import PassClock
from mlx_zip.engine.request import Chosen, Request, propose_together
from mlx_zip.engine.searching import Search, search
from mlx_zip.errors import MlxZipError, PromptTooLongError

log = logging.getLogger(__name__)


class CudaGroup:
    """The requests of one engine that take steps. Methods without a docstring: see `mlx_zip.engine.mlx.group`.

    pad_id: an id that canonical decoding never excludes. ahead: for requests with drafters, False makes the body always
    wait until the host has read the chosen ids; True makes the body wait only if a draft is expected.
    """

    def __init__(self, row_handles: RowHandles, pad_id: int, ahead: bool = True) -> None:
        self.requests: list[Request] = []
        self._ahead = ahead
        self._row_handles, self._batch, self._pad_id = row_handles, row_handles.batch, pad_id
        self._chosen: list[Request] = []  # requests whose chosen ids the codebooks have not read yet
        self._ids: list[int] = []  # the chosen ids, by row
        self._chooser: _RowChooser | None = None
        self._must_wait = False  # whether `finish` chooses the next ids, because a request has a constraint
        self._waits = False  # whether the body has to wait for the ids, because drafts may follow them
        self._clock = PassClock()

    def join(self, others: Sequence[object]) -> None:
        """Does nothing: there is one group."""

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
                self._row_handles.release_postponed()
                raise
        return self

    # ---- one step

    def begin(self) -> None:
        """Does nothing: the body was started when the ids were chosen."""

    def read(self) -> None:
        self._ids = self._batch.wait_for_ids() if self._chosen else []
        self._time_pass()
        for request in self._chosen:
            if request.error is not None:
                continue
            if request.handle.cancelled:
                request.reason = "cancelled"
                continue
            try:
                request.outgrown = request.outgrown or self._batch.room_left(request.cache.row) <= 1
                request.count_chosen(self._chosen_of_row(request.cache.row))
            except Exception as error:
                request.error = error

    def _time_pass(self) -> None:
        drafters = (request.drafter for request in self.requests)
        costs = next((drafter.costs for drafter in drafters if drafter is not None), None)
        self._clock.note_read(costs, 0 if costs is None else self.length)

    def _chosen_of_row(self, row: int) -> Chosen:
        id_, draft = self._ids[row], self._batch.draft(row)
        chosen = Chosen(id_) if self._chooser is None else self._chooser.chosen(row, id_)
        chosen.from_draft = draft is not None and draft.proposes(id_)
        return chosen

    def settle(self) -> list[Request]:
        """Reads the chosen ids into the codebooks; removes and returns the requests that have ended or failed."""
        if self._chosen:
            self._update_codebooks()
        self._row_handles.release_postponed()
        for request in self.requests:
            if (
                request.reason is None
                and request.error is None
                and request.handle.cancelled
                and request not in self._chosen
            ):
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
        drafts = self._propose() if self._waits else {}
        for row, error in self._batch.update_codebooks(self._ids, drafts).items():
            request = by_row[row]
            request.error, request.whole = request.error or error, isinstance(error, MlxZipError)
            self._chosen.remove(request)  # its row has not read the chosen id

    def _propose(self) -> dict[int, Draft]:
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
        drafts = propose_together(reading, [self._ids[row] for row in rows], list(map(self._draft_room, reading)))
        self._clock.leave_out(time.perf_counter() - began)
        self._clock.ids = 1 + max(0 if draft is None else len(draft.ids) for draft in drafts)
        self._clock.rows = len(reading)
        return {row: draft for row, draft in zip(rows, drafts, strict=True) if draft is not None}

    def _draft_room(self, request: Request) -> int:
        return 0 if request.error is not None else self._batch.draft_room(request.cache.row)

    def _expects_drafts(self) -> bool:
        """Returns whether the next id of any request may be part of a draft or be followed by a draft."""
        if not any(request.drafter for request in self.requests):
            return False
        drafters = [request.drafter if self._draft_room(request) else None for request in self.requests]
        if not self._ahead or any(self._batch.draft(request.cache.row) is not None for request in self.requests):
            return True
        return expects_draft(drafters, self.length)

    def _release_row(self, request: Request, has_read: bool) -> None:
        """Releases a request's row, after taking a snapshot if the request's session is to be kept.

        has_read: whether the row has read the last chosen id, which is trimmed if the request was cancelled or failed.
        """
        row_handle = request.cache
        if request.error is not None and not isinstance(request.error, MlxZipError):
            request.whole = False
        try:
            if request.keep and request.whole:
                if has_read and (request.reason == "cancelled" or request.error is not None):
                    self._batch.trim(row_handle.row, row_handle.book.mark() - 1)
                self._row_handles.snapshot_of(row_handle)
        except Exception:  # the answer was delivered: only the session is lost
            log.exception("a session could not be kept")
            request.whole = False
        finally:
            self._row_handles.release(row_handle)

    def launch(self) -> None:
        """Chooses the next ids; if a request has a constraint, leaves the choice to `finish`."""
        self._must_wait = any(request.submission.constraint is not None for request in self.requests)
        if not self._must_wait:
            self._choose_next_ids()

    def finish(self) -> None:
        if self._must_wait:
            self._choose_next_ids()

    def _choose_next_ids(self) -> None:
        """Chooses the next id of every request and starts the body over these ids, which stay on the device.

        So the device has work while the host delivers the previous ids.
        """
        plain = all(request.takes_best_id for request in self.requests)
        self._chooser = (
            None if plain else _RowChooser({request.cache.row: request for request in self.requests}, self._pad_id)
        )
        self._row_handles.rows_locked, self._must_wait = True, False
        self._chosen = list(self.requests)
        self._batch.choose_ids(self._chooser)
        self._waits = self._expects_drafts()
        self._batch.start_body(self._waits)

    def drop(self) -> None:
        """Removes all requests and releases their rows, after a step has failed."""
        requests, self.requests, self._chosen, self._chooser, self._must_wait = self.requests, [], [], None, False
        for request in requests:
            self._row_handles.release(request.cache)
        self._row_handles.release_postponed()

    # ---- the interface of groups that can be merged and split

    @property
    def length(self) -> int:
        """Number of ids that the longest request holds."""
        return max(request.held_ids for request in self.requests)

    def key(self) -> None:
        """Returns None: this group is not merged with others."""

    def switching(self) -> list[int]:
        """Returns an empty list: all rows can go on together."""
        return []

    def split(self, rows: Sequence[int]) -> list[Request]:
        """Returns an empty list: the group is never split."""
        return []


class CudaReading:
    """A request whose prompt is being read. group: the group that the request joins when its prompt has been read."""

    def __init__(self, row_handles: RowHandles, group: CudaGroup, request: Request) -> None:
        self.request = request
        self._batch, self._group, self._read_count = row_handles.batch, group, 0
        self._ids: Uint32s = request.prompt_ids

    @property
    def left(self) -> int:
        """How many ids of the prompt are still to be read."""
        return len(self._ids) - self._read_count

    @property
    def key(self) -> None:
        """None: prompts are read one by one, each on its row of the batch."""
        return None

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


# ---- the next id of each row: penalties, constraints, samplers and log-probabilities


class _RowChooser:
    """Chooses an id for each row from the head's output, and holds the log-probabilities that requests asked for.

    requests: by row; a row without a request gets the best id. pad_id: an id that canonical decoding never excludes. If
    choosing for one row raises, that row gets an arbitrary id, and the exception becomes its request's `error`.
    """

    def __init__(self, requests: Mapping[int, Request], pad_id: int) -> None:
        self._requests, self._pad_id = requests, pad_id
        self._top_logprobs: dict[int, _TopLogprobs] = {}

    def __call__(self, head: HeadOutput) -> torch.Tensor:
        """Returns ids [B] int64 for the output of a head, which must have logits."""
        assert head.logits is not None
        ids, searches = head.best.clone(), dict[int, _ConstraintSearch]()
        for row, request in self._requests.items():
            if request.error is not None or request.takes_best_id:
                continue
            try:
                self._choose_row(row, request, head, ids, searches)
            except Exception as error:
                request.error = error
        search(list(searches.values()))
        for row, one in searches.items():
            if one.token is not None:
                ids[row] = one.token
                self._record_logprobs(row, self._requests[row], one.logits, ids)
        return ids

    def _choose_row(
        self, row: int, request: Request, head: HeadOutput, ids: torch.Tensor, searches: dict[int, _ConstraintSearch]
    ) -> None:
        """Chooses the id of one row, or begins the search for it if the request has a constraint."""
        assert head.logits is not None
        logits, excluded = head.logits[row : row + 1].float(), []
        for penalty in request.penalties:
            logits = penalty(logits)
        if request.canonical is not None:
            excluded = request.canonical.excluded()
        if request.submission.constraint is not None:
            searches[row] = _ConstraintSearch(request, logits, excluded, self._pad_id)
            return
        logits = _forbid_excluded(logits, excluded, self._pad_id)
        ids[row] = request.draws(logits.log_softmax(1))[0]
        self._record_logprobs(row, request, logits, ids)

    def _record_logprobs(self, row: int, request: Request, logits: torch.Tensor, ids: torch.Tensor) -> None:
        if (top := request.submission.top_logprobs) is not None:
            self._top_logprobs[row] = _TopLogprobs(logits.log_softmax(1), ids[row : row + 1], top)

    def chosen(self, row: int, id_: int) -> Chosen:
        """Returns the chosen id `id_` of a row, with log-probabilities if its request asked for them."""
        found = self._top_logprobs.get(row)
        return Chosen(id_) if found is None else found.wait(id_)


class _TopLogprobs:
    """Copies the log-probabilities of one row's best ids to the host, in the background.

    logprobs [1, W]; id_ [1]: the chosen id. top: number of best ids.
    """

    def __init__(self, logprobs: torch.Tensor, id_: torch.Tensor, top: int) -> None:
        values, ids = logprobs.topk(top, dim=1)
        own = logprobs.gather(1, id_[None])
        packed = torch.cat([own.double(), values.double(), ids.double()], 1)[0]
        self._top, self._download = top, Download(len(packed), packed.device, packed.dtype)
        self._download.start(packed)

    def wait(self, id_: int) -> Chosen:
        """Waits for the copy. Returns the chosen id and the best ids, each with its log-probability."""
        own, *rest = self._download.wait(1 + 2 * self._top)
        pairs = zip(map(int, rest[self._top :]), rest[: self._top], strict=True)
        return Chosen(id_, own, [pair for pair in pairs if pair[1] > -math.inf])


class _ConstraintSearch(Search):
    """The search for one row's next id in logits [1, W]. pad_id: an id that canonical decoding never excludes."""

    def __init__(self, request: Request, logits: torch.Tensor, excluded: list[int], pad_id: int) -> None:
        super().__init__(request, logits, excluded)
        self._pad_id = pad_id

    def score(self, open_: np.ndarray, excluded: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _forbid_excluded(self.close(self.logits, open_), excluded, self._pad_id)
        return logits, self.request.draws.draw_scores(logits.log_softmax(1))

    def close(self, logits: torch.Tensor, open_: np.ndarray) -> torch.Tensor:
        return logits.masked_fill(to_device(~open_, logits.device)[None], -torch.inf)

    def on_host(self, scores: Any) -> np.ndarray:
        return scores[0].to("cpu", copy=True).numpy()


def _forbid_excluded(logits: torch.Tensor, excluded: list[int], pad_id: int) -> torch.Tensor:
    return exclude_ids(logits, logits.logsumexp(1), [excluded], pad_id) if excluded else logits
