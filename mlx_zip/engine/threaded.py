"""`ThreadedEngine`: an engine whose own thread loads the model and is the only one to use it.

This module depends on neither MLX nor PyTorch, only on the protocols of `mlx_zip.engine.parts`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.engine.interface import (
    Deliver,
    Engine,
    Figures,
    Likely,
    PromptId,
    SessionInfo,
    Submission,
    Ticket,
)
from mlx_zip.engine.options import ServeOptions
from mlx_zip.engine.parts import Reading, Served
from mlx_zip.engine.request import Request
from mlx_zip.engine.scheduler import Scheduler
from mlx_zip.engine.scored import Compressed, Scored, compress_parts
from mlx_zip.engine.sessions.store import NoSessions
from mlx_zip.engine.submissions import Checks, make_engine_info
from mlx_zip.errors import EngineBusyError, EngineStoppedError, MlxZipError, first_message_line

Load = Callable[[], Any]
MakeStore = Callable[[Any], Any]
log = logging.getLogger(__name__)
LEAST_RETRY_S = 1.0
TEND_S = 0.05  # seconds after which an idle engine goes on writing sessions


class ThreadedEngine(Engine):
    """An engine whose own thread loads the model and is the only one to use it. Other threads exchange Python data.

    load: loads the model; called in the engine's thread. make_store: returns the session store of a loaded model; None
    to keep no sessions. A subclass implements what depends on MLX or PyTorch, such as reading prompts.
    """

    def __init__(
        self, load: Load, name: str, options: ServeOptions | None = None, make_store: MakeStore | None = None
    ) -> None:
        self._options = options or ServeOptions()
        self._inbox, self._lock, self._loaded = _Inbox(), threading.Lock(), threading.Event()
        self._closing, self._deadline = False, 0.0
        self._open: dict[Request, None] = {}  # requests that have not ended
        self._on_death: list[Callable[[BaseException], None]] = []
        self._fault: BaseException | None = None
        self._noted: dict[str, Sequence[int]] = {}  # answers that are not yet in the store
        self._kept: dict[str, int] = {}  # the store's figures
        self._counted = Figures()  # of all requests that have ended
        self._request_s, self._running = 0.0, 0  # moving average of the seconds that a request takes
        self._scheduler: Any = None
        self._store: Any = None
        self._thread = threading.Thread(
            target=self._load_and_serve,
            args=(load, name, make_store or (lambda served: NoSessions())),
            name=name,
            daemon=True,
        )
        self._thread.start()
        self._loaded.wait()
        if self._fault is not None:
            self._thread.join()
            raise self._fault

    # ---- requests

    def submit(self, submission: Submission, deliver: Deliver) -> Ticket:
        self._check_alive()
        request = self._make_request(submission, deliver)
        with self._lock:
            self._check_alive()
            if len(self._open) >= self._options.max_running + self._options.max_waiting:
                waiting = len(self._open) - self._options.max_running
                raise EngineBusyError(f"{waiting} requests wait already; ask again later", self._retry_after_s(waiting))
            self._inbox.post(lambda: self._add_request(request))
            self._open[request] = None
        return request

    def _make_request(self, submission: Submission, deliver: Deliver) -> Request:
        """Checks a submission and returns its request. Raises what `submit` raises if the request cannot be met."""
        return Request(self._checks.check(submission), deliver)

    def _add_request(self, request: Request) -> None:
        """Gives a request to the scheduler; called in the engine's thread."""
        self._scheduler.add_request(request)

    def cancel(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Request)
        if not ticket.ended:
            ticket.cancelled = True
            self._inbox.wake()

    def check_pack(self, pack: Any) -> None:
        self._checks.check_pack(pack)

    def count_prompt_ids(self, base_ids: Sequence[int], pack: Any = None) -> int:
        return self._checks.count_prompt_ids(base_ids, pack)

    def score_prompt_ids(self, base_ids: Sequence[int], top_logprobs: int = 0, pack: Any = None) -> Iterator[PromptId]:
        self._check_alive()
        checked = self._checks.check(Submission(base_ids, max_tokens=1, top_logprobs=top_logprobs, pack=pack))
        params, ids, pack = self._checks.facts.params, checked.base_ids, checked.start
        begun = None if params is None else params.with_start(pack)
        row = compress_parts(begun, ids[:1], ids[1:], pack=pack)  # two parts, so that all base ids but one get a score
        scores = self._inbox.ask(lambda: self._score_in_parts(self._scheduler.served, row, top_logprobs))
        parts = iter(lambda: self._inbox.ask(lambda: next(scores, None)), None)
        return _scores_as_prompt_ids(begun, row, cast(Iterator[Scored], parts))

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineStoppedError("the engine has been closed" if self._fault is None else "a fault has ended it")

    def _retry_after_s(self, waiting: int) -> float:
        """Estimates the seconds until one of `waiting` requests begins."""
        rounds = (waiting + 1) / self._options.max_running
        return max(LEAST_RETRY_S, rounds * self._request_s)

    # ---- sessions

    def note_answer(self, ticket: Ticket, key: str, base_ids: Sequence[int]) -> None:
        assert isinstance(ticket, Request)
        ids = tuple(map(int, base_ids))
        with self._lock:
            self._noted[key] = ids
        self._inbox.post(lambda: self._attach_answer_to_session(ticket, key, ids))

    def _attach_answer_to_session(self, request: Request, key: str, base_ids: tuple[int, ...]) -> None:
        """Notes an answer's base ids in its session or, while there is no session yet, in its request."""
        if request.session is None and not request.ended:
            request.answers[key] = base_ids
            return
        try:
            if request.session is not None:
                self._store.note_answer(request.session, key, base_ids)
        finally:
            with self._lock:
                self._noted.pop(key, None)

    def answers(self) -> Mapping[str, Sequence[int]]:
        with self._lock:
            return ChainMap(dict(self._noted), cast(Any, self._answers))

    def sessions(self) -> list[SessionInfo]:
        return self._inbox.ask(lambda: self._store.sessions())

    def save_session(self, name: str, file: Path) -> None:
        self._inbox.ask(lambda: self._store.save(name, file))

    def load_session(self, file: Path) -> SessionInfo:
        return self._inbox.ask(lambda: self._update_figures(self._store.load(file)))

    def drop_session(self, name: str) -> None:
        self._inbox.ask(lambda: self._update_figures(self._store.drop(name)))

    def purge_sessions(self) -> int:
        return self._inbox.ask(lambda: self._update_figures(self._scheduler.purge_sessions()))

    def _update_figures(self, result: Any = None) -> Any:
        """Publishes the store's current figures to other threads; returns `result`."""
        self._kept = self._store.figures()
        return result

    # ---- figures and the end

    def figures(self) -> Figures:
        with self._lock:
            figures = replace(self._counted, **self._kept, **self._memory_figures())
            for request in self._open:
                request.add_to(figures)
            figures.running = min(self._running, len(self._open))
            figures.waiting = len(self._open) - figures.running
        return figures

    @property
    def alive(self) -> bool:
        return not self._closing and self._fault is None and self._thread.is_alive()

    def call_on_fault(self, call: Callable[[BaseException], None]) -> None:
        with self._lock:
            self._on_death.append(call)
            fault = self._fault
        if fault is not None:
            call(fault)

    def close(self, drain_s: float = 0.0) -> None:
        with self._lock:
            deadline = time.monotonic() + drain_s
            self._deadline = min(self._deadline, deadline) if self._closing else deadline
            self._closing = True
        self._inbox.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the engine's thread

    def _load_and_serve(self, load: Load, name: str, make_store: MakeStore) -> None:
        """Loads the model and serves until the engine is closed or a fault ends it."""
        self._inbox.become_owner()
        try:
            self._load_model(load, name, make_store)
            self._loaded.set()
            self._serve_requests()
            self._scheduler.served.settle()
            self._fail_open_requests(EngineStoppedError("the engine has been closed"))
        except BaseException as fault:
            self._stop_after_fault(fault)
        finally:
            self._loaded.set()
            self._scheduler = self._store = None  # drops the last references to the model
            self._free_thread_resources()

    def _load_model(self, load: Load, name: str, make_store: MakeStore) -> None:
        """Loads the model, and creates the checks, the session store and the scheduler."""
        options = self._options
        served = self._make_served(load, name)
        facts = served.make_facts()
        self.info = make_engine_info(name, facts, options)
        bound = self._max_kv_bytes(served)
        self._checks = Checks(facts, options.max_prompt_tokens, bound)
        self._store = make_store(served)
        self._answers = self._store.answers()
        self._scheduler = self._make_scheduler(served, bound)
        self._update_figures()

    @abstractmethod
    def _make_served(self, load: Load, name: str) -> Served:
        """Loads the model `name`, sets `tokenizer`, and returns the loaded model."""

    def _make_scheduler(self, served: Any, max_kv_bytes: int | None) -> Scheduler:
        """Returns the scheduler. served: from `_make_served`. max_kv_bytes: from `_max_kv_bytes`."""
        make_reading = partial(self._make_reading, served)
        return Scheduler(served, self._store, self._options.max_running, max_kv_bytes, self._forget_ended, make_reading)

    @abstractmethod
    def _make_reading(self, served: Any, request: Request) -> Reading:
        """Returns the `Reading` of a request that has a cache. served: from `_make_served`."""

    @abstractmethod
    def _score_in_parts(self, served: Any, row: Compressed, top: int) -> Iterator[Scored]:
        """Yields the scores of the ids of `row` in chunks. Running requests take steps between two chunks.

        Used in the engine's thread only. top: number of likeliest ids to report per position. Raises `GenerationError`
        if the model is split over several machines.
        """

    def _max_kv_bytes(self, served: Served) -> int | None:
        """Returns the maximum bytes of all KV caches together, None for no bound."""
        return self._options.max_kv_bytes

    @abstractmethod
    def _memory_figures(self) -> dict[str, int]:
        """Returns `memory_bytes` and `peak_memory_bytes` of `Figures`. Called from any thread."""

    def _prepare_device(self) -> None:
        """Prepares the device for requests. Called before requests run."""

    def _free_when_idle(self) -> float | None:
        """Releases what only running requests need once the engine has been idle long enough. Called while it is idle.

        Returns the seconds after which to call this method again, None if nothing is left to release.
        """
        return None

    def _free_thread_resources(self) -> None:
        """Frees the resources of the engine's thread, which is about to end."""

    def _serve_requests(self) -> None:
        """Runs other threads' calls and requests until the engine is closed and nothing is left to do."""
        scheduler, going = self._scheduler, True
        while going:
            going = not self._closing  # requests submitted before the closing are in the inbox now
            if not scheduler.busy:
                self._inbox.run_queued_calls(self._work_when_idle() if going else 0)
            going = going or scheduler.busy
            if scheduler.busy:
                self._prepare_device()
            while scheduler.busy:
                if self._closing and time.monotonic() >= self._deadline:
                    scheduler.cancel_all()
                scheduler.run_round()
                self._running = len(scheduler.running)
                self._inbox.run_queued_calls(0)
            scheduler.served.free_unused_memory()

    def _work_when_idle(self) -> float | None:
        """Does an idle engine's work, such as writing sessions. Returns seconds until the next call, None for never."""
        due = self._free_when_idle()
        return TEND_S if self._store.continue_writing() else due

    def _forget_ended(self, request: Request) -> None:
        self._update_figures()
        took = time.perf_counter() - (request.begun_s or request.submitted_s)
        self._request_s = 0.9 * self._request_s + 0.1 * took if self._request_s else took
        with self._lock:
            self._open.pop(request, None)
            request.add_to(self._counted)
            for key in request.answers:  # the store has them now, or no session was kept
                self._noted.pop(key, None)

    def _stop_after_fault(self, fault: BaseException) -> None:
        """Ends all requests because of a fault, and calls the functions given to `call_on_fault`."""
        stopped = EngineStoppedError(
            f"a fault has ended the engine: {type(fault).__name__}: {first_message_line(fault)}"
        )
        stopped.__cause__ = fault
        with self._lock:
            self._fault = fault
            calls = list(self._on_death)
        if self._loaded.is_set():
            ours = isinstance(fault, MlxZipError)  # its message says all
            log.critical(
                "the engine's thread has ended: %s", first_message_line(fault), exc_info=None if ours else fault
            )
        self._fail_open_requests(stopped)
        for call in calls:
            try:
                call(fault)
            except Exception:
                log.exception("a function given to call_on_fault failed")

    def _fail_open_requests(self, error: EngineStoppedError) -> None:
        """Refuses all further calls and fails all open requests with `error`."""
        self._inbox.refuse_calls()
        if self._scheduler is not None:
            self._scheduler.fail_all(error)
        if self._store is not None:
            self._close_store()
        for request in list(self._open):
            request.error = error
            request.send_last_event()
        with self._lock:
            self._open.clear()
        self._running = 0

    def _close_store(self) -> None:
        """Closes the store, which writes unsaved sessions. Errors are only logged, because the engine ends anyway."""
        try:
            self._store.close()
        except Exception:
            log.exception("sessions could not be written")


