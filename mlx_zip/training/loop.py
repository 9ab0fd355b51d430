"""The one training loop: steps, reports, validations and checkpoints of whatever is trained, and an orderly end."""

from __future__ import annotations

from typing import Protocol

from mlx_zip.training.checkpoint import Progress
from mlx_zip.training.progress_bar import ProgressBar
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.stopping import Asked


class Job(Protocol):
    """What the loop trains. It loads its last checkpoint itself, and `progress` then says where it stands."""

    progress: Progress

    def step(self, stop: bool) -> bool:
        """Trains one step and counts it in `progress`. stop: whether a signal asked this machine to stop.

        Returns whether one asked any machine of the run.
        """
        ...

    def report(self) -> str:
        """Logs the steps since the last report; returns their figures in words."""
        ...

    def validate(self) -> str | None:
        """Logs the loss on validation data; returns it in words, None where there are no such data."""
        ...

    def save(self) -> None:
        """Writes the checkpoint of this step, unless it is there."""
        ...


def run_steps(job: Job, settings: TrainSettings, bar: ProgressBar, asked: Asked, until: int | None = None) -> bool:
    """Trains until `settings.iters` steps are done, `until` of them, or a signal asks to stop; the last step is saved.

    A step is reported every `steps_per_report` steps and at the end, validated every `steps_per_eval` steps and when
    the run is finished, saved every `save_every` steps. Returns whether a signal asked to stop.
    """
    last, stopping = min(until or settings.iters, settings.iters), False
    while job.progress.step < last and not stopping:
        stopping = job.step(asked() is not None)
        bar.advance()
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
