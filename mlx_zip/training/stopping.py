"""Stops a run cleanly: the first Ctrl-C, SIGTERM or SIGHUP stops it after the current step, a second one at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx_zip.training.checkpoint import Progress

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Asked = Callable[[], int | None]  # returns the stop signal received, None before one


class Stopped(KeyboardInterrupt):
    """Raised when a signal has stopped a run, whose last step is saved. progress: the run's. number: the signal's."""

    def __init__(self, progress: Progress, number: int) -> None:
        super().__init__(f"stopped after step {progress.step}")
        self.progress, self.number = progress, number


@contextmanager
def stop_signals() -> Iterator[Asked]:
    """Yields a function that returns the first stop signal received, or None; it may be called after the block too.

    Only the main thread receives signals: in another thread the function always returns None. A signal that is ignored,
    as SIGHUP under nohup, stays ignored.
    """
    received: list[int] = []

    def ask(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in STOP_SIGNALS if main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in ours}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
