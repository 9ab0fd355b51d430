"""Chooses the next id of each row of a batch: processors, constraints, samplers and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.engine import searching
from mlx_zip.engine.request import Chosen, Request
from mlx_zip.engine.sampling.canonical import exclude_ids
from mlx_zip.engine.sampling.penalties import PenaltyTerms
from mlx_zip.models.machines import ids_of_first_machine


@dataclass(frozen=True)
class Choice:
    """Chosen ids y [B], perhaps not yet evaluated.

    packed [B, 2 + 2K] int32: chosen id, its log-probability, the K most likely ids, and their log-probabilities; None
    if no row reports log-probabilities. Floats are stored as their bits, so that one transfer to the host is enough.
    top: per row, the number of likely ids to report, None for no log-probabilities. failed [B]: 1 for requests that
    failed on the first of several machines; None if there is one machine. logprobs [B, W]: the log-probabilities that
    the ids were chosen from, None if no row keeps them.
    """

    y: mx.array
    packed: mx.array | None
    top: Sequence[int | None]
    failed: mx.array | None = None
    logprobs: mx.array | None = None

    def start_computing(self, *others: mx.array) -> None:
        """Starts computing the choice, along with other arrays."""
        more = [one for one in (self.packed, self.failed, self.logprobs) if one is not None]
        mx.async_eval(*more, self.y, *others)

    def wait_for_ids(self) -> list[Chosen]:
        """Returns the chosen ids; waits until they are computed."""
        if self.packed is None:
            ids: Any = self.y.tolist()
            chosen = [Chosen(one) for one in ids]
        else:
            chosen = [_unpack_chosen_id(row, top) for row, top in zip(np.array(self.packed), self.top, strict=True)]
        if self.logprobs is not None:
            for row, one in enumerate(chosen):
                one.logprobs = self.logprobs[row]
        if self.failed is not None:
            failed: Any = self.failed.tolist()
            for one, flag in zip(chosen, failed, strict=True):
                one.failed = bool(flag)
        return chosen


def _unpack_chosen_id(ints: np.ndarray, top: int | None) -> Chosen:
    """Returns the chosen id in a row [2 + 2K] of `Choice.packed`. top: as in `Choice`."""
    if top is None:
        return Chosen(int(ints[0]))
    floats, width = ints.view(np.float32), (len(ints) - 2) // 2
    pairs = zip(ints[2 : 2 + width].tolist(), floats[2 + width :].tolist(), strict=True)
    likely = sorted((pair for pair in pairs if pair[1] > -math.inf), key=lambda pair: -pair[1])
    return Chosen(int(ints[0]), float(floats[1]), likely[:top])


def choose_ids(
    requests: Sequence[Request],
    logits: mx.array,
    end: int | None,
    pad_id: int,
    machines: mx.distributed.Group | None = None,
) -> Choice:
    """Chooses one id per row of logits [B, W], one row per request.

    end: index of the column from which on all columns are -inf, None if there is none. pad_id: an id that canonical
    decoding never excludes. machines: group of machines that the model is split over; the first machine chooses for
    all. If a row's processors, constraint or sampler raise, the exception becomes the request's `error`, and the row's
    id is arbitrary.
    """
    forced: dict[int, mx.array] = {}
    logits = _process_logits(requests, logits, forced, end, pad_id)
    logprobs = logits - mx.logsumexp(logits[:, :end], axis=-1, keepdims=True)
    y = _draw_ids(requests, logprobs, forced)
    top, failed = [request.submission.top_logprobs for request in requests], None
    if machines is not None:
        own = mx.array([request.error is not None for request in requests], mx.uint32)
        y, failed = mx.split(ids_of_first_machine(mx.concatenate([y.astype(mx.uint32), own]), machines), 2)
    kept = logprobs if any(request.inline.logprobs for request in requests) else None
    return Choice(y, _pack_logprobs(y, logprobs, top), top, failed, kept)


def _draw_ids(requests: Sequence[Request], logprobs: mx.array, forced: dict[int, mx.array]) -> mx.array:
    """Returns ids [B]: a row's id in `forced`, else its sampler's draw. A sampler shared by all rows is called once."""
    shared = requests[0].draws
    if (
        not forced
        and not shared.greedy
        and all(request.draws is shared and request.error is None for request in requests)
    ):
        try:
            return shared(logprobs).astype(mx.uint32)
        except Exception as error:
            for request in requests:
                request.error = error
    for row, request in enumerate(requests):
        if row not in forced and not request.draws.greedy and request.error is None:
            try:
                forced[row] = request.draws(logprobs[row : row + 1])
            except Exception as error:
                request.error = error
    y = mx.argmax(logprobs, axis=-1)
    if not forced:
        return y
    return mx.concatenate([forced.get(row, y[row : row + 1]).astype(mx.uint32) for row in range(len(requests))])


def _process_logits(
    requests: Sequence[Request], logits: mx.array, forced: dict[int, mx.array], end: int | None, pad_id: int
) -> mx.array:
    """Returns logits [B, W] after each row's processors. Adds the id of each row with a constraint to `forced`."""
    if not any(request.penalties or request.submission.constraint is not None for request in requests):
        return exclude_ids(logits, [request.excluded_ids() for request in requests], pad_id, end)
    rows: list[mx.array] = []
    searches: dict[int, Search] = {}
    for row, request in enumerate(requests):
        rows.append(logits[row : row + 1])
        try:
            if request.error is None:
                found = _process_row_logits(request, rows[row], end)
                if isinstance(found, Search):
                    searches[row] = found
                else:
                    rows[row] = found
        except Exception as error:
            request.error = error
    searching.search_next_ids(list(searches.values()), mx.eval)
    for row, one in searches.items():
        if one.token is not None:
            rows[row], forced[row] = one.logits, mx.array([one.token], mx.uint32)
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)


