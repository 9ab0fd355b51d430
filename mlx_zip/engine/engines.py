"""`Engines`: a main model and others to compare it with, opened on demand. Importing this module imports no MLX.

Engines take turns: answers of two of them never run at once on one machine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from mlx_zip.engine.interface import Counts, Deliver, Engine, Event, Failed, Finished, Held, Submission, Ticket
from mlx_zip.engine.request import as_our_error
from mlx_zip.errors import EngineBusyError, EngineError, EngineStoppedError, MlxZipError, first_message_line
from mlx_zip.named import LABELS, PARTNERS, QUALITY

OFF = "off"
_WITHOUT = "the same weights with hypertokens switched off"
_NAMED = "a model that you named"


@dataclass(frozen=True)
class OtherModel:
    """A model to compare the main one with. open: returns its engine.

    kind: "control" (the main model's partner in `named.PARTNERS`), "model" (one that the user named or is offered)
    or "off" (the main model with its hypertokens switched off). label: what the model is, in words. quality: its
    quality figures in words, None if none are known.
    """

    name: str
    kind: str
    open: Callable[[], Engine]
    label: str
    quality: str | None = None


def other_models(
    main: Engine,
    named: str | None = None,
    open_model: Callable[[str], Engine] | None = None,
    offered: Mapping[str, str] = {},
) -> list[OtherModel]:
    """Returns the models that the main one can be compared with.

    named: a model that the user named, None for none. open_model: opens a model by its name; by default without kept
    sessions. offered: further models, name -> what the model is, in words.
    """
    name, opened, found = main.info.name, open_model or _open_by_name, list[OtherModel]()
    kinds = {PARTNERS[name]: "control"} if name in PARTNERS else {}
    if named is not None and named != name:
        kinds.setdefault(named, "model")
    kinds |= {other: "model" for other in offered if other != name and other not in kinds}
    for other, kind in kinds.items():
        words = LABELS[other] if kind == "control" else offered.get(other, _NAMED)
        label = f"{other}: {words}"
        found.append(OtherModel(other, kind, lambda other=other: opened(other), label, QUALITY.get(other)))
    if main.info.codebook_size:
        without = f"{name} without hypertokens"
        found.append(OtherModel(OFF, OFF, lambda: main.without_hypertokens(without), f"{name}: {_WITHOUT}"))
    return found


def _open_by_name(name: str) -> Engine:
    """Returns an engine that keeps no sessions. Raises what `open_engine` raises."""
    from mlx_zip.engine.mlx.mlx_engine import open_engine

    return open_engine(name, sessions=None)


class Engines:
    """A main engine, and at most one of the others at a time; for any thread.

    Answers of two engines never run at once. For that, use `main` in place of the engine given: it takes turns with the
    others. The engine given is not closed here.
    """

    def __init__(self, main: Engine, others: Sequence[OtherModel] = ()) -> None:
        self._turns = _Turns()
        self.main = cast(Engine, InTurn(main, self._turns))
        self.others = {other.name: other for other in others}
        self._changed = threading.Condition()
        self._name, self._engine, self._users = "", None, 0  # the other model that is open, and how many use it
        self._moving = False  # whether another model is being opened or closed
        self._closed = False

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the models that are open."""
        with self._changed:
            return (self.main.info.name, *([self._name] if self._engine is not None else []))

    @contextmanager
    def use(self, name: str) -> Iterator[Engine]:
        """Yields the engine of a model, which stays open until the block ends. Waits and raises as `acquire` does."""
        engine = self.acquire(name)
        try:
            yield engine
        finally:
            self.release(engine)

    def acquire(self, name: str) -> Engine:
        """Returns the engine of a model, opened if it is not open; give it back with `release`.

        Only one model besides the main one is open at a time. If a different one is open, waits until nobody uses it,
        and closes it. Raises `EngineError` for an unknown name, `EngineStoppedError` after `close`, and what opening
        the model raises; the main model and the others stay usable then.
        """
        if name == self.main.info.name:
            return self.main
        other = self.others.get(name)  # another thread may remove it meanwhile
        if other is None:
            known = ", ".join([self.main.info.name, *self.others])
            raise EngineError(f"there is no model {name!r:.80}; there are: {known}")
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (not self._moving and (self._is_open(name) or not self._users))
            )
            if self._closed:
                raise EngineStoppedError("the models have been closed")
            if self._is_open(name):
                self._users += 1
                return self._other_engine
            self._moving = True
        return self._open_instead(other)

    def release(self, engine: Engine) -> None:
        """Gives back an engine that `acquire` returned. The model stays open until another one is asked for."""
        if engine is self.main:
            return
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the other model that is open, which cancels its answers, and refuses further ones."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._moving)
            engine, self._engine, self._name = self._engine, None, ""
            self._changed.notify_all()
        if engine is not None:
            engine.close()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _other_engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _is_open(self, name: str) -> bool:
        return self._engine is not None and self._name == name and self._engine.alive

    def _open_instead(self, other: OtherModel) -> Engine:
        """Opens a model in place of the one that is open, and returns its engine, with one user."""
        try:
            if self._engine is not None:
                self._engine.close()
            with self._changed:
                self._engine, self._name = None, ""
            opened = cast(Engine, InTurn(_open_or_raise_ours(other), self._turns))
            with self._changed:
                self._engine, self._name, self._users = opened, other.name, 1
            return opened
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()


