"""Where a chat's messages come from and its answers go to: what both kinds of front have in common."""

from __future__ import annotations

import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from mlx_zip.cli.actions import printable
from mlx_zip.cli.chat.conversation import Conversation
from mlx_zip.engine import EngineInfo


class View(Protocol):
    """Where one answer is shown."""

    def feed(self, text: str, length: int) -> None:
        """Shows a piece of text, which came as an id of `length` base tokens."""
        ...

    def think(self, text: str) -> None:
        """Shows a piece of the model's reasoning; called only if a person reads the answer."""
        ...

    def reading(self, read: int, total: int) -> None:
        """Shows how many ids of the prompt have been read, and of how many."""
        ...


class Front(ABC):
    """Where messages come from and answers go to; a context, in which a chat runs.

    colours: whether hypertokens are coloured. asks: whether a person answers. keys: lines for /help on what keys do.
    """

    colours: bool
    asks = False
    keys: Sequence[str] = ()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @abstractmethod
    def greet(self, model: str, info: EngineInfo) -> None:
        """Shows, once, which model answers."""

    @abstractmethod
    def read(self) -> str | None:
        """Returns the next message, None when there are no more."""

    @abstractmethod
    def answering(self, stop: Callable[[], None]) -> AbstractContextManager[View]:
        """Returns a context in which an answer is shown. stop: called in it when the user wants the answer to end."""

    @abstractmethod
    def show_conversation(self, talk: Conversation) -> None:
        """Shows a conversation that was loaded."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Shows a line that is not the model's."""

    @abstractmethod
    def note(self, line: str) -> None:
        """Shows a line that could be missed."""

    def fail(self, line: str) -> None:
        """Shows an error as one line on standard error."""
        print(f"error: {printable(' '.join(line.split())[:1000])}", file=sys.stderr, flush=True)


@contextmanager
def interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Has Ctrl-C call `stop`, and raise nothing, until the block ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
