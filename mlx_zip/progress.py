"""Progress on stderr: a bar on a terminal, and elsewhere a line now and then, with rate and time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

INTERVAL_S = 30.0
SCALED = ("byte", "id")  # units that a bar counts in thousands and millions


class ProgressBar:
    """Counts units of work and shows how many are done. Use as `with ProgressBar(...) as count`, and call `count(n)`.

    total: number of units to do, None if not known. unit: name of one unit. name: the task, or a path of which the last
    part is shown. done: number of units done at the start. shown: whether anything is shown. On a terminal a bar is
    drawn, and removed at the end. Elsewhere a line is printed at most every `interval_s` seconds.
    """

    def __init__(
        self,
        total: int | None,
        unit: str,
        name: str,
        done: int = 0,
        shown: bool = True,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.total, self.unit, self.name = total, unit, name.rstrip("/").rsplit("/", 1)[-1]
        self.done = self._first = done
        self._shown, self._interval_s = shown and sys.stderr is not None, interval_s
        self._bar = self._make_bar()
        self._begun = self._printed_at = time.monotonic()

    def _make_bar(self) -> Any:
        """Returns a tqdm bar on stderr; None if nothing is to be shown, or stderr is not a terminal."""
        if not self._shown or sys.stderr is None or not sys.stderr.isatty():
            return None
        from tqdm import tqdm

        return tqdm(
            total=self.total,
            initial=self.done,
            unit=f" {self.unit}",
            unit_scale=self.unit in SCALED,
            desc=self.name,
            file=sys.stderr,
            dynamic_ncols=True,
            leave=False,
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.refresh()  # tqdm skips a redraw that soon follows another, even the last
            self._bar.close()

    def __call__(self, count: int = 1) -> None:
        """Adds `count` units to those done, and updates what is shown."""
        self.set_done(self.done + count)

    def set_done(self, done: int) -> None:
        """Sets the number of units done, and updates what is shown."""
        if self._bar is not None:
            self._bar.update(done - self.done)
        self.done = done
        if self._bar is None and done != self.total and time.monotonic() - self._printed_at >= self._interval_s:
            self._printed_at = time.monotonic()
            self.say(f"{self.name}: {self._progress_text()}")

    def show_figures(self, figures: str) -> None:
        """Shows figures of the work so far in the bar. Without a bar, does nothing."""
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)

    def clear(self) -> None:
        """Removes the bar from the screen until it is next drawn, so that something else can be printed."""
        if self._bar is not None:
            self._bar.clear()

    def report(self, figures: str) -> None:
        """Shows figures of the last units in the bar; without a bar, prints them with units done and time left."""
        if self._bar is None:
            self.say(
                f"{self.unit} {self.done:,} of {self.total:,}: {figures}, {format_duration(self._remaining_s())} left"
            )
        else:
            self._bar.set_postfix_str(figures)

    def say(self, lines: str | Iterable[str]) -> None:
        """Prints lines on stderr, above the bar if there is one, unless nothing is to be shown."""
        for line in [lines] if isinstance(lines, str) else lines:
            if self._bar is not None:
                self._bar.write(line, file=sys.stderr)
            elif self._shown:
                print(line, file=sys.stderr, flush=True)

    def _progress_text(self) -> str:
        """Returns units done, rate and time left as text; leaves out the time left if the total is not known."""
        rate = f"{self._units_per_s():.3g} per s"
        if self.total is None:
            return f"{self.done:,} {plural(self.unit)}, {rate}"
        return (
            f"{self.done:,} of {self.total:,} {plural(self.unit)}, {rate}, {format_duration(self._remaining_s())} left"
        )

    def _units_per_s(self) -> float:
        return (self.done - self._first) / max(1e-9, time.monotonic() - self._begun)

    def _remaining_s(self) -> float:
        """Returns the seconds left at the mean rate so far; 0 if nothing is done."""
        return ((self.total or 0) - self.done) / self._units_per_s() if self.done > self._first else 0.0


def pluralize(number: int, noun: str) -> str:
    """Returns a number with its noun, which is in the plural unless the number is 1: "1 entry", "1,024 entries"."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Returns the plural of a regular noun: "steps", "entries", "batches"."""
    if noun.endswith("ry"):
        return f"{noun.removesuffix('y')}ies"
    return f"{noun}es" if noun.endswith("ch") else f"{noun}s"


def format_duration(seconds: float) -> str:
    """Returns a duration as m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
