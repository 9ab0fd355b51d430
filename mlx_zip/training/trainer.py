"""The training loop: deterministic batches, checkpoints, metrics, and an orderly end whatever ends it."""

from __future__ import annotations

import math
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_zip.errors import DataError, TrainingError
from mlx_zip.models import Model
from mlx_zip.training.batches import Batch, batch_order, make_batch
from mlx_zip.training.checkpoint import (
    Progress,
    checkpoints,
    load_checkpoint,
    random_key,
    save_checkpoint,
    set_random_key,
    steps_of,
)
from mlx_zip.training.machines import from_first, together
from mlx_zip.training.metrics import Metrics, peak_rss_bytes
from mlx_zip.training.objective import Trainee
from mlx_zip.training.optimizer import learning_rate, make_optimizer
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.shards import Joined, Sample
from mlx_zip.training.stepping import Stepper
from mlx_zip.training.stopping import Asked, stop_signals
from mlx_zip.training.texts import Texts


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its progress, and the signal that stopped it early, if one did."""

    progress: Progress
    stopped_by: int | None = None


def check_data(data: Joined | Texts, valid: Joined | Texts | None, settings: TrainSettings) -> None:
    """Raises `TrainingError` or `DataError` where there is no batch to train on, or no sample to validate on.

    A run asks before it makes its folder, which would then be taken.
    """
    size = mx.distributed.init().size()
    if settings.batch_size % size:
        raise TrainingError(f"batch_size {settings.batch_size} must be divisible by the {size} machines")
    if (usable := int((data.lengths >= 2).sum())) < settings.batch_size:
        raise TrainingError(f"{data}: {usable} usable samples do not fill a batch of {settings.batch_size}")
    if valid is not None and not (valid.lengths >= 2).any():
        raise DataError(f"{valid}: no sample to validate on")


class Trainer:
    """One run in one folder. Raises `TrainingError`, `DataError`.

    trainee: what is trained, its parameters frozen or not as they shall be. data, valid: samples, prepared or in
    memory. run: the folder of checkpoints and metrics. fingerprint: what must be equal for a checkpoint to be resumed.
    """

    def __init__(
        self,
        trainee: Trainee,
        data: Joined | Texts,
        settings: TrainSettings,
        run: Path,
        fingerprint: str,
        valid: Joined | Texts | None = None,
        quiet: bool = False,
    ) -> None:
        self.trainee, self.data, self.valid, self.settings, self.run = trainee, data, valid, settings, run
        self.fingerprint = fingerprint
        self.group = mx.distributed.init()
        self.quiet = quiet or self.group.rank() > 0
        check_data(data, valid, settings)
        self._lengths, self._starts = data.lengths, data.starts
        self._orders: dict[int, list[np.ndarray]] = {}
        self.optimizer = make_optimizer(settings)
        self.optimizer.init(trainee.trainable_parameters())
        self.progress = self._resumed()
        self.stepper = Stepper(trainee, self.optimizer, settings, self.group)
        self._asked: Asked = lambda: None  # the signal that reached this machine
        self._stopping = False  # whether all machines know of one

    def _resumed(self) -> Progress:
        """The first machine's last checkpoint, or its new weights, on every machine: one disk decides."""
        mx.random.seed(self.settings.seed)
        progress = together(self.group, self._load)
        if self.group.size() == 1:
            return progress
        own = {
            "weights": self.trainee.trainable_parameters(),
            "optimizer": self.optimizer.state,
            "key": random_key(),
            "steps": steps_of(progress),
        }
        shared = from_first(self.group, own)
        self.trainee.update(shared["weights"])
        self.optimizer.state = shared["optimizer"]
        set_random_key(shared["key"])
        return replace(Progress(*shared["steps"].tolist()), seconds=progress.seconds)

    def _load(self) -> Progress:
        found = checkpoints(self.run) if self.group.rank() == 0 else []
        if not found:
            return Progress()
        return load_checkpoint(found[-1][1], self.trainee, self.optimizer, self.fingerprint)

    # ---- the loop

    def train(self) -> Outcome:
        """Trains until `iters` steps are done or a signal asks to stop, on all machines; the last step is saved."""
        settings, metrics = self.settings, together(self.group, self._metrics)
        self.trainee.train()
        since = _SinceReport(self.progress)
        with stop_signals() as self._asked, self._bar() as bar, ThreadPoolExecutor(1) as pool:
            upcoming = pool.submit(self._batches, self.progress.step)
            while self.progress.step < settings.iters and not self._stopping:
                began = time.perf_counter()  # waiting for data is part of the step
                batches = upcoming.result()
                upcoming = pool.submit(self._batches, self.progress.step + 1)
                self._step(batches, since, began)
                step = self.progress.step
                last = self._stopping or step == settings.iters
                if step % settings.steps_per_report == 0 or last:
                    self._report(metrics, bar, since)
                    since = _SinceReport(self.progress)
                if self.valid is not None and (step % settings.steps_per_eval == 0 or step == settings.iters):
                    self._validate(metrics, bar)
                if step % settings.save_every == 0:
                    self._save()
                bar.update(1)
            self._save()
        return Outcome(self.progress, (self._asked() or signal.SIGTERM) if self._stopping else None)

    def _step(self, batches: list[Batch], since: _SinceReport, began: float) -> None:
        sums = self.stepper.step(batches, [self.is_long(b) for b in batches], stop=self._asked() is not None)
        self._stopping = sums["stop"] > 0
        if not all(map(math.isfinite, sums.values())):
            step, which = self.progress.step + 1, sorted({i for batch in batches for i in batch.samples})
            raise TrainingError(
                f"step {step}: the loss or its gradient is not a number ({sums['nats']}); samples {which} of "
                f"{self.data}. The last checkpoint is good: lower the learning rate or remove the samples"
            )
        since.add(sums)
        done = self.progress
        self.progress = replace(
            done,
            step=done.step + 1,
            seen_samples=done.seen_samples + int(sums["samples"]),
            seen_ids=done.seen_ids + int(sums["ids"]),
            seen_base_ids=done.seen_base_ids + int(sums["base_ids"]),
            seen_bytes=done.seen_bytes + int(sums["n_bytes"]),
            seconds=done.seconds + time.perf_counter() - began,
        )

    def _save(self) -> None:
        together(self.group, self._checkpoint)

    def _checkpoint(self) -> None:
        if self.group.rank() > 0:
            return
        found = checkpoints(self.run)
        if not found or found[-1][0] != self.progress.step:
            args = (self.run, self.trainee, self.optimizer, self.progress, self.fingerprint, self.settings.keep)
            save_checkpoint(*args)

    # ---- data

    def _batches(self, step: int) -> list[Batch]:
        """This machine's part of one step's batches."""
        accumulate = self.settings.grad_accumulation_steps
        per_epoch = len(self._order(0))
        out = []
        for k in range(step * accumulate, (step + 1) * accumulate):
            order = self._order(k // per_epoch)
            out.append(self._make(self.data, order[k % per_epoch][self.group.rank() :: self.group.size()]))
        return out

    def _order(self, epoch: int) -> list[np.ndarray]:
        if epoch not in self._orders:
            order = batch_order(self._lengths, self.settings.batch_size, self.settings.seed, epoch, self._starts)
            self._orders = {e: o for e, o in self._orders.items() if e in (0, epoch - 1)} | {epoch: order}
        return self._orders[epoch]

    def _make(self, data: Joined | Texts, indices: Any) -> Batch:
        samples: list[Sample] = [data[int(i)] for i in indices]
        model = self.trainee.model
        config = model.config if isinstance(model, Model) else None
        try:
            batch = make_batch(
                samples,
                data.params,
                [int(i) for i in indices],
                availability=self.settings.availability,
                base_positions=config is not None and config.position_mode == "base_token_end",
                canonical=config is not None and config.canonical,
            )
            return self.trainee.prepared(batch)
        except DataError as error:
            raise DataError(f"{data}: {error}") from error

    def is_long(self, batch: Batch) -> bool:
        """Whether LongRoPE's long factors are due: some position lies beyond the original context."""
        model = self.trainee.model
        context = model.traits.long_context if isinstance(model, Model) else None
        if context is None:
            return False
        index = batch.arrays.get("index")
        return batch.longest > context if index is None else int(index.max()) >= context

    # ---- telling

    def _metrics(self) -> Metrics | None:
        return Metrics(self.run, self.progress.step) if self.group.rank() == 0 else None

    def _report(self, metrics: Metrics | None, bar: Any, since: _SinceReport) -> None:
        line = since.line(self.progress)
        line |= {"learning_rate": learning_rate(self.optimizer), "peak_rss_bytes": peak_rss_bytes()}
        line["peak_mlx_bytes"] = mx.get_peak_memory()
        self._write(metrics, line)
        bar.set_postfix_str(
            f"loss {line['loss']:.3f}, {line['bits_per_byte']:.3f} bits/byte, "
            f"{line['ids_per_s']:,.0f} ids/s, {line['bytes_per_s']:,.0f} bytes/s"
        )

    def _write(self, metrics: Metrics | None, line: dict[str, Any]) -> None:
        together(self.group, lambda: None if metrics is None else metrics.add(**line))

    def _validate(self, metrics: Metrics | None, bar: Any) -> None:
        assert self.valid is not None
        line = {"step": self.progress.step, **self.validation()}
        self._write(metrics, line)
        if not self.quiet:
            bar.write(f"step {line['step']}: validation {line['val_bits_per_byte']:.4f} bits/byte", file=sys.stderr)

    def validation(self) -> dict[str, float]:
        """Loss in nats per id and bits per byte on the validation samples (the first `val_batches`)."""
        assert self.valid is not None
        data, size = self.valid, self.settings.batch_size
        order = np.argsort(data.lengths[data.lengths >= 2], kind="stable")
        usable = np.flatnonzero(data.lengths >= 2)
        if self.settings.val_batches:  # an even choice among all lengths
            wanted = min(len(usable), self.settings.val_batches * size)
            order = order[np.linspace(0, len(order) - 1, wanted).astype(int)]
        self.trainee.eval()
        nats, count, n_bytes = 0.0, 0.0, 0
        for i in range(0, len(order), size):
            batch = self._make(data, usable[order[i : i + size]])
            sums = self.stepper.losses(batch, self.is_long(batch))
            nats, count, n_bytes = nats + sums["nats"], count + sums["count"], n_bytes + batch.n_bytes
        self.trainee.train()
        return {"val_loss": nats / max(count, 1), "val_bits_per_byte": nats / math.log(2) / max(n_bytes, 1)}

    def _bar(self) -> Any:
        return tqdm(
            total=self.settings.iters,
            initial=self.progress.step,
            disable=self.quiet or None,
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
        )


class _SinceReport:
    """Sums of the steps since the last report."""

    def __init__(self, since: Progress) -> None:
        self.since, self.sums, self.steps = since, dict[str, float](), 0

    def add(self, sums: dict[str, float]) -> None:
        self.steps += 1
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in sums.items()}

    def line(self, now: Progress) -> dict[str, Any]:
        """The report: losses per id, rates per second, and totals since the run began."""
        seconds, since = max(now.seconds - self.since.seconds, 1e-9), self.since
        count = max(self.sums["count"], 1.0)
        n_bytes = max(now.seen_bytes - since.seen_bytes, 1)
        rates = {
            f"{name}_per_s": (getattr(now, f"seen_{name}") - getattr(since, f"seen_{name}")) / seconds
            for name in ("ids", "base_ids", "bytes")
        }
        beside = {name: self.sums[name] / count for name in ("reconstruction", "token_type") if name in self.sums}
        return {
            "step": now.step,
            "loss": self.sums["nats"] / count,
            "bits_per_byte": self.sums["nats"] / math.log(2) / n_bytes,
            **beside,
            "grad_norm": self.sums["grad_norm"] / self.steps,
            **rates,
            **{name: value for name, value in vars(now).items() if name != "step"},
        }