def _open_or_raise_ours(other: OtherModel) -> Engine:
    """Returns the engine of a model. Raises `MlxZipError` with one clear message if the model cannot be opened."""
    try:
        return other.open()
    except MlxZipError:
        raise
    except Exception as error:
        message = f"the model {other.name} cannot be opened: {type(error).__name__}: {first_message_line(error)}"
        raise EngineError(message) from error


# ---- turns

_MOST_HELD = 64
log = logging.getLogger(__name__)


class _Ticket(Ticket):
    """A request's ticket. inner: the engine's ticket, None while held. cancelled: whether the request is to end."""

    def __init__(self) -> None:
        self.inner: Ticket | None = None
        self.cancelled = False


class _Request:
    """A request for an engine. deaf: whether `deliver` has raised, after which it gets no more events."""

    def __init__(self, engine: Engine, submission: Submission, deliver: Deliver) -> None:
        self.engine, self.submission, self.deliver, self.ticket = engine, submission, deliver, _Ticket()
        self.deaf = False


class _Turns:
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
                self._note_begun(request)
            elif len(self._held) >= _MOST_HELD:
                raise EngineBusyError(f"{len(self._held)} requests wait already; ask again later")
            else:
                before = self._engine if self._engine is not request.engine else self._held[0].engine
                assert before is not None
                self._held.append(request)
                self._deliver_or_cancel(
                    request, Held(before.info.name)
                )  # with the lock, so that it comes before `Started`
        if goes:
            self._submit_begun(request)
        return request.ticket

    def cancel(self, ticket: _Ticket, engine: Engine) -> None:
        """Ends a request soon, also one that is held."""
        with self._lock:
            ticket.cancelled = True
            held = next((one for one in self._held if one.ticket is ticket), None)
            if held is not None:
                self._held.remove(held)
        if held is not None:
            self._deliver_or_cancel(held, Finished("cancelled", Counts()))
        elif ticket.inner is not None:
            engine.cancel(ticket.inner)

    def _note_begun(self, request: _Request) -> None:
        """Notes that a request runs; called with the lock held."""
        self._engine = request.engine
        self._running += 1

    def _submit_begun(self, request: _Request) -> None:
        """Submits a request that has begun. Raises what the engine raises."""
        try:
            request.ticket.inner = request.engine.submit(request.submission, partial(self._deliver, request))
        except BaseException:
            self._note_ended()
            raise
        if request.ticket.cancelled:
            request.engine.cancel(request.ticket.inner)

    def _deliver(self, request: _Request, event: Event) -> None:
        """Delivers an event; after the last one, others may run."""
        self._deliver_or_cancel(request, event)
        if isinstance(event, Finished | Failed):
            self._note_ended()

    def _deliver_or_cancel(self, request: _Request, event: Event) -> None:
        """Delivers an event. A receiver that raises gets no more events, and its request is cancelled."""
        if request.deaf:
            return
        try:
            request.deliver(event)
        except Exception:
            log.exception("the receiver of a request's events failed: the request is cancelled")
            request.deaf = True
            self.cancel(request.ticket, request.engine)

    def _note_ended(self) -> None:
        """Notes that a request has ended, and lets held ones in."""
        with self._lock:
            self._running -= 1
            if self._running:
                return
            self._engine, begun = None, list[_Request]()
            while self._held and self._engine in (None, self._held[0].engine):
                begun.append(self._held.popleft())
                self._note_begun(begun[-1])
        for request in begun:
            self._submit_held(request)

    def _submit_held(self, request: _Request) -> None:
        """Submits a request that was held; an error is delivered."""
        try:
            self._submit_begun(request)
        except Exception as error:
            self._deliver_or_cancel(request, Failed(as_our_error(error)))


class InTurn:
    """An engine that takes turns with others. A request that waits gets a `Held` event. Other attributes are `inner`'s.

    If the engine refuses a request that had to wait, the error is delivered as `Failed`.
    """

    def __init__(self, inner: Engine, turns: _Turns) -> None:
        self.inner, self._turns = inner, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, submission: Submission, deliver: Deliver) -> Ticket:
        return self._turns.submit(_Request(self.inner, submission, deliver))

    def cancel(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _Ticket)
        self._turns.cancel(ticket, self.inner)

    def note_answer(self, ticket: Ticket, key: str, base_ids: Sequence[int]) -> None:
        assert isinstance(ticket, _Ticket)
        if ticket.inner is not None:
            self.inner.note_answer(ticket.inner, key, base_ids)
