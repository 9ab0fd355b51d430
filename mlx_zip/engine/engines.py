"""`Engines`: a main model and other models to compare with it, opened on demand. Importing this module imports no MLX.

Engines take turns: answers of two engines never run at the same time.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from mlx_zip.engine.interface import Counts, Deliver, Engine, Event, Failed, Finished, Held, Submission, Ticket
from mlx_zip.engine.request import as_mlx_zip_error
from mlx_zip.errors import EngineBusyError, EngineError, EngineStoppedError, MlxZipError, first_message_line
from mlx_zip.named import LABELS, PARTNERS, QUALITY

OFF = "off"
_WITHOUT = "the same weights with hypertokens switched off"
_NAMED = "a model that you named"


@dataclass(frozen=True)
class OtherModel:
    """A model to compare with the main model. open: opens this model and returns its engine.

    kind: "control" for the main model's partner in `named.PARTNERS`, "model" for a model that the user named or is
    offered, "off" for the main model with its hypertokens switched off. label: description of this model for the user.
    quality: this model's quality figures as text, None if unknown.
    """

    name: str
    kind: str
    open: Callable[[], Engine]
    label: str
    quality: str | None = None


def make_other_models(
    main: Engine,
    open_model: Callable[[str], Engine],
    named: str | None = None,
    offered: Mapping[str, str] = {},
) -> list[OtherModel]:
    """Returns the models that `main` can be compared with.

    open_model: opens a model by name. named: name of a model that the user asked for, or None. offered: descriptions
    of further models, by name.
    """
    name, found = main.info.name, list[OtherModel]()
    kinds = {PARTNERS[name]: "control"} if name in PARTNERS else {}
    if named is not None and named != name:
        kinds.setdefault(named, "model")
    kinds |= {other: "model" for other in offered if other != name and other not in kinds}
    for other, kind in kinds.items():
        words = LABELS[other] if kind == "control" else offered.get(other, _NAMED)
        label = f"{other}: {words}"
        found.append(OtherModel(other, kind, lambda other=other: open_model(other), label, QUALITY.get(other)))
    if main.info.codebook_size:
        without = f"{name} without hypertokens"
        found.append(OtherModel(OFF, OFF, lambda: main.without_hypertokens(without), f"{name}: {_WITHOUT}"))
    return found


class Engines:
    """Keeps a main engine open, and at most one of the other models at a time. May be used from any thread.

    Answers of two engines never run at the same time. For this to hold, use the attribute `main` instead of the engine
    passed as `main`. `close` does not close the main engine.
    """

    def __init__(self, main: Engine, others: Sequence[OtherModel] = ()) -> None:
        self._turns = _Turns()
        self.main = cast(Engine, InTurn(main, self._turns))
        self.others = {other.name: other for other in others}
        self._changed = threading.Condition()
        self._name, self._engine, self._users = "", None, 0  # the other open model, and the number of its users
        self._moving = False  # whether another model is being opened or closed
        self._closed = False

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the open models."""
        with self._changed:
            return (self.main.info.name, *([self._name] if self._engine is not None else []))

    def acquire(self, name: str) -> Engine:
        """Returns the engine of the model `name`, and opens the model if needed. Call `release` after use.

        Only one model besides the main model is open at a time. If a different one is open, waits until nobody uses
        that model, and closes it. Raises `EngineError` if the name is unknown, `EngineStoppedError` after `close`, and
        what opening the model raises; after an error all other models remain usable.
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
        return self._replace_other_model(other)

    def release(self, engine: Engine) -> None:
        """Ends the use of an engine that `acquire` returned. The model stays open until another model is acquired."""
        if engine is self.main:
            return
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the other open model, if any, which cancels its answers. `acquire` then raises for other models."""
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

    def _replace_other_model(self, other: OtherModel) -> Engine:
        """Closes the other model that is open, if any, opens `other`, and returns its engine, with one user."""
        try:
            if self._engine is not None:
                self._engine.close()
            with self._changed:
                self._engine, self._name = None, ""
            opened = cast(Engine, InTurn(_open_or_raise_mlx_zip_error(other), self._turns))
            with self._changed:
                self._engine, self._name, self._users = opened, other.name, 1
            return opened
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()


