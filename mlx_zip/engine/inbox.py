"""`Inbox`: calls that other threads want made in the engine's thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mlx_zip.errors import EngineStoppedError

Call = Callable[[], Any]


class Inbox:
    """Calls for one thread, the owner. After `shut`, calls are refused with `EngineStoppedError`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Call, Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._shut = False
        self._owner: int | None = None

    def own(self) -> None:
        """Makes the calling thread the owner."""
        self._owner = threading.get_ident()

    def post(self, call: Call) -> Future[Any]:
        """Has the owner make a call soon. Raises `EngineStoppedError` after `shut`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._shut:
                raise EngineStoppedError("the engine has stopped")
            self._calls.put((call, future))
        return future

    def ask(self, call: Call) -> Any:
        """Has the owner make a call, and returns its result or raises its exception."""
        if threading.get_ident() == self._owner:
            return call()
        return self.post(call).result()

    def wake(self) -> None:
        """Makes `take` return soon."""
        with self._lock:
            if not self._shut:
                self._calls.put((lambda: None, Future()))

    def take(self, wait_s: float | None) -> None:
        """Makes all calls that are there; waits for the first one up to `wait_s` seconds, None for ever."""
        try:
            entry = self._calls.get(timeout=wait_s) if wait_s != 0 else self._calls.get_nowait()
            while True:
                _make(*entry)
                entry = self._calls.get_nowait()
        except queue.Empty:
            return

    def shut(self) -> None:
        """Refuses the calls that are left, and all later ones."""
        with self._lock:
            self._shut = True
        while True:
            try:
                _, future = self._calls.get_nowait()
            except queue.Empty:
                return
            future.set_exception(EngineStoppedError("the engine has stopped"))


def _make(call: Call, future: Future[Any]) -> None:
    """Makes a call. An exception goes to whoever waits; what is no `Exception` ends the owner too."""
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(error)
        raise
