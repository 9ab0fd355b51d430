"""Trains a model: deterministic batches, steps on one or several machines, checkpoints, reports and validations.

Also the training loop of all trainers: steps, stop signals, and freeing of cached memory. Source of the memory
handling: mlx-lm 0.32, `mlx_lm.tuner.trainer` (`train`, `_clear_cache` with its default threshold of 0 bytes).
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.device import WiredMemory, peak_rss_bytes
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.models.machines import arrays_of_first_machine, run_on_all_machines
from mlx_zip.models.zip_model import Model
from mlx_zip.progress import ProgressBar
from mlx_zip.training.checkpoints import (
    Progress,
    get_random_key,
    list_checkpoints,
    load_last_checkpoint,
    save_checkpoint,
    set_random_key,
)
from mlx_zip.training.prepare.shards import Sample, can_have_entries
from mlx_zip.training.prepare.text_windows import CompressedTexts
from mlx_zip.training.run_data import JoinedFolders
from mlx_zip.training.run_folder import MetricsLog, read_metrics
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.steps.batches import (
    COARSE_PADDING,
    FINE_PADDING,
    STOP_SIGNALS,
    Batch,
    CallFunction,
    block_stop_signals,
    call_in_this_process,
    make_batch,
    order_batches,
    start_batch_workers,
)
from mlx_zip.training.steps.objective import Trainee
from mlx_zip.training.steps.stepper import Stepper, is_compiled, last_learning_rate, make_optimizer

SampleData = JoinedFolders | CompressedTexts
StopAsked = Callable[[], int | None]  # returns the stop signal received, or None


@dataclass(frozen=True)
class Outcome:
    """The end of a run. progress: the run's progress. stopped_by: number of the signal that stopped it, or None."""

    progress: Progress
    stopped_by: int | None = None


def check_enough_samples(data: SampleData, valid: SampleData | None, settings: TrainSettings) -> None:
    """Raises `TrainingError` if there is no batch to train on, and `DataError` if there is no sample to validate on.

    Call this before making the run's folder, so that a failure leaves no folder.
    """
    size = mx.distributed.init().size()
    if settings.batch_size % size:
        raise TrainingError(f"batch_size {settings.batch_size} must be divisible by the {size} machines")
    if (usable := int((data.lengths >= 2).sum())) < settings.batch_size:
        lacking = f"{usable} usable samples do not fill a batch of {settings.batch_size}"
        raise TrainingError(f"{data}: {lacking}: prepare more text, or choose a smaller --batch-size")
    if valid is not None and not (valid.lengths >= 2).any():
        raise DataError(f"{valid}: no sample to validate on")