def _open_or_raise_mlx_zip_error(other: OtherModel) -> Engine:
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


class _Request(Ticket):
    """A request for an engine. inner: ticket from the engine, None while held. cancelled: whether the request is to
    end. deaf: whether `deliver` has raised; if so, `deliver` is not called any more.
    """

    def __init__(self, engine: Engine, submission: Submission, deliver: Deliver) -> None:
        self.engine, self.submission, self.deliver = engine, submission, deliver
        self.inner: Ticket | None = None
        self.cancelled = self.deaf = False


class _Turns:
    """Decides which engine's answers run. Requests start in order of arrival; requests of one engine may overlap."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a receiver of `Held` may cancel the request
        self._engine: Engine | None = None  # the engine whose answers run
        self._running = 0
        self._held: deque[_Request] = deque()

    def submit(self, request: _Request) -> Ticket:
        """Runs or holds a request. Raises what the engine raises, and `EngineBusyError` if too many are held."""
        with self._lock:
            if goes := not self._held and self._engine in (None, request.engine):
                self._count_begun(request)
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
        return request

    def cancel(self, request: _Request) -> None:
        """Ends a request soon, whether running or held."""
        with self._lock:
            request.cancelled = True
            if held := request in self._held:
                self._held.remove(request)
        if held:
            self._deliver_or_cancel(request, Finished("cancelled", Counts()))
        elif request.inner is not None:
            request.engine.cancel(request.inner)

    def _count_begun(self, request: _Request) -> None:
        """Counts a request as running. The caller holds the lock."""
        self._engine = request.engine
        self._running += 1

    def _submit_begun(self, request: _Request) -> None:
        """Submits a request that is counted as running to its engine. Raises what the engine raises."""
        try:
            request.inner = request.engine.submit(request.submission, partial(self._deliver, request))
        except BaseException:
            self._count_ended()
            raise
        if request.cancelled:
            request.engine.cancel(request.inner)

    def _deliver(self, request: _Request, event: Event) -> None:
        """Delivers an event. After a request's last event, submits held requests that may now run."""
        self._deliver_or_cancel(request, event)
        if isinstance(event, Finished | Failed):
            self._count_ended()

    def _deliver_or_cancel(self, request: _Request, event: Event) -> None:
        """Delivers an event. If the receiver raises, cancels the request and delivers no more events."""
        if request.deaf:
            return
        try:
            request.deliver(event)
        except Exception:
            log.exception("the receiver of a request's events failed: the request is cancelled")
            request.deaf = True
            self.cancel(request)

    def _count_ended(self) -> None:
        """Counts a request as ended. If none is left running, submits the next held requests, all of one engine."""
        with self._lock:
            self._running -= 1
            if self._running:
                return
            self._engine, begun = None, list[_Request]()
            while self._held and self._engine in (None, self._held[0].engine):
                begun.append(self._held.popleft())
                self._count_begun(begun[-1])
        for request in begun:
            self._submit_held(request)

    def _submit_held(self, request: _Request) -> None:
        """Submits a request that was held. Delivers an error as `Failed`."""
        try:
            self._submit_begun(request)
        except Exception as error:
            self._deliver_or_cancel(request, Failed(as_mlx_zip_error(error)))


class InTurn:
    """The engine `inner`, taking turns with other engines. All attributes not defined here are those of `inner`.

    A request that must wait for another engine gets a `Held` event. If `inner` then refuses the request, the error is
    delivered as `Failed`.
    """

    def __init__(self, inner: Engine, turns: _Turns) -> None:
        self.inner, self._turns = inner, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, submission: Submission, deliver: Deliver) -> Ticket:
        return self._turns.submit(_Request(self.inner, submission, deliver))

    def cancel(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _Request)
        self._turns.cancel(ticket)

    def note_answer(self, ticket: Ticket, key: str, base_ids: Sequence[int]) -> None:
        assert isinstance(ticket, _Request)
        if ticket.inner is not None:
            self.inner.note_answer(ticket.inner, key, base_ids)