def _process_row_logits(request: Request, logits: mx.array, end: int | None) -> mx.array | Search:
    """Returns one row's logits [1, W] after its processors, or the search for its id if it has a constraint."""
    reads = any(not isinstance(one, PenaltyTerms) for one in request.penalties)  # `PenaltyTerms` read the codebook
    tokens: Any = mx.array(np.asarray(request.read_ids, np.int32)) if reads else None
    for processor in request.penalties:
        logits = processor(tokens, logits)
    if request.submission.constraint is not None:
        return Search(request, logits, end)
    return exclude_ids(logits, [request.excluded_ids()])


def _pack_logprobs(y: mx.array, logprobs: mx.array, top: Sequence[int | None]) -> mx.array | None:
    """Returns `Choice.packed` for ids y [B] chosen from logprobs [B, W]. top: as in `Choice`."""
    if set(top) == {None}:
        return None
    ids, width = y.astype(mx.int32)[:, None], max(one or 0 for one in top)
    logprobs = logprobs.astype(mx.float32)
    likely = mx.argpartition(-logprobs, kth=max(width - 1, 0), axis=-1)[:, :width].astype(mx.int32)
    floats = [mx.take_along_axis(logprobs, at, axis=-1) for at in (ids, likely)]
    return mx.concatenate([ids, floats[0].view(mx.int32), likely, floats[1].view(mx.int32)], axis=1)


# ---- choosing under a constraint, as described in `mlx_zip.engine.searching`


class Search(searching.Search):
    """The search for one row's next id in logits [1, W]. end: as in `choose_ids`."""

    def __init__(self, request: Request, logits: mx.array, end: int | None) -> None:
        super().__init__(request, logits)
        self._end = end

    def score_open_ids(self, open_: np.ndarray, excluded: list[int]) -> tuple[mx.array, mx.array]:
        logits = exclude_ids(self.mask_closed_ids(self.logits, open_), [excluded])
        logprobs = logits - mx.logsumexp(logits[:, : self._end], axis=-1, keepdims=True)
        return logits, self.request.draws.scores(logprobs).astype(mx.float32)

    def mask_closed_ids(self, logits: mx.array, open_: np.ndarray) -> mx.array:
        return mx.where(mx.array(open_)[None], logits, -mx.inf)

    def copy_to_host(self, scores: Any) -> np.ndarray:
        return np.array(scores[0])
