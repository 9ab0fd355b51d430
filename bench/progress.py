"""Shows on standard error what a bench measures and how far it is."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from .record import load_before

EVERY_S = 20.0  # seconds between two lines where standard error is not a terminal


def header(bench: str, model: str, device: dict[str, Any], plan: str) -> None:
    """Prints one line: the bench, model and device, how busy the machine was before, and `plan`: what will be run."""
    load = load_before()
    idle = "" if load["idle_share"] is None else f", processors {load['idle_share']:.0%} idle"
    where = f"{device['chip']} ({device['device']})"
    print(f"bench {bench}: {model} on {where}; {plan}; load average {load['load_average']}{idle}", file=sys.stderr)


class Progress:
    """Shows how many of `total` parts are finished: a bar on a terminal, else a line about every `EVERY_S` seconds.

    part: the word for a part, such as "trial".
    """

    def __init__(self, part: str, total: int, out: TextIO | None = None) -> None:
        self.part, self.total, self.out = part, total, out or sys.stderr
        self.done, self.begun = 0, time.monotonic()
        self._said = self.begun

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.out.isatty():
            self.out.write("\r\x1b[K")
            self.out.flush()

    def step(self) -> None:
        """Counts one more finished part and shows it."""
        self.done += 1
        now = time.monotonic()
        left = (now - self.begun) / self.done * (self.total - self.done)
        line = f"{self.part} {self.done} of {self.total}, about {left:.0f} s left"
        if self.out.isatty():
            filled = 30 * self.done // self.total
            self.out.write(f"\r\x1b[K[{'#' * filled:<30}] {line}")
            self.out.flush()
        elif now - self._said >= EVERY_S:
            self._said = now
            print(line, file=self.out, flush=True)
