"""Progress on stderr: a bar on a terminal, and elsewhere a line now and then, with rate and time left."""

from __future__ import annotations

import sys
import time
from typing import Any

INTERVAL_S = 30.0


class Progress:
    """Shows progress on stderr. Use as `with Progress(...) as count`, and call `count(n)` when n more are done.

    total: the number of units to do. unit: their name, in the plural. name: a path or name of what is worked on, of
    which the last part is shown. On a terminal a bar is drawn, and removed at the end; elsewhere a line is printed at
    most every `interval_s` seconds.
    """

    def __init__(self, total: int, unit: str, name: str, interval_s: float = INTERVAL_S) -> None:
        self.total, self.unit, self.name, self.interval_s = total, unit, name.rstrip("/").rsplit("/", 1)[-1], interval_s
        self.done, self._begun, self._bar = 0, time.monotonic(), self._new_bar()
        self._printed_at = self._begun

    def _new_bar(self) -> Any:
        """Returns a tqdm bar, None if stderr is no terminal."""
        if sys.stderr is None or not sys.stderr.isatty():
            return None
        from tqdm import tqdm

        return tqdm(total=self.total, unit=f" {self.unit}", desc=self.name, file=sys.stderr, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int) -> None:
        """Adds `done` units to those done, and updates what is shown."""
        self.done += done
        if self._bar is not None:
            self._bar.update(done)
        elif time.monotonic() - self._printed_at >= self.interval_s and self.done < self.total:
            self._printed_at = time.monotonic()
            self._print()

    def _print(self) -> None:
        """Prints one line: units done, rate and time left."""
        rate = self.done / max(1e-9, time.monotonic() - self._begun)
        left = (self.total - self.done) / rate if self.done else 0.0
        line = f"{self.name}: {self.done:,} of {self.total:,} {self.unit}, {rate:.3g} per s, {clock(left)} left"
        print(line, file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def clock(seconds: float) -> str:
    """Returns a duration as m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
