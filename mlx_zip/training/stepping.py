"""One optimizer step: gradients of one or more batches, added over batches and machines, divided once, applied."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.nn.utils import average_gradients
from mlx.utils import tree_flatten, tree_map

from mlx_zip.config import SIDES
from mlx_zip.training.batches import Batch
from mlx_zip.training.objective import Trainee
from mlx_zip.training.optimizer import clip
from mlx_zip.training.settings import TrainSettings

READ = ("ids", "base_ids", "n_bytes")
LOW = {"float32": None, "bfloat16": mx.bfloat16}


class Stepper:
    """Holds the two functions of a step, compiled where that pays: `gradients` of a batch, `apply` of their sum."""

    def __init__(
        self, trainee: Trainee, optimizer: optim.Optimizer, settings: TrainSettings, group: mx.distributed.Group
    ) -> None:
        self.trainee, self.optimizer, self.settings, self.group = trainee, optimizer, settings, group
        self._low = LOW[settings.dtype]
        self._value_and_grad = nn.value_and_grad(trainee, self._objective)
        self._gradients: Any = self._batch_gradients
        self._apply: Any = self._update
        on = settings.compile == "on" or (settings.compile == "auto" and mx.default_device() != mx.cpu)
        if on:
            state = [trainee.state, mx.random.state]
            both = [trainee.state, optimizer.state]
            self._gradients = mx.compile(self._batch_gradients, inputs=state, outputs=state)
            self._apply = mx.compile(self._update, inputs=both, outputs=both)

    def step(self, batches: list[Batch], long: list[bool], stop: bool = False) -> dict[str, float]:
        """Trains on this machine's part of one step's batches; returns the sums over all machines.

        `nats`, `count` and the other losses' sums, `grad_norm` of the mean gradient before clipping, and how much was
        read: `samples`, `ids`, `base_ids`, `n_bytes`. `stop` counts the machines that asked to stop, so that all know.
        """
        gradients, sums = None, None
        for batch, is_long in zip(batches, long, strict=True):
            some, gradients = self._gradients(to_device(batch), gradients, is_long)
            sums = some if sums is None else {name: sums[name] + some[name] for name in sums}
            ours, theirs = parted(gradients)
            mx.eval(sums, ours)  # before the hyper-encoders', which come last and hold nothing of the decoder's
            mx.eval(theirs)
        assert sums is not None
        sums |= {name: mx.array(sum(getattr(batch, name) for batch in batches), mx.int64) for name in READ}
        sums["stop"] = mx.array(int(stop))
        sums["samples"] = mx.array(sum(len(batch.samples) for batch in batches), mx.int64)
        sums = {name: mx.distributed.all_sum(value, group=self.group) for name, value in sorted(sums.items())}
        norm = self._apply(gradients, sums["count"])
        mx.eval(norm, sums, self.trainee.state, self.optimizer.state, mx.random.state)
        found: dict[str, Any] = {**sums, "grad_norm": norm}
        return {name: float(value.item()) for name, value in found.items()}

    def losses(self, batch: Batch, long: bool) -> dict[str, float]:
        """The sums of one batch without training."""
        sums: dict[str, Any] = self.trainee.losses(to_device(batch), long)
        return {name: float(value.item()) for name, value in sums.items()}

    def _objective(self, arrays: dict[str, mx.array], long: bool) -> tuple[mx.array, dict[str, mx.array]]:
        if self._low is None:
            sums = self.trainee.losses(arrays, long)
            return self.trainee.total(sums), sums
        full = self.trainee.parameters()  # what is frozen too, or a float32 base would compute in float32
        self.trainee.update(tree_map(self._lowered, full))
        sums = self.trainee.losses(arrays, long)
        self.trainee.update(full)
        return self.trainee.total(sums), sums

    def _lowered(self, value: mx.array) -> mx.array:
        return value.astype(self._low) if mx.issubdtype(value.dtype, mx.floating) else value

    def _batch_gradients(self, arrays: dict[str, mx.array], previous: Any, long: bool) -> tuple[Any, Any]:
        (_, sums), gradients = self._value_and_grad(arrays, long)
        if previous is not None:
            gradients = tree_map(mx.add, gradients, previous)
        return sums, gradients

    def _update(self, gradients: Any, count: mx.array) -> mx.array:
        size = self.group.size()
        gradients = average_gradients(gradients, self.group)
        scale = size / mx.maximum(count, 1.0)
        gradients = tree_map(lambda g: g * scale.astype(g.dtype), gradients)
        gradients, norm = clip(gradients, self.settings.max_grad_norm)
        self.optimizer.update(self.trainee, gradients)
        return norm


def parted(gradients: Any) -> tuple[list[mx.array], list[mx.array]]:
    """Gradients of the decoder and of the hyper-encoders."""
    flat: Any = tree_flatten(gradients)
    return (
        [value for name, value in flat if not name.removeprefix("model.").startswith(SIDES)],
        [value for name, value in flat if name.removeprefix("model.").startswith(SIDES)],
    )


def to_device(batch: Batch) -> dict[str, mx.array]:
    """The batch's arrays as MLX arrays."""
    return {name: mx.array(value) for name, value in batch.arrays.items()}
