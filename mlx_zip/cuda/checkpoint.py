"""The safetensors files of a model's folder: what they hold, the tensors, packed ones put together, a fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.errors import DataError, ModelError, first_line
from mlx_zip.files import check_in
from mlx_zip.models.decoders import TORCH_BITS, TORCH_GROUPS

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # by safetensors' names
WORDS = "U32"  # dtype of packed matrices
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """What a file says of one tensor before it is read. dtype: safetensors' name."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    def bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes that the tensor takes if floating-point tensors are stored in `dtype`."""
        return math.prod(self.shape) * (dtype.itemsize if self.dtype in FLOATS else 4)


def list_tensors(folder: Path) -> dict[str, Entry]:
    """Returns every tensor of a folder's model*.safetensors by name. Raises `ModelError` naming the file at fault."""
    files = sorted(folder.glob("model*.safetensors"))
    _check_shards(folder, {file.name for file in files})
    found: dict[str, Entry] = {}
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                part = tensors.get_slice(name)
                if name in found:
                    raise ModelError(f"{file}: {name} is in {found[name].file} too")
                found[name] = Entry(file.name, str(part.get_dtype()), tuple(part.get_shape()))
    return found


def _check_shards(folder: Path, files: set[str]) -> None:
    """Raises `ModelError` if there is no weight file, or not every file that the folder's index names."""
    if not files:
        raise ModelError(f"{folder}: there is no model*.safetensors")
    path = folder / INDEX
    if not path.exists():
        return
    try:
        named = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
    if missing := sorted(map(str, named - files)):
        raise ModelError(f"{path} names files that are missing: {', '.join(missing)}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises `ModelError` naming a file that cannot be read."""
    try:
        check_in(file)
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            yield tensors
    except (OSError, SafetensorError, DataError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}") from error


def read_tensors(
    folder: Path,
    config: Mapping[str, Any],
    entries: Mapping[str, Entry],
    device: torch.device,
    dtype: torch.dtype,
    as_stored: bool = False,
) -> dict[str, torch.Tensor | Packed]:
    """Returns the tensors of `entries` on a device, floating-point ones in `dtype`, packed ones as `Packed`.

    as_stored: leaves tensors of several axes, such as matrices, in the dtype of their file.
    Raises `ModelError` naming file and tensor for dtypes and quantizations that are not supported.
    """
    settings = {name: _packing(folder, config, name, entry) for name, entry in entries.items() if entry.dtype == WORDS}
    for name, entry in entries.items():
        if entry.dtype not in (*FLOATS, WORDS):
            known = ", ".join(FLOATS)
            raise ModelError(f"{folder / entry.file}: {name} has the dtype {entry.dtype}; supported: {known}")
    loose: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        with _opened(folder / file) as tensors:
            for name in (name for name, entry in entries.items() if entry.file == file):
                tensor = tensors.get_tensor(name)
                loose[name] = _moved(tensor, device, tensor.dtype if as_stored and tensor.dim() > 1 else dtype)
    return _put_together(folder, entries, settings, loose)


def _moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor on the device: words as int32, all else in `dtype`."""
    if tensor.dtype == torch.uint32:
        return tensor.view(torch.int32).to(device)
    return tensor.to(device, dtype)


def _packing(folder: Path, config: Mapping[str, Any], name: str, entry: Entry) -> tuple[int, int]:
    """Returns bits and group size of a packed matrix, its own in config.json or those of all. Raises `ModelError`."""
    where, module = folder / entry.file, name.removesuffix(".weight")
    record = config.get("quantization")
    if not isinstance(record, Mapping):
        raise ModelError(f"{where}: {name} is quantized, but config.json has no quantization section of MLX's")
    own = record.get(module)
    own = own if isinstance(own, Mapping) else record
    mode, bits, group = own.get("mode", "affine"), own.get("bits"), own.get("group_size")
    if mode != "affine":
        raise ModelError(f"{where}: {name} is quantized in the mode {mode!r}; supported: affine")
    if type(bits) is not int or type(group) is not int or bits not in TORCH_BITS or group not in TORCH_GROUPS:
        raise ModelError(
            f"{where}: {name} is quantized to {bits} bits in groups of {group}; supported: 4 or 8 bits, groups of 32, "
            "64 or 128"
        )
    return bits, group


def _put_together(
    folder: Path,
    entries: Mapping[str, Entry],
    settings: Mapping[str, tuple[int, int]],
    loose: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor | Packed]:
    """Returns the tensors with words, scales and biases of each packed matrix as one `Packed`. Raises `ModelError`."""
    whole: dict[str, torch.Tensor | Packed] = {}
    for name, (bits, group) in settings.items():
        module, where = name.removesuffix(".weight"), folder / entries[name].file
        parts = [loose.pop(part, None) for part in (name, f"{module}.scales", f"{module}.biases")]
        words, scales, biases = parts
        if words is None or scales is None or biases is None:
            raise ModelError(f"{where}: {name} is quantized, but its scales or biases are missing")
        packed = Packed(words, scales, biases, bits, group)
        try:
            packed.check()
        except ValueError as error:
            raise ModelError(f"{where}: {name}: {error}") from error
        whole[name] = packed
    return {**loose, **whole}


# ---- the fingerprint of a folder, equal to the one that MLX computes of the loaded model
#
# Packs with tuned rows name their model by it (`mlx_zip.models.rows.fingerprints`): each tensor's name, type and shape,
# and a few of its values. It is computed from the files, so it does not depend on the dtype that this engine runs in.

SAMPLES = 64  # as in mlx_zip.models.rows.fingerprints
HEAD = "lm_head."
Fact = tuple[str, str, tuple[int, ...], str]  # name, MLX's name of the type, shape, values in hex


def folder_fingerprint(folder: Path, tied: bool) -> str:
    """Returns a sha256, as hex, of a folder's tensors. tied: whether the head is the embedding. Raises `ModelError`."""
    return fingerprint_of(fact for fact in _facts(folder) if not (tied and fact[0].startswith(HEAD)))


def fingerprint_of(facts: Iterable[Fact]) -> str:
    """Returns a sha256, as hex, of facts about tensors in any order."""
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()


def _facts(folder: Path) -> Iterable[Fact]:
    """Yields the facts of every tensor that MLX would hold as a parameter. Only samples of the values are read."""
    names: dict[str, list[str]] = {}
    for name, entry in list_tensors(folder).items():
        if "rotary_emb.inv_freq" not in name:
            names.setdefault(entry.file, []).append(name)
    for file, inside in names.items():
        with safe_open(str(folder / file), framework="pt", device="cpu") as tensors:
            for name in inside:
                yield _fact(name, tensors.get_tensor(name))


def _fact(name: str, tensor: torch.Tensor) -> Fact:
    """Returns what a fingerprint covers of one tensor."""
    size = tensor.numel()
    at = np.linspace(0, size - 1, min(SAMPLES, size)).astype(np.int64)
    values = tensor.reshape(-1)[torch.from_numpy(at)].contiguous().view(torch.uint8).numpy()
    dtype = str(tensor.dtype).replace("torch.", "mlx.core.")
    return name, dtype, tuple(tensor.shape), values.tobytes().hex()
