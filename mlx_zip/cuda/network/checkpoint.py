"""Reads a model's folder, dense or packed by MLX, into tensors on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mlx_zip.config import ZipConfig, config_of
from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.memory import check_dtype, check_room, find_device
from mlx_zip.cuda.network.decoder_config import DecoderConfig
from mlx_zip.cuda.network.tensors import FLOATS, Entry, list_tensors, read_tensors
from mlx_zip.errors import ModelError
from mlx_zip.models.folders import model_folder, read_config
from mlx_zip.models.register import MODEL_TYPE

Weight = torch.Tensor | Packed
NORM = "model.norm.weight"  # its dtype is the folder's own


@dataclass
class Folder:
    """A model's folder with its tensors on a device.

    config: config.json. zip: its zip2zip section, None for a plain model. tensors: by checkpoint name; the name of a
    packed matrix ends in ".weight" too. files: the file that each came from. kernels: whether the model runs by
    kernels, or by their references where there is no card; else by PyTorch's own operations on a CPU. dtype: of all
    floating-point tensors; without kernels of what is computed, and matrices may still be as the files have them.
    """

    path: Path
    config: dict[str, Any]
    zip: ZipConfig | None
    decoder: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, Weight]
    files: dict[str, str] = field(repr=False)
    kernels: bool = field(default=True, kw_only=True)

    def take(self, name: str, *shape: int) -> Weight:
        """Removes a tensor from `tensors` and returns it. Raises `ModelError` if it is missing or has another shape."""
        value = self.tensors.pop(name, None)
        if value is None:
            raise ModelError(f"{self.path}: the tensor {name} is missing")
        if tuple(value.shape) != shape:
            raise ModelError(
                f"{self.path / self.files[name]}: {name} has shape {list(value.shape)}, expected {list(shape)}"
            )
        return value

    def take_dense(self, name: str, *shape: int) -> torch.Tensor:
        """Returns what `take` returns, which must not be packed. Raises `ModelError`."""
        value = self.take(name, *shape)
        if isinstance(value, Packed):
            raise ModelError(
                f"{self.path / self.files[name]}: {name} is quantized, which is supported for matrices only"
            )
        return value

    def as_table(self, value: Weight) -> Weight:
        """Returns a matrix whose rows are looked up in the model's dtype."""
        if isinstance(value, Packed):
            return value._replace(scales=value.scales.to(self.dtype), biases=value.biases.to(self.dtype))
        return value.to(self.dtype)


def read_folder(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    without: Sequence[str] = (),
    kernels: bool = True,
) -> Folder:
    """Returns a model's folder with its tensors on a device.

    path: a folder, a bundled model's name or a hub id. device: None takes the first CUDA card, else the CPU. dtype:
    bfloat16, float16 or float32 for all floating-point tensors; None keeps the folder's own. without: prefixes of
    tensors that are not read. kernels: see `Folder`; without kernels the dtype None computes in float32, with matrices
    as the files have them. Raises `ModelError` naming file and tensor, or needed and free bytes; `ConfigError`.
    """
    where, folder = find_device(device), model_folder(path)
    config = read_config(folder)
    decoder = DecoderConfig.from_dict(config)
    section = config_of(config["zip2zip"]) if config["model_type"] == MODEL_TYPE else None
    skip = (*without, "lm_head.") if decoder.tied else tuple(without)
    entries = {
        name: entry
        for name, entry in list_tensors(folder).items()
        if not name.startswith(skip) and "rotary_emb.inv_freq" not in name
    }
    own, asked = _own_dtype(folder, entries), _dtype(dtype)
    kind = asked or (own if kernels else torch.float32)
    check_dtype(kind, where)
    _check_room(folder, entries, kind, decoder, where)
    tensors = read_tensors(folder, config, entries, where, kind, as_stored=not kernels and asked is None)
    files = {name: entry.file for name, entry in entries.items()}
    return Folder(folder, config, section, decoder, kind, where, tensors, files, kernels=kernels)


def _dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype of this name, None for None. Raises `ModelError` for one that is not supported."""
    if name is None:
        return None
    for kind in FLOATS.values():
        if name in (kind, str(kind).removeprefix("torch.")):
            return kind
    known = ", ".join(str(kind).removeprefix("torch.") for kind in FLOATS.values())
    raise ModelError(f"dtype {name} is not supported; supported: {known}")


def _own_dtype(folder: Path, entries: Mapping[str, Entry]) -> torch.dtype:
    """Returns the dtype of the final norm, which stands for the folder's. Raises `ModelError`."""
    if NORM not in entries:
        raise ModelError(f"{folder}: the tensor {NORM} is missing")
    entry = entries[NORM]
    if entry.dtype not in FLOATS:
        raise ModelError(f"{folder / entry.file}: {NORM} has the dtype {entry.dtype}; supported: {', '.join(FLOATS)}")
    return FLOATS[entry.dtype]


def _check_room(
    folder: Path, entries: Mapping[str, Entry], dtype: torch.dtype, decoder: DecoderConfig, device: torch.device
) -> None:
    """Raises `ModelError` if the device has too little memory for the weights.

    One layer counts twice, because its matrices are joined while their parts are still there.
    """
    layers = sum(entry.bytes(dtype) for name, entry in entries.items() if name.startswith("model.layers."))
    needed = sum(entry.bytes(dtype) for entry in entries.values()) + layers // decoder.layers
    check_room(f"{folder}: weights", needed, device)
