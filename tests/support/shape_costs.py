"""Launches of a step on PyTorch at shapes that are too large to be made."""

from __future__ import annotations

from typing import Any

import torch

from mlx_zip.bench.engines.random_folder import RandomFolder, random_folder
from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.network.checkpoint import Weight
from support.kernel_launches import LaunchCounts, StepCosts, count_step_costs


class ZeroWeightsFolder(RandomFolder):
    """Gives zeros for each name: memory that the system hands out but need not hold, as long as it is only read."""

    def take_weight(self, name: str, *shape: int) -> Weight:
        """Returns zeros of this shape, packed where the weights of a quantized model are."""
        if self.bits is None or len(shape) == 1 or shape[1] % self.group or "pos_embed" in name:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        words = torch.zeros((shape[0], shape[1] * self.bits // 32), dtype=torch.int32, device=self.device)
        scales = torch.zeros((shape[0], shape[1] // self.group), dtype=self.dtype, device=self.device)
        return Packed(words, scales, torch.zeros_like(scales), self.bits, self.group)


def count_shape_costs(
    config: dict[str, Any], dtype: torch.dtype, bits: int | None = None, group: int = 64
) -> StepCosts:
    """Returns what a step costs at the shape of a config.json, of a converted model or a plain one.

    It is counted at full width on the CPU with one and with two layers; their difference is a layer's, and counts for
    every further one. bits, group: packing of the weights, None for none.
    """
    layers = config["num_hidden_layers"]
    one, two = (count_costs_with_layers(config, count, dtype, bits, group) for count in (1, 2))
    return StepCosts(*(extrapolate_to_layers(a, b, layers) for a, b in ((one.warm, two.warm), (one.cold, two.cold))))


def count_costs_with_layers(
    config: dict[str, Any], layers: int, dtype: torch.dtype, bits: int | None, group: int
) -> StepCosts:
    folder = random_folder({**config, "num_hidden_layers": layers}, "cpu", dtype, bits, group)
    zeros = ZeroWeightsFolder(**vars(folder))
    return count_step_costs(CudaModel(zeros, zeros.zip, store_bytes=0))


def extrapolate_to_layers(one: LaunchCounts, two: LaunchCounts, layers: int) -> LaunchCounts:
    found = LaunchCounts()
    for name in two.names:
        count, size = (
            a[name] + (layers - 1) * (b[name] - a[name]) for a, b in ((one.names, two.names), (one.sizes, two.sizes))
        )
        found.add(name, count, size)
    return found
