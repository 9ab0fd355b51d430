"""Shows how far a run is on standard error: as a bar on a terminal, elsewhere as one line per report."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType

from tqdm import tqdm


def duration(seconds: float) -> str:
    """Returns a duration as hours, minutes and seconds, such as 1:02:03."""
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}"


class ProgressBar:
    """Counts and shows steps up to `total`; a context manager. done: steps done before. quiet: show nothing."""

    def __init__(self, total: int, done: int = 0, quiet: bool = False) -> None:
        self.total, self.done, self.quiet = total, done, quiet
        self._first, self._began = done, time.monotonic()
        hidden = quiet or not sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, disable=hidden, unit="step", file=sys.stderr, dynamic_ncols=True, leave=False
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Clears the bar."""
        self._bar.close()

    def say(self, lines: str | Iterable[str]) -> None:
        """Prints lines above the bar, unless quiet."""
        if not self.quiet:
            for line in [lines] if isinstance(lines, str) else lines:
                self._bar.write(line, file=sys.stderr)

    def report(self, figures: str) -> None:
        """Shows figures of the last steps: in the bar, or on a line with the steps done and the time left."""
        if self._bar.disable:
            self.say(f"step {self.done:,} of {self.total:,}: {figures}, {self._left()} left")
        else:
            self._bar.set_postfix_str(figures)

    def advance(self) -> None:
        """Counts one step."""
        self.done += 1
        self._bar.update(1)

    def _left(self) -> str:
        """Returns the time left, estimated from the steps so far."""
        per_step = (time.monotonic() - self._began) / max(1, self.done - self._first)
        return duration(per_step * (self.total - self.done))
