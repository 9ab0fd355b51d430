"""Engines that take turns: answers of two engines never run at once on one machine."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_zip.engine.interface import (
    Ceiling,
    Counts,
    Deliver,
    Engine,
    Event,
    Failed,
    Figures,
    Finished,
    Held,
    PromptId,
    SessionInfo,
    Submission,
    Ticket,
)
from mlx_zip.errors import EngineBusyError, EngineError, MlxZipError, first_line

MOST_HELD = 64
log = logging.getLogger(__name__)


class _Ticket(Ticket):
    """A request. inner: the engine's own ticket, None while the request is held. cancelled: whether it is to end."""

    def __init__(self) -> None:
        self.inner: Ticket | None = None
        self.cancelled = False


class _Request:
    """A request for an engine. deaf: whether its receiver has failed."""

    def __init__(self, engine: Engine, submission: Submission, deliver: Deliver) -> None:
        self.engine, self.submission, self.deliver, self.ticket = engine, submission, deliver, _Ticket()
        self.deaf = False


class Turns:
    """Decides which engine's answers run. Requests start in the order they came; those of one engine may overlap."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a receiver may cancel in the middle of `Held`
        self._engine: Engine | None = None  # whose answers run
        self._running = 0
        self._held: deque[_Request] = deque()

    def submit(self, request: _Request) -> Ticket:
        """Runs a request now or later. Raises what the engine raises, and `EngineBusyError` if too many are held."""
        with self._lock:
            if goes := not self._held and self._engine in (None, request.engine):
                self._begin(request)
            elif len(self._held) >= MOST_HELD:
                raise EngineBusyError(f"{len(self._held)} requests wait already; ask again later")
            else:
                before = self._engine if self._engine is not request.engine else self._held[0].engine
                assert before is not None
                self._held.append(request)
                self._tell(request, Held(before.info.name))  # with the lock, so that it comes before `Started`
        if goes:
            self._run(request)
        return request.ticket

    def cancel(self, ticket: _Ticket, engine: Engine) -> None:
        """Ends a request soon, also one that is held."""
        with self._lock:
            ticket.cancelled = True
            held = next((one for one in self._held if one.ticket is ticket), None)
            if held is not None:
                self._held.remove(held)
        if held is not None:
            self._tell(held, Finished("cancelled", Counts()))
        elif ticket.inner is not None:
            engine.cancel(ticket.inner)

    def _begin(self, request: _Request) -> None:
        """Notes that a request runs. The lock is held."""
        self._engine = request.engine
        self._running += 1

    def _run(self, request: _Request) -> None:
        """Submits a request that has begun. Raises what the engine raises."""
        try:
            request.ticket.inner = request.engine.submit(request.submission, partial(self._deliver, request))
        except BaseException:
            self._ended()
            raise
        if request.ticket.cancelled:
            request.engine.cancel(request.ticket.inner)

    def _deliver(self, request: _Request, event: Event) -> None:
        """Delivers an event; after the last one, others may run."""
        self._tell(request, event)
        if isinstance(event, Finished | Failed):
            self._ended()

    def _tell(self, request: _Request, event: Event) -> None:
        """Delivers an event. A receiver that raises gets no more events, and its request is cancelled."""
        if request.deaf:
            return
        try:
            request.deliver(event)
        except Exception:
            log.exception("the receiver of a request's events failed: the request is cancelled")
            request.deaf = True
            self.cancel(request.ticket, request.engine)

    def _ended(self) -> None:
        """Notes that a request has ended, and lets held ones in."""
        with self._lock:
            self._running -= 1
            if self._running:
                return
            self._engine, begun = None, list[_Request]()
            while self._held and self._engine in (None, self._held[0].engine):
                begun.append(self._held.popleft())
                self._begin(begun[-1])
        for request in begun:
            self._run_held(request)

    def _run_held(self, request: _Request) -> None:
        """Submits a request that was held; an error is delivered."""
        try:
            self._run(request)
        except MlxZipError as error:
            self._tell(request, Failed(error))
        except Exception as error:
            self._tell(request, Failed(EngineError(f"the request failed: {type(error).__name__}: {first_line(error)}")))


class InTurn(Engine):
    """An engine that takes turns with others. A request that waits for another engine's answers gets a `Held` event.

    If the engine refuses a request that had to wait, the error is delivered as `Failed`.
    """

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self.inner, self._turns = engine, turns
        self.tokenizer, self.info = engine.tokenizer, engine.info

    def submit(self, submission: Submission, deliver: Deliver) -> Ticket:
        return self._turns.submit(_Request(self.inner, submission, deliver))

    def cancel(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _Ticket)
        self._turns.cancel(ticket, self.inner)

    def check_pack(self, pack: Any) -> None:
        self.inner.check_pack(pack)

    def prompt_size(self, base_ids: Sequence[int], pack: Any = None) -> int:
        return self.inner.prompt_size(base_ids, pack)

    def prompt_ids(self, base_ids: Sequence[int], top_logprobs: int = 0, pack: Any = None) -> Iterator[PromptId]:
        return self.inner.prompt_ids(base_ids, top_logprobs, pack)

    def note_answer(self, ticket: Ticket, key: str, base_ids: Sequence[int]) -> None:
        assert isinstance(ticket, _Ticket)
        if ticket.inner is not None:
            self.inner.note_answer(ticket.inner, key, base_ids)

    def answers(self) -> Mapping[str, Sequence[int]]:
        return self.inner.answers()

    def sessions(self) -> list[SessionInfo]:
        return self.inner.sessions()

    def save_session(self, name: str, file: Path) -> None:
        self.inner.save_session(name, file)

    def load_session(self, file: Path) -> SessionInfo:
        return self.inner.load_session(file)

    def drop_session(self, name: str) -> None:
        self.inner.drop_session(name)

    def purge_sessions(self) -> int:
        return self.inner.purge_sessions()

    def without_hypertokens(self, name: str) -> Engine:
        return self.inner.without_hypertokens(name)

    def unwire(self) -> bool:
        return self.inner.unwire()

    def ceiling(self) -> Ceiling | None:
        return self.inner.ceiling()

    def figures(self) -> Figures:
        return self.inner.figures()

    @property
    def alive(self) -> bool:
        return self.inner.alive

    def on_death(self, call: Callable[[BaseException], None]) -> None:
        self.inner.on_death(call)

    def close(self, drain_s: float = 0.0) -> None:
        self.inner.close(drain_s)
