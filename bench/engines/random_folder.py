"""A model folder that exists only in memory, with random weights made on the device: for measuring large shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlx_zip.config import parse_zip_section
from mlx_zip.cuda.devices import find_device, raise_if_dtype_unsupported, raise_if_memory_too_small
from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.network.checkpoint import TensorFolder, Weight
from mlx_zip.cuda.network.decoder_config import DecoderConfig
from mlx_zip.layout import MODEL_TYPE


@dataclass
class RandomFolder(TensorFolder):
    """A folder whose `take_weight` returns a random tensor of the requested shape for any name.

    bits, group: quantization of matrices whose width is a multiple of `group`; bits None keeps them dense. generator:
    source of the random numbers. stored: dtype of dense matrices, scales and biases; None for the folder's dtype.
    """

    bits: int | None
    group: int
    generator: torch.Generator
    stored: torch.dtype | None = None

    def take_weight(self, name: str, *shape: int) -> Weight:
        """Returns ones for a norm, zeros for a bias, else a random matrix that keeps the magnitude of its inputs."""
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith(".weight")), dtype=self.dtype, device=self.device)
        if self.bits is None or shape[1] % self.group or "pos_embed" in name:
            kind = self.stored or self.dtype
            numbers = torch.randn(shape, generator=self.generator, dtype=kind, device=self.generator.device)
            return numbers.mul_(shape[1] ** -0.5).to(self.device)
        return self._random_packed_weight(self.bits, *shape)

    def _random_packed_weight(self, bits: int, rows: int, columns: int) -> Packed:
        size = rows, columns * bits // 32
        kind = {"dtype": torch.int32, "device": self.generator.device}
        words = torch.randint(-(2**31), 2**31, size, generator=self.generator, **kind).to(self.device)
        step = math.sqrt(12 / columns) / 2**bits
        scales = torch.full((rows, columns // self.group), step, dtype=self.stored or self.dtype, device=self.device)
        return Packed(words, scales, scales * -(2 ** (bits - 1) - 0.5), bits, self.group)


def random_folder(
    config: dict[str, Any],
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    bits: int | None = None,
    group: int = 64,
    made_on: str | torch.device | None = None,
    kernels: bool = True,
) -> RandomFolder:
    """Returns a folder of random weights. config: config.json of a converted model or a plain model.

    made_on: device whose random generator is used (numbers differ between kinds of devices); None for `device`.
    kernels: as in `TensorFolder`; without them a model computes in float32, and `dtype` is the dtype of its matrices.
    Raises `ConfigError` if `config` is invalid, and `ModelError`, naming needed and free bytes, if the decoder's
    weights do not fit into memory.
    """
    where = find_device(device)
    raise_if_dtype_unsupported(dtype, where)
    section = parse_zip_section(config["zip2zip"]) if config["model_type"] == MODEL_TYPE else None
    decoder = DecoderConfig.from_dict(config)
    raise_if_memory_too_small("random weights of the decoder", decoder_matrix_bytes(decoder, dtype, bits, group), where)
    numbers = torch.Generator(where if made_on is None else made_on).manual_seed(0)
    computed = dtype if kernels else torch.float32
    whole = (Path("random"), config, section, decoder, computed, where, {}, {}, bits, group, numbers, dtype)
    return RandomFolder(*whole, kernels=kernels)


def decoder_matrix_bytes(decoder: DecoderConfig, dtype: torch.dtype, bits: int | None, group: int) -> int:
    attention = (2 * decoder.heads + 2 * decoder.kv_heads) * decoder.head_width * decoder.width
    layer = attention + 3 * decoder.width * decoder.inner
    numbers = decoder.layers * layer + decoder.rows * decoder.width * (1 if decoder.tied else 2)
    if bits is None:
        return numbers * dtype.itemsize
    return numbers * bits // 8 + 2 * dtype.itemsize * numbers // group