def _scores_as_prompt_ids(params: CodecParams | None, row: Compressed, parts: Iterable[Scored]) -> Iterator[PromptId]:
    """Yields each id of `row` with its score.

    params: the codec of `row`, None for a model without hypertokens. parts: scores of the second to the last id of
    `row`, in order.
    """
    book = None if params is None else Codebook(params)

    def expanded(ids: np.ndarray) -> tuple[int, ...]:
        return tuple(map(int, ids if book is None else book.expand(ids)))

    ids = iter(row.ids[:, None])
    before = next(ids)
    yield PromptId(expanded(before))
    for scored in parts:
        for logprob, likely, logprobs in zip(
            scored.logprobs, scored.likely_ids.astype(np.uint32)[..., None], scored.likely_logprobs, strict=True
        ):
            if book is not None:
                book.push(before)
            before = next(ids)
            best = tuple(Likely(expanded(one), float(value)) for one, value in zip(likely, logprobs, strict=True))
            yield PromptId(expanded(before), float(logprob), best)


# ---- calls of other threads

_Call = Callable[[], Any]


class _Inbox:
    """Calls of other threads, run by one thread, the owner.

    `post` and `ask` raise `EngineStoppedError` after `refuse_calls`.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[_Call, Future[Any] | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._shut = False
        self._owner: int | None = None

    def become_owner(self) -> None:
        """Makes the calling thread the owner."""
        self._owner = threading.get_ident()

    def post(self, call: _Call) -> None:
        """Has the owner run `call` soon. An exception that `call` raises is logged."""
        self._put_call(call, None)

    def _put_call(self, call: _Call, future: Future[Any] | None) -> None:
        """Queues a call for the owner. future: gets the result of `call`, None if no thread waits for the result."""
        with self._lock:
            if self._shut:
                raise EngineStoppedError("the engine has stopped")
            self._calls.put((call, future))

    def ask(self, call: _Call) -> Any:
        """Has the owner run `call`, waits, and returns the result or raises the exception of `call`."""
        if threading.get_ident() == self._owner:
            return call()
        future: Future[Any] = Future()
        self._put_call(call, future)
        return future.result()

    def wake(self) -> None:
        """Makes `run_queued_calls` return soon."""
        with self._lock:
            if not self._shut:
                self._calls.put((lambda: None, None))

    def run_queued_calls(self, wait_s: float | None) -> None:
        """Runs all queued calls. If none is queued, waits for one up to `wait_s` seconds, or for ever if None."""
        try:
            entry = self._calls.get(timeout=wait_s) if wait_s != 0 else self._calls.get_nowait()
            while True:
                _run_call(*entry)
                entry = self._calls.get_nowait()
        except queue.Empty:
            return

    def refuse_calls(self) -> None:
        """Refuses all queued and later calls with `EngineStoppedError`."""
        with self._lock:
            self._shut = True
        while True:
            try:
                _, future = self._calls.get_nowait()
            except queue.Empty:
                return
            if future is not None:
                future.set_exception(EngineStoppedError("the engine has stopped"))


def _run_call(call: _Call, future: Future[Any] | None) -> None:
    """Runs a call. Its exception goes to `future`, else to the log. Raises it again if it is not an `Exception`."""
    try:
        result = call()
    except BaseException as error:
        if future is not None:
            future.set_exception(error)
        elif isinstance(error, Exception):
            log.exception("a call that nobody waits for failed")
        if not isinstance(error, Exception):
            raise
    else:
        if future is not None:
            future.set_result(result)
