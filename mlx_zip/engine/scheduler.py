"""`Scheduler`: decides which requests wait, have their prompts read, take steps and end. Used in one thread only.

A prompt is read in chunks: of 2,048 ids (mlx-lm's number) while no other request runs or waits, otherwise of 512 ids.
`--prefill-step-size` sets both numbers. A request that arrives while a chunk is read waits until that chunk ends.
Requests take their steps as one batch if reading the padding costs less than reading the weights a second time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from mlx_zip.engine.parts import Group, Reading, Served
from mlx_zip.engine.request import Request
from mlx_zip.engine.sessions.store import Checkout
from mlx_zip.errors import MlxZipError

log = logging.getLogger(__name__)
T = TypeVar("T")
CLEAR_EVERY = 256  # rounds between two releases of cached buffers, as in mlx-lm


class Scheduler:
    """Runs requests on one model.

    store: the kept sessions. max_running: maximum number of running requests, in prefill or taking steps. max_kv_bytes:
    maximum bytes of the KV caches of all running requests, None for no bound. ended: called with each request at its
    end, before the request's memory is released. make_reading: returns the `Reading` of a request that has a cache.
    raises: whether `run_round` raises errors; if False, an error ends the requests in which it occurred.
    """

    def __init__(
        self,
        served: Served,
        store: Any,
        max_running: int,
        max_kv_bytes: int | None,
        ended: Callable[[Request], None],
        make_reading: Callable[[Request], Reading],
        raises: bool = False,
    ) -> None:
        self.served, self.store, self.max_running, self.max_kv_bytes = served, store, max_running, max_kv_bytes
        self.waiting: deque[Request] = deque()
        self.readings: deque[Reading] = deque()
        self.groups: list[Group] = []
        self._ended, self._make_reading, self._rounds, self._raises = ended, make_reading, 0, raises

    @property
    def running(self) -> list[Request]:
        """The requests that have begun and not ended."""
        return [
            *(reading.request for reading in self.readings),
            *(request for group in self.groups for request in group.requests),
        ]

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self.readings or self.groups)

    def add_request(self, request: Request) -> None:
        """Adds a request, which waits until there is room."""
        self.waiting.append(request)

    def run_round(self) -> None:
        """Does one round: ends cancelled requests, starts waiting requests, reads prompts, and takes one step."""
        if self.waiting:
            self._end_cancelled_waiting()
            self._admit_waiting()
        if self.readings:
            self.read_prompts()
        self._take_step()
        if self.max_kv_bytes is not None:
            self._end_latest_if_outgrown(self.max_kv_bytes)
        self._rounds += 1
        if self._rounds % CLEAR_EVERY == 0:
            self.served.free_unused_memory()

    def purge_sessions(self) -> int:
        """Deletes all kept sessions and returns their number. Requests that have not ended will leave no session.

        Raises what the store's `purge` raises.
        """
        self.keep_no_session()
        self.served.clear_draft_cache()
        return self.store.purge()

    def keep_no_session(self) -> None:
        """Marks all requests that have not ended so that their sessions are not kept."""
        for request in (*self.waiting, *self.running):
            request.keep = False

    def cancel_all(self) -> None:
        """Cancels every request."""
        for request in (*self.waiting, *self.running):
            request.cancelled = True

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with `error` and frees its memory. Keeps no session, because a step may be half done."""
        requests = [*self.waiting, *self.running]
        self.waiting.clear()
        self.readings.clear()
        self.groups.clear()
        for request in requests:
            request.error, request.whole = error, False
            try:
                self._end_request(request)
            except Exception:  # the device may be lost; the other requests still get their last event
                log.exception("a request could not give up its memory")

    # ---- waiting requests

    def _end_cancelled_waiting(self) -> None:
        for request in [request for request in self.waiting if request.cancelled]:
            self.waiting.remove(request)
            self._end_request(request)

    def _admit_waiting(self) -> None:
        """Starts waiting requests in order of arrival while there is room."""
        while self.waiting and len(running := self.running) < self.max_running and self._has_room(running):
            request = self.waiting.popleft()
            self._fail_if_it_raises([request], partial(self._begin_request, request))
            if request.ended:
                return  # the request's memory may be free only after the next step

    def _has_room(self, running: Sequence[Request]) -> bool:
        if self.max_kv_bytes is None or not running:
            return True
        needed = sum(max(request.checked.kv_bytes, self._kv_bytes_of_ids(request.held_ids)) for request in running)
        return needed + self.waiting[0].checked.kv_bytes <= self.max_kv_bytes

    def _begin_request(self, request: Request) -> None:
        """Starts a request on its caller's cache, or a session's that holds the prompt's beginning, or a new one."""
        checked, found, differing = request.checked, request.inline.checkout, None
        if found is None:
            differing = self.store.find_difference(checked.base_ids, checked.pack_key)
            found = self.store.checkout(checked.base_ids, checked.pack_key, share=not request.keep, start=checked.start)
            request.session = None if found is None else found.name
        found = found or Checkout(self.served.new_cache(checked.start), 0, 0, "")
        request.begin(self.served, found, differing)
        self.readings.append(self._make_reading(request))

    # ---- prompts

    def read_prompts(self) -> None:
        """Reads chunks of prompts in turn: at least one chunk, and in all up to `prefill_step_size` ids.

        If no other request runs or waits, a chunk has `alone_step_size` ids, for fewer and larger matrix products.
        """
        options = self.served.options
        alone = len(self.readings) == 1 and not self.groups and not self.waiting
        left = chunk = (alone and options.alone_step_size) or options.prefill_step_size
        while self.readings and (left == chunk or min(chunk, self.readings[0].left) <= left):
            reading = self.readings.popleft()
            if reading.request.cancelled:
                self._end_request(reading.request)
                continue
            others = self._take_short_prompts(reading, left)
            requests = [one.request for one in (reading, *others)]
            read, group = self._fail_if_it_raises(requests, partial(reading.read, chunk, others), (1, None))
            left -= read
            if group is not None:
                self.groups += [group] if group not in self.groups else []
            elif reading.request.error is None:
                self.readings.append(reading)

    def _take_short_prompts(self, reading: Reading, at_most: int) -> list[Reading]:
        """Removes from `readings`, and returns, readings of short prompts to be read in one call with `reading`.

        The call has up to `at_most` ids, padding included. At most a fifth of them is padding, because on a CPU padding
        costs as much as real ids.
        """
        found: list[Reading] = []
        longest = total = reading.left
        for other in list(self.readings) if reading.batch_key is not None else ():
            columns, ids = max(longest, other.left), total + other.left
            padded = columns * (len(found) + 2)
            if (
                other.batch_key == reading.batch_key
                and padded <= min(at_most, 1.25 * ids)
                and not other.request.cancelled
            ):
                self.readings.remove(other)
                found.append(other)
                longest, total = columns, ids
        return found

    # ---- steps

    def _take_step(self) -> None:
        """Has every group take one step, and delivers the ids that the previous step chose."""
        before = [request for group in self.groups for request in group.requests]
        if not self._merges_now():
            self._run_for_groups(lambda group: group.begin_step())
        leaving = [request for found in self._run_for_groups(_take_chosen_ids) for request in found]
        self.groups = [group for group in self.groups if group.requests]
        self._regroup()
        self._run_for_groups(lambda group: group.launch_pass())
        for request in before:
            request.send_emitted()
        for request in leaving:
            self._end_request(request)
        self._run_for_groups(lambda group: group.finish_choosing())

    def _run_for_groups(self, part: Callable[[Group], T]) -> list[T]:
        """Runs one part of a step for every group and returns the results. If a group raises, all its requests fail."""
        out = []
        for group in self.groups.copy():
            requests = group.requests.copy()
            try:
                out.append(part(group))
            except Exception as error:
                if self._is_raised(error):
                    raise
                self._fail_requests(requests, error, group)
        return out

    def _merges_now(self) -> bool:
        """Returns whether this step merges groups; if so, the host must read the chosen ids before the step begins."""
        return len(self.groups) > 1 and self.served.batches and any(o for _, *o in self._groups_to_merge(self.groups))

    def _regroup(self) -> None:
        """Removes rows for which LongRoPE's factors change, and merges groups that can take their steps together."""
        for group in list(self.groups):
            requests = list(group.requests)
            if rows := group.rows_switching_factors():
                for request in self._fail_if_it_raises(requests, partial(group.split_off_rows, rows), (), group):
                    reading = self._fail_if_it_raises([request], partial(self._make_reading, request))
                    self.readings += [] if reading is None else [reading]
                self.groups = [group for group in self.groups if group.requests]
        if len(self.groups) < 2:
            return
        by_key: dict[bool, list[Group]] = {}
        for group in self.groups:
            key = group.merge_key()
            if key is not None:
                by_key.setdefault(key, []).append(group)
        for groups in by_key.values():
            for first, *others in self._groups_to_merge(groups):
                if others:
                    requests = [request for group in (first, *others) for request in group.requests]
                    self._fail_if_it_raises(requests, partial(first.merge_groups, others), None, first)
                    self.groups = [group for group in self.groups if group not in others]

    def _groups_to_merge(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Returns lists of groups to merge; in each list the group with the most rows comes first.

        Merging two groups saves one read of the weights per step, but adds padding to the shorter group's KV caches. So
        groups are merged if this padding takes no more bytes than the weights.
        """
        if len(groups) < 2:
            return [list(groups)] if groups else []
        most = self.served.weight_bytes // max(1, self.served.kv_bytes_per_id)
        out: list[list[Group]] = []
        for group in sorted(groups, key=lambda group: -group.length):
            longest = out[-1][0].length if out else 0
            if out and (longest - group.length) * len(group.requests) <= most:
                out[-1].append(group)
            else:
                out.append([group])
        return [sorted(some, key=lambda group: -len(group.requests)) for some in out]

    # ---- memory

    def _kv_bytes_of_ids(self, ids: int) -> int:
        return ids * self.served.kv_bytes_per_id

    def _end_latest_if_outgrown(self, most: int) -> None:
        """If the KV caches have over `most` bytes, ends the request that began last, as if it had reached its limit."""
        requests = [request for group in self.groups for request in group.requests]
        if requests and self._kv_bytes_of_ids(sum(request.held_ids for request in requests)) > most:
            max(requests, key=lambda request: request.begun_s).outgrown = True

    # ---- ends

    def _fail_if_it_raises(
        self, requests: Sequence[Request], call: Callable[[], Any], otherwise: Any = None, group: Group | None = None
    ) -> Any:
        """Returns the result of `call`. If `call` raises, fails `requests` and returns `otherwise`."""
        try:
            return call()
        except Exception as error:
            if self._is_raised(error):
                raise
            self._fail_requests(requests, error, group)
            return otherwise

    def _is_raised(self, error: Exception) -> bool:
        """Returns whether `run_round` raises `error`; if not, only the requests in which it occurred fail.

        On several machines an error that is not an `MlxZipError` is raised, because the other machines may not have it
        and would go on alone.
        """
        return self._raises or (self.served.machines is not None and not isinstance(error, MlxZipError))

    def _fail_requests(self, requests: Sequence[Request], error: Exception, group: Group | None = None) -> None:
        """Ends requests with an error. group: the group that failed, which is removed."""
        if not isinstance(error, MlxZipError):
            log.error("%d request(s) failed", len(requests), exc_info=error)
        if group is not None:
            group.drop_requests()
            self.groups.remove(group)
        for request in requests:
            if group is not None or not isinstance(error, MlxZipError):
                request.whole = False  # what the cache holds is unknown now
            request.error = request.error or error
            self._end_request(request)

    def _end_request(self, request: Request) -> None:
        """Ends a request: delivers its last event, and keeps its session."""
        if request.ended:
            return
        if self._raises and request.error is not None:
            raise request.error
        request.send_emitted()
        request.ended = True
        request.send_last_event()
        try:
            self._keep_session(request)
        finally:
            self._ended(request)
            request.release_memory()
            if not request.keep:
                self.served.clear_draft_cache()

    def _keep_session(self, request: Request) -> None:
        """Puts a request's cache into the store, if the cache is whole and the request is to be kept."""
        cache, request.cache = request.cache, None
        try:
            self._put_in_store(request, cache)
        finally:
            if cache is not None:
                self.served.free(cache)

    def _put_in_store(self, request: Request, cache: Any) -> None:
        """Stores `cache` as the request's session. If it is None or not to be kept, only releases the session used."""
        if cache is None or not request.whole or not request.keep or not request.held_ids:
            if request.session is not None:
                self.store.release(request.session)
                request.session = None
            return
        try:
            request.session = self.store.put(
                cache,
                base_ids=request.held_base_ids(),
                pack_key=request.checked.pack_key,
                name=request.session,
                answers=request.answers,
                random_state=request.draws.state,
            )
        except Exception:  # the answer was delivered: only the session is lost
            log.exception("a session could not be kept")
            self.store.release(request.session or "")
            request.session = None


def _take_chosen_ids(group: Group) -> list[Request]:
    """Gives each request of a group its chosen id. Removes and returns the requests that have ended."""
    group.hand_ids_to_requests()
    return group.remove_ended()
