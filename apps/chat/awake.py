"""Keeps a Mac at work while an answer is written: macOS slows down apps that nobody looks at, and sleeps when idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

USER_INITIATED = 0x00FFFFFF  # NSActivityUserInitiated: what the user asked for; the idle machine stays awake


@contextmanager
def awake(reason: str) -> Iterator[None]:
    """Inside, macOS neither slows this process down nor lets the idle machine sleep; its screen may go dark.

    reason: what macOS shows of it (`pmset -g assertions`). Does nothing without PyObjC, which comes with pywebview on
    a Mac. Source: NSProcessInfo's beginActivityWithOptions:reason:.
    """
    info = _process_info()
    activity = None if info is None else info.beginActivityWithOptions_reason_(USER_INITIATED, reason)
    try:
        yield
    finally:
        if info is not None:
            info.endActivity_(activity)


def _process_info() -> Any | None:
    """Returns macOS's NSProcessInfo of this process, None where PyObjC is not installed."""
    try:
        return import_module("Foundation").NSProcessInfo.processInfo()
    except ModuleNotFoundError:
        return None