class Trainer:
    """Trains one model in one run folder.

    trainee: the model to train, with parameters frozen that are not trained. data, valid: samples to train and to
    validate on. run: folder of checkpoints and metrics. fingerprint: only a checkpoint with an equal fingerprint is
    resumed. quiet: show no progress. make_stepper: `Stepper`, or a function with the same arguments that returns an
    object with the interface of `Stepper`. Raises `TrainingError` if the last checkpoint does not fit. Call
    `check_enough_samples` before.
    """

    def __init__(
        self,
        trainee: Trainee,
        data: SampleData,
        settings: TrainSettings,
        run: Path,
        fingerprint: str,
        valid: SampleData | None = None,
        quiet: bool = False,
        make_stepper: Callable[..., Any] = Stepper,
    ) -> None:
        self.trainee, self.data, self.valid, self.settings, self.run = trainee, data, valid, settings, run
        self.fingerprint = fingerprint
        self.group = mx.distributed.init()
        self.quiet = quiet or self.group.rank() > 0
        self._orders: dict[int, list[np.ndarray]] = {}
        self._call: CallFunction = call_in_this_process
        self.optimizer = make_optimizer(settings)
        self.optimizer.init(trainee.trainable_parameters())
        self.progress = self._restore_progress()
        self.stepper = make_stepper(trainee, self.optimizer, settings, self.group)

    def _restore_progress(self) -> Progress:
        """Restores the first machine's last checkpoint, or else its new weights, on all machines. Returns progress."""
        mx.random.seed(self.settings.seed)
        first = self.group.rank() == 0
        last = (self.run, self.trainee, self.optimizer, self.fingerprint)
        progress = run_on_all_machines(self.group, lambda: load_last_checkpoint(*last) if first else Progress())
        if self.group.size() == 1:
            return progress
        own = {
            "weights": self.trainee.trainable_parameters(),
            "optimizer": self.optimizer.state,
            "key": get_random_key(),
            "steps": mx.array(list(vars(progress).values())[:-1], mx.int64),  # all fields but `seconds`
        }
        shared = arrays_of_first_machine(self.group, own)
        self.trainee.update(shared["weights"])
        self.optimizer.state = shared["optimizer"]
        set_random_key(shared["key"])
        return replace(Progress(*shared["steps"].tolist()), seconds=progress.seconds)

    def train(self) -> Outcome:
        """Trains on all machines until all steps are done or a signal stops the run; saves the last step."""
        first = self.group.rank() == 0
        self._log = run_on_all_machines(self.group, lambda: MetricsLog(self.run, self.progress.step) if first else None)
        self.trainee.train()
        self._reported, self._sums = self.progress, list[dict[str, float]]()
        done = self.progress.step
        workers = self.stepper.batch_workers
        ahead = max(1, workers)  # number of steps whose batches are made in advance
        with (
            catch_stop_signals() as asked,
            start_batch_workers(workers) as self._call,
            ThreadPoolExecutor(ahead, initializer=block_stop_signals) as self._pool,
        ):
            self._upcoming = deque(self._pool.submit(self._make_step_batches, done + k) for k in range(ahead))
            stopped = train_to_step(self, self.settings, asked, self.quiet)
        self._call = call_in_this_process
        return Outcome(self.progress, (asked() or signal.SIGTERM) if stopped else None)

    def step(self, stop: bool) -> bool:
        """Trains one step on the next batches; see `TrainingJob`."""
        began = time.perf_counter()  # waiting for data is part of the step
        batches = self._upcoming.popleft().result()
        self._upcoming.append(self._pool.submit(self._make_step_batches, self.progress.step + len(self._upcoming) + 1))
        sums = self.stepper.step(batches, [self.needs_long_factors(b) for b in batches], stop=stop)
        if not all(map(math.isfinite, sums.values())):
            step, which = self.progress.step + 1, sorted({i for batch in batches for i in batch.samples})
            good = "; the last checkpoint stays good" if list_checkpoints(self.run) else ""
            raise TrainingError(
                f"step {step}: the loss or its gradient is not a number; samples {which} of {self.data}: lower the "
                f"learning rate or remove the samples{good}"
            )
        self._sums.append(sums)
        counts = {name: int(sums[name]) for name in ("samples", "ids", "base_ids", "n_bytes")}
        self.progress = self.progress.after_step(**counts, seconds=time.perf_counter() - began)
        return sums["stop"] > 0

    def save_checkpoint(self) -> None:
        """Writes the checkpoint of this step, unless the checkpoint exists; see `TrainingJob`."""
        run_on_all_machines(self.group, self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        if self.group.rank() > 0:
            return
        self.stepper.sync_to_trainee()
        save_checkpoint(self.run, self.trainee, self.optimizer, self.progress, self.fingerprint, self.settings.keep)

    # ---- data

    def _make_step_batches(self, step: int) -> list[Batch]:
        """Returns this machine's part of each batch of a step. step: index of the step, from 0."""
        accumulate = self.settings.grad_accumulation_steps
        per_epoch = len(self._order_epoch(0))
        out = []
        for k in range(step * accumulate, (step + 1) * accumulate):
            order = self._order_epoch(k // per_epoch)
            out.append(self._make_batch(self.data, order[k % per_epoch][self.group.rank() :: self.group.size()]))
        return out

    def _order_epoch(self, epoch: int) -> list[np.ndarray]:
        if (order := self._orders.get(epoch)) is None:
            order = order_batches(
                self.data.lengths, self.settings.batch_size, self.settings.seed, epoch, self.data.starts
            )
            self._orders = {e: o for e, o in self._orders.items() if e in (0, epoch - 1)} | {epoch: order}
        return order

    def _make_batch(self, data: SampleData, indices: Any) -> Batch:
        """Returns the batch of the samples with these indices. Raises `DataError` if a sample is damaged."""
        samples: list[Sample] = [data[int(i)] for i in indices]
        model = self.trainee.model
        config = model.config if isinstance(model, Model) else None
        compiled = data is self.data and is_compiled(self.settings)  # validation is not compiled
        try:
            batch = self._call(
                make_batch,
                samples,
                data.params,
                [int(i) for i in indices],
                availability=self.settings.availability,
                base_positions=self._counts_base_ids(),
                canonical=config is not None and config.canonical,
                padding=COARSE_PADDING if compiled else FINE_PADDING,
            )
            return self.trainee.prepare_batch(batch)
        except DataError as error:
            raise DataError(f"{data}: {error}") from error
        except BrokenProcessPool as error:
            raise TrainingError(
                "a process that makes batches has ended: was it killed for lack of memory, or does a script call "
                'train() outside of `if __name__ == "__main__":`?'
            ) from error

    def _counts_base_ids(self) -> bool:
        """Returns whether the model counts positions in base ids."""
        model = self.trainee.model
        return isinstance(model, Model) and model.config.position_mode == "base_token_end"

    def needs_long_factors(self, batch: Batch) -> bool:
        """Returns whether a position exceeds the model's original context, so that LongRoPE needs its long factors."""
        model = self.trainee.model
        context = model.traits.long_context if isinstance(model, Model) else None
        if context is None:
            return False
        index = batch.arrays.get("index")
        return batch.longest > context if index is None else int(index.max()) >= context

    # ---- reports

    def log_base_bits(self) -> None:
        """Logs bits per byte of the validation samples, read as base ids only. Does nothing after the first step.

        This measures the model that training begins with. A base id counts if the compressed id that covers the base id
        counts.
        """
        if self.valid is None or self.progress.step:
            return
        params, nats, n_bytes = self.valid.params, 0.0, 0
        without = replace(params, codebook_size=0, merge_size=1, start=None)
        self.trainee.eval()
        for indices in self._validation_batches("Measuring the base"):
            samples = [expand_sample(self.valid[int(i)], params) for i in indices]
            batch = make_batch(samples, without, base_positions=self._counts_base_ids())
            nats += self.stepper.measure_losses(batch, self.needs_long_factors(batch))["nats"]
            n_bytes += batch.n_bytes
        self.trainee.train()
        line = {"step": 0, "base_bits_per_byte": nats / math.log(2) / max(n_bytes, 1)}
        run_on_all_machines(self.group, lambda: self._log_once(line))

    def _log_once(self, line: dict[str, Any]) -> None:
        if self.group.rank() == 0 and line not in read_metrics(self.run):
            MetricsLog(self.run, self.progress.step).add(**line)

    def report(self) -> str:
        """Logs the figures of the steps since the last report and returns them as text; see `TrainingJob`."""
        line = _make_report_line(self._sums, self._reported, self.progress)
        line |= {"learning_rate": last_learning_rate(self.optimizer), "peak_rss_bytes": peak_rss_bytes()}
        line["peak_mlx_bytes"] = mx.get_peak_memory()
        if is_compiled(self.settings):
            line["traces"] = self.stepper.traces  # since the process began
        if not self.trainee.loss_is_of_text:
            del line["bits_per_byte"]
        self._reported, self._sums = self.progress, []
        self._log_line(line)
        shown = self.trainee.loss_is_of_text and self.progress.seen_bytes
        bits = f", {line['bits_per_byte']:.3f} bits per byte" if shown else ""
        return f"loss {line['loss']:.3f}{bits}, {line['base_ids_per_s']:,.0f} base tokens/s"

    def _log_line(self, line: dict[str, Any]) -> None:
        run_on_all_machines(self.group, lambda: None if self._log is None else self._log.add(**line))

    def validate(self) -> str | None:
        """Logs the figures of a validation and returns them as text; see `TrainingJob`."""
        if self.valid is None:
            return None
        line, text = self.measure_validation()
        self._log_line({"step": self.progress.step, **line})
        return text

    def measure_validation(self) -> tuple[dict[str, float], str]:
        """Measures the model on `_validation_batches`. Returns the figures, for the log and as text.

        Each sample's first id is read but not predicted, so it counts neither in `ids` nor in `base_ids`.
        """
        sums: dict[str, float] = {}
        self.trainee.eval()
        assert self.valid is not None
        for indices in self._validation_batches("Validating"):
            batch = self._make_batch(self.valid, indices)
            found = self.stepper.measure_losses(batch, self.needs_long_factors(batch))
            free_cached_memory()
            found |= {"n_bytes": batch.n_bytes, "ids": batch.ids, "base_ids": batch.base_ids - len(indices)}
            sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
        self.trainee.train()
        return self.trainee.validation_figures(sums)

    def _validation_batches(self, task: str) -> Iterator[np.ndarray]:
        """Yields the indices of the validation samples, one array per batch; shows a progress bar with label `task`.

        Yields all samples if `val_batches` is 0, else `val_batches` batches of samples spread evenly over the lengths.
        """
        assert self.valid is not None
        size = self.settings.batch_size
        usable = np.flatnonzero(self.valid.lengths >= 2)
        order = usable[np.argsort(self.valid.lengths[usable], kind="stable")]
        if self.settings.val_batches:
            wanted = min(len(usable), self.settings.val_batches * size)
            order = order[np.linspace(0, len(order) - 1, wanted).astype(int)]
        with ProgressBar(-(-len(order) // size), "batch", task, shown=not self.quiet) as count:
            for i in range(0, len(order), size):
                yield order[i : i + size]
                count(1)


def _make_report_line(steps: list[dict[str, float]], since: Progress, now: Progress) -> dict[str, Any]:
    """Returns a log line: losses per id, rates per second, and totals since the run began.

    steps: results of `Stepper.step` since the last report. since, now: the progress at that report and now.
    """
    sums = {name: sum(step[name] for step in steps) for name in steps[0]}
    seconds, count = max(now.seconds - since.seconds, 1e-9), max(sums["count"], 1.0)
    n_bytes = max(now.seen_bytes - since.seen_bytes, 1)
    rates = {
        f"{name}_per_s": (getattr(now, f"seen_{name}") - getattr(since, f"seen_{name}")) / seconds
        for name in ("ids", "base_ids", "bytes")
    }
    added = {name: sums[name] / count for name in ("reconstruction", "token_type") if name in sums}
    return {
        "step": now.step,
        "loss": sums["nats"] / count,
        "bits_per_byte": sums["nats"] / math.log(2) / n_bytes,
        **added,
        "grad_norm": sums["grad_norm"] / len(steps),
        **rates,
        **{name: value for name, value in vars(now).items() if name != "step"},
    }


def expand_sample(sample: Sample, params: CodecParams) -> Sample:
    """Expands a sample's ids to base ids. The loss counts a base id if it counted the compressed id."""
    if not can_have_entries(params):
        return sample
    book = Codebook(sample.params(params))
    book.push(sample.ids)
    ids, mask = book.expand(sample.ids), np.repeat(sample.mask, book.spans(sample.ids))
    return Sample(ids, mask, sample.base_ids, sample.n_bytes)


# ---- the loop


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
