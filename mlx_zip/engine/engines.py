"""`Engines`: a main model and others to compare it with, opened on demand. Importing this module imports no MLX."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mlx_zip import bundled
from mlx_zip.engine.interface import Engine
from mlx_zip.engine.turns import InTurn, Turns
from mlx_zip.errors import EngineError, EngineStoppedError, MlxZipError, first_line

OFF = "off"
_WITHOUT = "the same weights with hypertokens switched off"
_NAMED = "a model that you named"


@dataclass(frozen=True)
class OtherModel:
    """A model to compare the main one with. open: returns its engine.

    kind: "control" (the main model's partner in `bundled.PARTNERS`), "model" (one that the user named or is offered)
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
    name, opened, found = main.info.name, open_model or _opened, list[OtherModel]()
    kinds = {bundled.PARTNERS[name]: "control"} if name in bundled.PARTNERS else {}
    if named is not None and named != name:
        kinds.setdefault(named, "model")
    kinds |= {other: "model" for other in offered if other != name and other not in kinds}
    for other, kind in kinds.items():
        words = bundled.LABELS[other] if kind == "control" else offered.get(other, _NAMED)
        label = f"{other}: {words}"
        found.append(OtherModel(other, kind, lambda other=other: opened(other), label, bundled.QUALITY.get(other)))
    if main.info.codebook_size:
        without = f"{name} without hypertokens"
        found.append(OtherModel(OFF, OFF, lambda: main.without_hypertokens(without), f"{name}: {_WITHOUT}"))
    return found


def _opened(name: str) -> Engine:
    """Returns an engine that keeps no sessions. Raises what `open_engine` raises."""
    from mlx_zip.engine.mlx_engine import open_engine

    return open_engine(name, sessions=None)


class Engines:
    """A main engine, and at most one of the others at a time; for any thread.

    Answers of two engines never run at once. For that, use `main` in place of the engine given: it takes turns with the
    others. The engine given is not closed here.
    """

    def __init__(self, main: Engine, others: Sequence[OtherModel] = ()) -> None:
        self._turns = Turns()
        self.main: Engine = InTurn(main, self._turns)
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

        Only one other model is open at a time: waits until nobody uses that one, and closes it. Raises `EngineError`
        for an unknown name, `EngineStoppedError` after `close`, and what opening the model raises; the main model and
        the others stay usable then.
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
                return self._known
            self._moving = True
        return self._replaced(other)

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
    def _known(self) -> Engine:
        """The other model's engine, which is open."""
        assert self._engine is not None
        return self._engine

    def _is_open(self, name: str) -> bool:
        """Returns whether the other model of this name is open and can serve."""
        return self._engine is not None and self._name == name and self._engine.alive

    def _replaced(self, other: OtherModel) -> Engine:
        """Opens a model in place of the one that is open, and returns its engine, with one user."""
        try:
            if self._engine is not None:
                self._engine.close()
            with self._changed:
                self._engine, self._name = None, ""
            opened = InTurn(_guarded(other), self._turns)
            with self._changed:
                self._engine, self._name, self._users = opened, other.name, 1
            return opened
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()


def _guarded(other: OtherModel) -> Engine:
    """Returns the engine of a model. Raises `MlxZipError` with one clear message if the model cannot be opened."""
    try:
        return other.open()
    except MlxZipError:
        raise
    except Exception as error:
        message = f"the model {other.name} cannot be opened: {type(error).__name__}: {first_line(error)}"
        raise EngineError(message) from error
