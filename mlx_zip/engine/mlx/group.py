"""`Group`: requests that take their steps together, either a single request or several as rows of a batch.

A step has parts, so that device and host work at the same time. On a GPU `begin_step` enqueues the body of the step,
over ids that the host has not read. `hand_ids_to_requests` waits for the chosen ids and gives each request its id.
`remove_ended` removes requests that have ended. `launch_pass` enqueues the rest of the step and the choice of the next
ids. Then the caller delivers the ids that were read. `finish_choosing` chooses the next ids if a request has a
constraint, which must see the logits on the host.

Before a request joins a group, `Reading` reads its prompt in chunks, so that other requests take steps in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache, can_trim_prompt_cache, trim_prompt_cache

from mlx_zip.engine.drafts import Draft, expects_draft, have_ids_to_weigh
from mlx_zip.engine.interface import Progress
from mlx_zip.engine.mlx.choosing import Choice, choose_ids
from mlx_zip.engine.mlx.drafted import DraftedPass, choose_exactly, max_draft_length, read_last_id_again
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.pass_costs import PassClock
from mlx_zip.engine.request import Request, propose_drafts
from mlx_zip.errors import MachineError
from mlx_zip.models.batching import (
    extract_cache,
    filter_cache,
    flatten_cache_lists,
    merge_caches,
    merge_empty_caches,
)
from mlx_zip.models.longrope_refill import LongRopeRefill, plan_rope_factors
from mlx_zip.models.rows.zip_state import find_zip_state, kv_caches, submit_parts_early
from mlx_zip.models.two_part_step import TwoPartStep


class Group:
    """Requests with one cache. requests: one per row. cache: cache of the single request, or of the batch.

    logits [B, W]: logits that the next ids are chosen from, None if the ids were already chosen and read. h [B, 1, D]:
    the body's output that the logits come from, for a draft head; None if unknown.
    """

    def __init__(
        self,
        served: Served,
        requests: list[Request],
        cache: list[Any],
        logits: mx.array | None,
        h: mx.array | None = None,
    ) -> None:
        self.served, self.requests, self.cache = served, requests, cache
        self.tokens = [0] * len(requests)  # per row, the id chosen last
        self._begun: mx.array | None = None  # the body's output of a step that began before its ids were read
        self._logits: mx.array | None = logits
        self._choice: Choice | None = None
        self._draft: DraftedPass | None = None
        self._h = h
        self._clock = PassClock()

    # ---- one step

    def choose_next_ids(self) -> None:
        """Chooses the next ids from the logits and starts computing the choice."""
        assert self._logits is not None
        served, state = self.served, find_zip_state(self.cache)
        end = None if state is None else served.model.layout.hyper_id(max(map(len, state.books)))
        with mx.stream(generation_stream):
            pad_id = served.model.config.pad_id if served.hyper else 0
            pick = partial(choose_ids, end=end, pad_id=pad_id, machines=served.machines)
            if self._draft is not None and served.options.draft_exact:
                self._choice = self._choose_exactly(pick, self._logits)
            else:
                best = None if self._draft is None else self._draft.choose_best()
                self._choice = best or pick([request for _, request in self._choosing_rows()], self._logits)
            self._choice.start_computing(*(served.model.row_source.take_rows_to_submit() if served.hyper else ()))
        self._logits = None

    def _choose_exactly(self, pick: Callable[..., Choice], logits: mx.array) -> Choice:
        """Chooses from a draft's logits or, at a near-tie, from a new pass over one id, which ends the draft."""
        read_again = partial(read_last_id_again, self.served, self.cache, self.tokens[0])
        choice, again = choose_exactly(self.requests, logits, pick, read_again)
        if again:
            self._draft, self._clock.ids = None, 0
        return choice

    def begin_step(self) -> None:
        """Enqueues the body of the next step over ids that the host has not read, if the group allows that."""
        served = self.served
        if (
            not served.ahead
            or self._choice is None
            or any(request.submission.constraint is not None for request in self.requests)
            or self._expects_draft()
        ):
            return
        with mx.stream(generation_stream):
            if not served.hyper:
                self._begun = self._read_last_ids(self._choice.y[:, None])
            elif served.long_context is None or len(self.requests) == 1:
                self._h = self._begun = TwoPartStep(served.model, self.cache).run_body(self._choice.y)
            if self._begun is not None:
                mx.async_eval(self._begun)

    def hand_ids_to_requests(self) -> None:
        """Waits for the chosen ids and has each request count its id. An exception becomes the request's `error`."""
        assert self._choice is not None
        chosen = self._choice.wait_for_ids()
        if self.served.hyper:
            self.served.model.row_source.note_submitted_computed()
        for (row, request), one in zip(self._choosing_rows(), chosen, strict=True):
            self.tokens[row] = one.id
            if one.failed and request.error is None:
                request.error = MachineError("the request failed on the first machine")
            if request.error is not None:
                continue
            if request.cancelled:
                request.reason = "cancelled"
                continue
            one.from_draft = self._draft is not None and self._draft.proposes(row, one.id)
            try:
                request.count_chosen(one)
            except Exception as error:
                request.error = error
        self._note_pass_time(self._draft is not None and any(one.from_draft for one in chosen))

    def _note_pass_time(self, goes_on: bool) -> None:
        """Notes the time of the pass that gave the ids just read. goes_on: as in `PassClock.note_pass_end`."""
        drafted, self._clock.rows = any(request.drafter is not None for request in self.requests), len(self.requests)
        costs = self.served.pass_costs if drafted else None
        self._clock.note_pass_end(costs, 0 if costs is None else self.length, self._begun is not None, goes_on)

    def wait_for_choice(self) -> None:
        """Waits until the next ids are chosen. Raises the error of the step from which they are chosen."""
        if self._choice is not None:
            mx.eval(self._choice.y)

    def remove_ended(self) -> list[Request]:
        """Removes and returns the requests that have ended or failed. Each takes its row of the cache with it."""
        leaving = [request for request in self.requests if not request.takes_next_step]
        stay = [row for row, request in enumerate(self.requests) if request not in leaving]
        begun = self._begun is not None
        if begun:
            self._complete_begun_step(stay)
        if leaving:
            self._keep_rows(stay)
        for request in leaving if begun and (stay or not self.served.hyper) else ():
            if request.reason == "cancelled" or request.error is not None:
                self._forget_last_id(request)
        return leaving

    def launch_pass(self) -> None:
        """Enqueues the pass over the chosen ids and, if no request has a constraint, the choice of the next ids."""
        if self._logits is None:
            state = find_zip_state(self.cache)
            early = nullcontext() if state is None or self.served.ahead else submit_parts_early(state)
            with mx.stream(generation_stream), early:
                self._logits = self._next_logits()
        if self.served.hyper:
            self.served.model.row_source.store_computed_rows()  # only now, so that the device has work meanwhile
        constrained = False
        for row, request in self._choosing_rows():
            request.note_read_ids([self.tokens[row]])
            constrained = constrained or request.submission.constraint is not None
        if len(self.requests) == 1:
            self.served.quantize(self.cache)
        if constrained:
            mx.async_eval(self._logits)
        else:
            self.choose_next_ids()

    def _choosing_rows(self) -> list[tuple[int, Request]]:
        """Returns the rows that choose an id next, with their requests; other rows wait for the next pass."""
        rows = None if self._draft is None else self._draft.rows
        return list(enumerate(self.requests)) if rows is None else [(row, self.requests[row]) for row in rows]

    def _next_logits(self) -> mx.array:
        """Returns logits [rows, W] after the ids chosen last.

        If some of these ids are those that a draft proposed, the logits come from the draft's pass, for these rows
        only, and the other rows wait. Otherwise a new pass reads the last id of all rows.
        """
        if self._draft is not None and self._draft.add_chosen_to_cache([self.tokens[row] for row in self._draft.rows]):
            self._h = self._draft.h
            return self._draft.logits
        self._close_draft()
        if any(proposed := self._propose_drafts()):
            self._draft = DraftedPass(self.served, self.requests, self.cache, self.tokens, proposed)
            self._clock.ids, self._h = self._draft.width, self._draft.h
            return self._draft.logits
        self._clock.ids = 1
        return self._read_last_ids(mx.array([[token] for token in self.tokens], mx.uint32))  # on the host already

    def _read_last_ids(self, ids: mx.array) -> mx.array:
        """Returns the logits [B, W] after reading ids [B, 1]."""
        logits, self._h = self.served.read(ids, self.cache)
        return logits[:, -1]

    def _propose_drafts(self) -> list[Draft | None]:
        """Returns a draft or None per request; [] if there is nothing to weigh."""
        drafters, proposed = [request.drafter for request in self.requests], list[Draft | None]()
        if any(drafters):
            began = time.perf_counter()
            self._show_output_to_heads(self.tokens)
            if have_ids_to_weigh(drafters):
                room = max_draft_length(self.served, self.cache)
                proposed = propose_drafts(self.requests, self.tokens, [room] * len(self.requests))
            self._clock.exclude_seconds(time.perf_counter() - began)
        return proposed

    def _show_output_to_heads(self, last: Sequence[int | None]) -> None:
        """Gives draft heads the body's output. last: per request, the id chosen from it, None if not yet known."""
        h = self._h if len(self.requests) == 1 else None
        for request, one in zip(self.requests, last, strict=True):
            if request.drafter is not None:
                request.drafter.note_body_output(h, one, self.cache)

    def _close_draft(self) -> None:
        """Ends a draft, even if not all its ids were chosen. The cache then holds the chosen ids, and no row waits."""
        if self._draft is not None:
            self._draft.close()
        self._draft = None

    def _expects_draft(self) -> bool:
        """Returns whether the next logits may come from a draft; if so, the host must read ids before a step begins."""
        drafters = [request.drafter for request in self.requests]
        if self._draft is not None or not any(drafters):
            return self._draft is not None
        self._show_output_to_heads([None] * len(self.requests))
        return expects_draft(drafters, self.length) and max_draft_length(self.served, self.cache) > 0

    def finish_choosing(self) -> None:
        """Chooses the next ids if `launch_pass` did not."""
        if self._logits is not None:
            self.choose_next_ids()

    def _complete_begun_step(self, stay: Sequence[int]) -> None:
        """Completes the step that `begin_step` began. stay: rows of requests that go on.

        If `stay` is empty, a model with hypertokens undoes the step; a plain model's requests record the id as read.
        """
        begun, self._begun = self._begun, None
        assert begun is not None
        assert self._choice is not None
        if not stay:
            if self.served.hyper:
                self.served.model.trim_cache(self.cache, find_zip_state(self.cache).offset)  # type: ignore[union-attr]
            else:
                for request, token in zip(self.requests, self.tokens, strict=True):
                    request.note_read_ids([token])
            return
        with mx.stream(generation_stream):
            self._clock.ids = 1
            step = TwoPartStep(self.served.model, self.cache)
            logits = step.compute_logits(begun, self._choice.y)[:, -1] if self.served.hyper else begun
            self._logits = logits if len(stay) == len(self.requests) else logits[mx.array(list(stay))]
        if not self.served.hyper:
            for row, request in enumerate(self.requests):
                if row not in stay:
                    request.note_read_ids([self.tokens[row]])

    def _forget_last_id(self, request: Request) -> None:
        """Trims the last id, which was not delivered, from a request's cache, if the cache can be trimmed."""
        assert request.cache is not None
        if self.served.hyper:
            self.served.model.trim_cache(request.cache, request.book.mark() - 1)
        elif can_trim_prompt_cache(request.cache):
            trim_prompt_cache(request.cache, 1)
            request.forget_last()

    # ---- joining and leaving

    def merge_key(self) -> bool | None:
        """Returns whether all rows use LongRoPE's long factors; False for models without LongRoPE.

        Groups with equal results may be merged. Returns None if this group must not be merged now. Called after
        `split_off_rows` has removed the rows whose next step uses other factors.
        """
        if not self.served.batches or self._logits is not None:  # logits: of a step that `begin_step` began
            return None
        return self.served.long_context is not None and find_zip_state(self.cache).long_rope  # type: ignore[union-attr]

    def rows_switching_factors(self) -> list[int]:
        """Returns the rows whose next step uses other LongRoPE factors than their last step."""
        if self.served.long_context is None or self._logits is not None:  # logits: of a step that `begin_step` began
            return []
        long = find_zip_state(self.cache).long_rope  # type: ignore[union-attr]
        rows = enumerate(zip(self.requests, self.tokens, strict=True))
        return [row for row, (request, token) in rows if request.needs_long_factors_for(token) != long]

    def split_off_rows(self, rows: Sequence[int]) -> list[Request]:
        """Removes rows and returns their requests, each with its own cache, to read the last id in a `Reading`.

        Called between `remove_ended` and `launch_pass`.
        """
        out = [self.requests[row] for row in rows]
        for row, request in zip(rows, out, strict=True):
            request.next_ids = np.array(self.tokens[row : row + 1], np.uint32)
        self._keep_rows([row for row in range(len(self.requests)) if row not in rows])
        return out

    def merge_groups(self, others: Sequence[Group]) -> None:
        """Adds the rows of other groups, which must not be used after that.

        Called between `remove_ended` and `launch_pass`.
        """
        for group in (self, *others):
            group._close_draft()
        self._h, self._clock = None, PassClock()  # time spent here must not count as part of a pass
        self.cache = merge_caches(self.served.model, [self.cache, *(other.cache for other in others)])
        for other in others:
            self.requests += other.requests
            self.tokens += other.tokens
        self.bind_requests()

    def _keep_rows(self, stay: Sequence[int]) -> None:
        """Removes all rows that are not in `stay`. The request of each removed row gets its own cache."""
        self._close_draft()
        self._h, self._clock = None, PassClock()  # time spent here must not count as part of a pass
        batch, requests = len(self.requests) > 1, self.requests
        for row, request in enumerate(requests):
            if row not in stay:
                request.cache = extract_cache(self.cache, row) if batch else self.cache
                request.bind_to_row(find_zip_state(request.cache), 0)
        self.requests, self.tokens = [requests[row] for row in stay], [self.tokens[row] for row in stay]
        if not stay:
            self.cache = []
            if self.served.hyper:
                self.served.model.row_source.store_computed_rows()
        elif len(stay) == 1 and batch:
            self.cache = extract_cache(self.cache, stay[0])
        else:
            filter_cache(self.cache, stay)
        self.bind_requests()

    def bind_requests(self) -> None:
        """Makes each request use its row's codebook. A single request also owns the group's cache."""
        state = find_zip_state(self.cache)
        for row, request in enumerate(self.requests):
            request.bind_to_row(state, row)
            request.cache = self.cache if len(self.requests) == 1 else None

    def drop_requests(self) -> None:
        """Frees the cache and removes all requests. Called after the group has failed."""
        self.requests, self.tokens = [], []
        self.cache, self._begun, self._logits, self._choice = [], None, None, None
        self._draft = self._h = None

    @property
    def length(self) -> int:
        """Ids per row that the KV caches hold, padding included."""
        return max(request.held_ids for request in self.requests)


