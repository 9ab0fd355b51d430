"""Signals that end a process, as exceptions: what was begun is cleaned up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `SystemExit`, so that unfinished files are cleaned up as on Ctrl-C.

    Leaves a signal alone if a handler is already installed for it.
    """

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
