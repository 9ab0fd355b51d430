"""The training loop that all trainers share: steps, reports, validations and checkpoints."""

from __future__ import annotations

import math
from typing import Protocol

from mlx_zip.progress import ProgressBar
from mlx_zip.training.checkpoint import Progress
from mlx_zip.training.memory import give_back, wired_memory
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.stopping import Asked


class Job(Protocol):
    """A trainer that the loop runs. It has loaded its last checkpoint; `progress` says where it stands."""

    progress: Progress

    def step(self, stop: bool) -> bool:
        """Trains one step and counts it in `progress`. stop: whether this machine has received a stop signal.

        Returns whether any machine of the run has received one.
        """
        ...

    def report(self) -> str:
        """Logs the steps since the last report and returns their figures in words."""
        ...

    def validate(self) -> str | None:
        """Logs the loss on validation data and returns it in words, or None without such data."""
        ...

    def save(self) -> None:
        """Writes the checkpoint of this step, unless it exists."""
        ...


def steps_bar(settings: TrainSettings, done: int, quiet: bool, until: int | None = None) -> ProgressBar:
    """Returns the bar of a run up to the step where `run_steps` ends; only its reports are lines. done: steps done."""
    last = settings.iters if until is None else min(until, settings.iters)
    return ProgressBar(last, "step", "Training", done, shown=not quiet, interval_s=math.inf)


def run_steps(job: Job, settings: TrainSettings, bar: ProgressBar, asked: Asked, until: int | None = None) -> bool:
    """Trains up to step `settings.iters`, step `until`, or a stop signal, and saves the last step.

    Reports every `steps_per_report` steps and at the end, validates every `steps_per_eval` steps and after step
    `iters`, saves every `save_every` steps. Memory is wired on a Mac meanwhile, and given back after every step. asked:
    returns the stop signal received, or None. Returns whether a signal ended the run.
    """
    with wired_memory():
        return _run_steps(job, settings, bar, asked, until)


def _run_steps(job: Job, settings: TrainSettings, bar: ProgressBar, asked: Asked, until: int | None) -> bool:
    last, stopping = settings.iters if until is None else min(until, settings.iters), False
    while job.progress.step < last and not stopping:
        stopping = job.step(asked() is not None)
        give_back()
        if stopping:
            job.save()  # before anything is shown: the terminal may be closed
        bar()
        step = job.progress.step
        if step % settings.steps_per_report == 0 or stopping or step == last:
            bar.report(job.report())
        if step % settings.steps_per_eval == 0 or step == settings.iters:
            found = job.validate()
            if found is not None:
                bar.say(f"step {step:,}: {found}")
        if step % settings.save_every == 0:
            job.save()
    job.save()
    return stopping