class Reading:
    """Reads a request's `next_ids` into its cache, in chunks.

    If LongRoPE switches factors with these ids, the whole context is first read again, also in chunks. This happens
    with a prompt that continues a session, and with a single id in the middle of an answer.
    """

    def __init__(self, served: Served, request: Request) -> None:
        self.served, self.request = served, request
        self._next = request.next_ids
        self._ids = mx.array(self._next.astype(np.int32))
        self._done = 0
        self._refill: LongRopeRefill | None = None
        self._factors: dict[str, bool] = {}
        if served.long_context is not None:
            self._factors, self._refill = plan_rope_factors(served.model, request.cache, self._next[None])
        self._again = 0 if self._refill is None else self._refill.total

    @property
    def left(self) -> int:
        """Number of ids still to be read, including ids to be read again."""
        return len(self._ids) - self._done + (0 if self._refill is None else self._refill.ids_left)

    @property
    def batch_key(self) -> Hashable | None:
        """Key under which readings can be read in one call; None if this reading must be read alone.

        A reading with a key reads a whole prompt into an empty cache. Equal keys mean equal LongRoPE factors.
        """
        empty = not self._done and not self._again and not self.request.held_ids
        together = (
            empty
            and self.served.batches
            and not any(isinstance(entry, ArraysCache) for entry in flatten_cache_lists(self.request.cache or ()))
        )  # a recurrent state would read the padding
        return tuple(self._factors.values()) if together else None

    def read(self, at_most: int, others: Sequence[Reading] = ()) -> tuple[int, Group | None]:
        """Reads up to `at_most` ids. The last id of all is read in a pass of its own, in addition to `at_most`.

        Returns the number of ids read and, once all ids are read, the group, None before. others: readings with the
        same `batch_key`; if there are any, all prompts are read whole in one call, whatever `at_most` is. Raises what
        the model or the request's processors raise.
        """
        if others:
            return self._read_together([self, *others])
        left, last, group = self.left, len(self._ids) - 1, None
        with mx.stream(generation_stream):
            if self._refill is not None:
                self._read_again(self._refill, at_most)
            else:
                begin, end = self._done, min(self._done + at_most, last)
                if begin < end:
                    self._read_ids(begin, end)
                group = self._make_group(last) if end == last else None
                self._done = end if group is None else last + 1
        total = self._again + last + 1
        self.request.send(Progress(total - self.left, total))
        return max(1, left - self.left), group

    def _read_together(self, readings: Sequence[Reading]) -> tuple[int, Group]:
        """Reads whole prompts as rows of one batch. Returns the number of ids read, padding included, and the group.

        If the model raises, all these requests fail.
        """
        served, requests, lengths = self.served, [one.request for one in readings], [len(one._next) for one in readings]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        ids = np.full((len(readings), longest), served.model.config.pad_id if served.hyper else 0, np.int32)
        for row, one in enumerate(readings):
            ids[row, padding[row] :] = one._next
        caches = [request.cache for request in requests]
        for request in requests:
            request.cache = None  # the batch takes over the codebook, so after an error the cache must not be kept
        with mx.stream(generation_stream):
            cache = merge_empty_caches(served.model, caches, padding)
            if longest > 1:
                served.model(mx.array(ids[:, :-1]), cache=cache, **self._factors)
                mx.eval([entry.state for entry in kv_caches(cache)])
            logits = served.model(mx.array(ids[:, -1:]), cache=cache)[:, -1]
        for request, length in zip(requests, lengths, strict=True):
            request.note_read_ids(request.next_ids)
            request.send(Progress(length, length))
        mx.clear_cache()
        group = Group(served, requests, cache, logits)
        group.bind_requests()
        group.choose_next_ids()
        return ids.size, group

    def _read_again(self, refill: LongRopeRefill, at_most: int) -> None:
        """Reads up to `at_most` ids of the context again. The request's cache changes only once all have been read."""
        refill.read_next(at_most)
        mx.eval([entry.state for entry in refill.filled])
        mx.clear_cache()
        if not refill.ids_left:
            refill.install_refilled_caches()
            self._refill = None

    def _read_ids(self, begin: int, end: int) -> None:
        served, cache = self.served, self.request.cache
        assert cache is not None
        served.model(self._ids[None, begin:end], cache=cache, **self._factors)
        served.quantize(cache)
        mx.eval([entry.state for entry in kv_caches(cache)])
        self.request.note_read_ids(self._next[begin:end])
        mx.clear_cache()

    def _make_group(self, last: int) -> Group:
        """Reads the last id and returns a group of this request only, with the next id chosen."""
        request, served = self.request, self.served
        assert request.cache is not None
        logits, h = served.read(self._ids[None, last:], request.cache)
        request.note_read_ids(self._next[last:])
        served.quantize(request.cache)
        group = Group(served, [request], request.cache, logits[:, -1], h)
        group.choose_next_ids()
        if request.error is not None:
            raise request.error
        return group
