"""What a decoding step launches, reads and writes: without hypertokens, with rows that are known, and with new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.launches import Launches, counted
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.random_folder import RandomFolder, random_folder

PROMPT = 2  # base ids that are read before the counted steps
TRIES = 64  # steps in which one that installs an entry must come


@dataclass(frozen=True)
class StepCosts:
    """The launches of a step that installs an entry whose row is in the store (warm) or must be encoded (cold).

    Without hypertokens no step installs an entry: both are then the same.
    """

    warm: Launches
    cold: Launches


def step_costs(model: CudaModel, prompt: int = PROMPT, capacity: int | None = None) -> StepCosts:
    """Returns what a step of one sequence costs after `prompt` base ids.

    The codebook counts as full. capacity: ids that the caches have room for; None takes what the count needs. What the
    steps emit means nothing: ids that install an entry are forced.
    """
    found = []
    for _ in range(1 + model.hypertokens):  # the second time finds the row that the first one has encoded
        batch = Batch(model, 1, capacity or prompt + TRIES + 1)
        batch.add()
        batch.read(0, _distinct(model, prompt))
        found.append(_counted_step(batch))
    return StepCosts(warm=found[-1], cold=found[0])


def _distinct(model: CudaModel, count: int) -> np.ndarray:
    """Returns `count` base ids that the codec does not disable, each at most once as far as there are enough."""
    allowed = np.setdiff1d(np.arange(model.params.vocab_size), list(model.params.disabled_ids))
    return np.resize(allowed, count).astype(np.uint32)


def _counted_step(batch: Batch) -> Launches:
    """Returns the launches of the first step that installs an entry, or of the first one without hypertokens."""
    allowed = _distinct(batch.model, TRIES)
    batch.tables.installed.fill_(True)
    for at in range(TRIES):
        forced = int(allowed[-1 - at])
        before = len(batch.book(0))
        ids = torch.tensor([forced], device=batch.model.device)
        with counted() as found:
            step(batch, ids)
        if not batch.model.hypertokens or len(batch.book(0)) > before:
            return found
    raise ValueError(f"no entry was installed in {TRIES} steps")


def step(batch: Batch, ids: torch.Tensor) -> None:
    """Takes a whole step of a batch of one, which emits `ids` [1] after the head's choice has been computed."""
    batch.choose(lambda head: ids, logits=False)
    batch.begin()
    for error in batch.follow(batch.ids()).values():
        raise error


# ---- shapes that are too large to be made


class ZeroFolder(RandomFolder):
    """Gives zeros for each name: memory that the system hands out but need not hold, as long as it is only read."""

    def take(self, name: str, *shape: int) -> torch.Tensor | Packed:
        """Returns zeros of this shape, packed where the weights of a quantized model are."""
        if self.bits is None or len(shape) == 1 or shape[1] % self.group or "pos_embed" in name:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        words = torch.zeros((shape[0], shape[1] * self.bits // 32), dtype=torch.int32, device=self.device)
        scales = torch.zeros((shape[0], shape[1] // self.group), dtype=self.dtype, device=self.device)
        return Packed(words, scales, torch.zeros_like(scales), self.bits, self.group)


def shape_costs(config: dict[str, Any], dtype: torch.dtype, bits: int | None = None, group: int = 64) -> StepCosts:
    """Returns what a step costs at the shape of a config.json, of a converted model or a plain one.

    It is counted at full width on the CPU with one and with two layers; their difference is a layer's, and counts for
    every further one. bits, group: packing of the weights, None for none.
    """
    layers = config["num_hidden_layers"]
    one, two = (_few_layers(config, count, dtype, bits, group) for count in (1, 2))
    return StepCosts(*(extrapolated(a, b, layers) for a, b in ((one.warm, two.warm), (one.cold, two.cold))))


def _few_layers(config: dict[str, Any], layers: int, dtype: torch.dtype, bits: int | None, group: int) -> StepCosts:
    """Returns what a step costs with so many layers."""
    folder = random_folder({**config, "num_hidden_layers": layers}, "cpu", dtype, bits, group)
    zeros = ZeroFolder(**vars(folder))
    return step_costs(CudaModel(zeros, zeros.zip, store_bytes=0))


def extrapolated(one: Launches, two: Launches, layers: int) -> Launches:
    """Returns the launches with `layers` layers, from those with one and with two."""
    layer, found = two.minus(one), Launches()
    for name in two.names:
        count = one.names[name] + (layers - 1) * layer.names[name]
        found.add(name, count, one.sizes[name] + (layers - 1) * layer.sizes[name])
    return found
