"""The key-value caches of a batch: allocated once, at fixed addresses, so that CUDA graphs can be replayed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from mlx_zip.cuda.devices import raise_if_memory_too_small
from mlx_zip.cuda.network.decoder_config import DecoderConfig
from mlx_zip.cuda.transfers import copy_to_device, to_host


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, and their number for each sequence. All fields are on the device.

    whole [layers, 2, B, K, S, E]: keys, then values. lengths [B] int64: number of ids in each sequence's cache, and so
    the slot of its next id. frequency_set [B] int64: the rotary frequencies that each sequence's keys were rotated
    with, `SHORT` or `LONG`.
    """

    whole: torch.Tensor
    lengths: torch.Tensor
    frequency_set: torch.Tensor

    @property
    def capacity(self) -> int:
        """Number of slots S per sequence."""
        return self.whole.shape[4]

    def keys(self, layer: int) -> torch.Tensor:
        """Returns one layer's keys [B, K, S, E], rotated."""
        return self.whole[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Returns one layer's values [B, K, S, E]."""
        return self.whole[layer, 1]

    def slice_rows(self, begin: int, end: int) -> KVCache:
        """Returns the caches of sequences begin to end - 1, in the same memory."""
        return KVCache(self.whole[:, :, begin:end], self.lengths[begin:end], self.frequency_set[begin:end])

    def trim_row(self, row: int, length: int) -> None:
        """Trims a sequence to its first `length` ids."""
        self.lengths[row].clamp_(max=length)

    def copy_row(self, source: int, target: int) -> None:
        """Copies the sequence in row `source` to row `target`."""
        for part in (self.whole.transpose(0, 2), self.lengths, self.frequency_set):
            part[target].copy_(part[source])

    def save_row(self, row: int, length: int) -> tuple[torch.Tensor, int]:
        """Returns a sequence's first keys and values [layers, 2, K, length, E] on the host, and its frequency set."""
        return to_host(self.whole[:, :, row, :, :length]), int(self.frequency_set[row])

    def load_row(self, row: int, saved: torch.Tensor, frequency_set: int) -> None:
        """Fills a sequence's cache with what `save_row` returned."""
        length = saved.shape[3]
        copy_to_device(self.whole[:, :, row, :, :length], saved)
        self.lengths[row], self.frequency_set[row] = length, frequency_set


def kv_cache_bytes(config: DecoderConfig, batch: int, capacity: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the caches of `batch` sequences with `capacity` slots each."""
    return 2 * config.layers * batch * config.key_columns * capacity * dtype.itemsize


def make_kv_cache(
    config: DecoderConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Returns empty caches. Raises `ModelError`, naming needed and free bytes, if memory is too small."""
    raise_if_memory_too_small(
        f"KV caches of {batch} x {capacity} ids", kv_cache_bytes(config, batch, capacity, dtype), device
    )
    shape = (config.layers, 2, batch, config.kv_heads, capacity, config.head_width)
    # zeros, because the values of masked slots are multiplied by 0, and 0 x NaN is NaN
    if device.type == "cpu":  # NumPy's zeros take memory only once they are written
        whole = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    else:
        whole = torch.zeros(shape, dtype=dtype, device=device)
    counts = torch.zeros((2, batch), dtype=torch.int64, device=device)
    return KVCache(whole, counts[0], counts[1])
