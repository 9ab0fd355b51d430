"""An orderly end: the first Ctrl-C or SIGTERM asks a run to stop after its step, a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx_zip.training.checkpoint import Progress

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Asked = Callable[[], int | None]


class Stopped(KeyboardInterrupt):
    """A run that was asked to stop, and whose last step is saved. progress: where it stands; number: the signal."""

    def __init__(self, progress: Progress, number: int) -> None:
        super().__init__(f"stopped after step {progress.step}")
        self.progress, self.number = progress, number


@contextmanager
def stop_signals() -> Iterator[Asked]:
    """Gives a function that returns the signal that asked to stop, None before one did; it works after the block too.

    Signals reach the main thread alone: in another thread the function always returns None.
    """
    heard: list[int] = []

    def ask(number: int, _: Any) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS if main}
    try:
        yield lambda: heard[0] if heard else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
