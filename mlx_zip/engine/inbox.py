"""`Inbox`: calls that other threads want made in the engine's thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mlx_zip.errors import EngineStoppedError

Call = Callable[[], Any]
log = logging.getLogger(__name__)


class Inbox:
    """Calls for one thread, the owner. After `shut`, calls are refused with `EngineStoppedError`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Call, Future[Any] | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._shut = False
        self._owner: int | None = None

    def own(self) -> None:
        """Makes the calling thread the owner."""
        self._owner = threading.get_ident()

    def post(self, call: Call) -> None:
        """Has the owner make a call soon; if it fails, that is logged. Raises `EngineStoppedError` after `shut`."""
        self._put(call, None)

    def _put(self, call: Call, future: Future[Any] | None) -> None:
        """Adds a call. future: gets its result, None if nobody waits for it."""
        with self._lock:
            if self._shut:
                raise EngineStoppedError("the engine has stopped")
            self._calls.put((call, future))

    def ask(self, call: Call) -> Any:
        """Has the owner make a call, and returns its result or raises its exception."""
        if threading.get_ident() == self._owner:
            return call()
        future: Future[Any] = Future()
        self._put(call, future)
        return future.result()

    def wake(self) -> None:
        """Makes `take` return soon."""
        with self._lock:
            if not self._shut:
                self._calls.put((lambda: None, None))

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
            if future is not None:
                future.set_exception(EngineStoppedError("the engine has stopped"))


def _make(call: Call, future: Future[Any] | None) -> None:
    """Makes a call. An exception goes to whoever waits, or to the log; what is no `Exception` ends the owner too."""
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
