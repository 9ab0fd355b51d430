"""Runs the training loop of all trainers: steps, reports, checkpoints, stop signals, and freeing of cached memory.

Source of the memory handling: mlx-lm 0.32, `mlx_lm.tuner.trainer` (`train`, `_clear_cache` with its default threshold
of 0 bytes).
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx

from mlx_zip.device import WiredMemory
from mlx_zip.progress import ProgressBar
from mlx_zip.training.checkpoints import Progress
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.steps.batches import STOP_SIGNALS

StopAsked = Callable[[], int | None]  # returns the stop signal received, or None


class TrainingJob(Protocol):
    """A trainer that the loop runs, after it has restored the last checkpoint. progress: the run's progress."""

    progress: Progress

    def step(self, stop: bool) -> bool:
        """Trains one step and counts it in `progress`. stop: whether this machine has received a stop signal.

        Returns whether any machine of the run has received a stop signal.
        """
        ...

    def report(self) -> str:
        """Logs the figures of the steps since the last report and returns them as text."""
        ...

    def validate(self) -> str | None:
        """Logs the loss on validation data and returns it as text, or returns None if there are no such data."""
        ...

    def save_checkpoint(self) -> None:
        """Writes the checkpoint of this step, unless it exists."""
        ...


def train_to_step(
    job: TrainingJob, settings: TrainSettings, asked: StopAsked, quiet: bool, until: int | None = None
) -> bool:
    """Trains up to step `settings.iters`, step `until`, or a stop signal, and saves the last step.

    Reports every `steps_per_report` steps and at the end, validates every `steps_per_eval` steps and after step
    `iters`, and saves every `save_every` steps. On a Mac, MLX's memory is wired during training. MLX's cached memory is
    freed after every step. asked: returns the stop signal received, or None. quiet: show no progress; without a
    terminal, only reports are shown. Returns whether a signal ended the run before step `iters`.
    """
    last, stopping = settings.iters if until is None else min(until, settings.iters), False
    with (
        ProgressBar(last, "step", "Training", job.progress.step, shown=not quiet, interval_s=math.inf) as bar,
        WiredMemory(keep_s=0.0, streams=[mx.default_stream(mx.default_device())]),
    ):
        while job.progress.step < last and not stopping:
            stopping = job.step(asked() is not None)
            free_cached_memory()
            if stopping:
                job.save_checkpoint()  # before printing, because the terminal may be closed
            bar()
            step = job.progress.step
            if step % settings.steps_per_report == 0 or stopping or step == last:
                bar.report(job.report())
            if step % settings.steps_per_eval == 0 or step == settings.iters:
                found = job.validate()
                if found is not None:
                    bar.say(f"step {step:,}: {found}")
            if step % settings.save_every == 0:
                job.save_checkpoint()
        job.save_checkpoint()
        return stopping and job.progress.step < settings.iters


class TrainingStopped(KeyboardInterrupt):
    """Raised when a signal has stopped a run and the last step is saved. number: the signal's number."""

    def __init__(self, progress: Progress, number: int) -> None:
        super().__init__(f"stopped after step {progress.step}")
        self.progress, self.number = progress, number


@contextmanager
def catch_stop_signals() -> Iterator[StopAsked]:
    """Context manager: yields a function that returns the first stop signal received in the block, or None.

    A second signal raises `KeyboardInterrupt`. The function may also be called after the block. Only the main thread
    receives signals: in another thread the function always returns None. A signal that was ignored before, as SIGHUP
    under nohup, stays ignored.
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


def free_cached_memory() -> None:
    """Frees MLX's cached buffers: batches differ in shape, so few buffers would be reused."""
    if mx.get_cache_memory() > 0:
        mx.clear_cache()
