"""Reads a model's folder, dense or packed by MLX: its tensors by name, on a device, and its fingerprint.

A model takes its weights out of a `TensorFolder`. The rest of the module reads the safetensors files and assembles
packed matrices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mlx_zip.config import ZipConfig, parse_zip_section
from mlx_zip.cuda.devices import find_device, raise_if_dtype_unsupported, raise_if_memory_too_small
from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.network.decoder_config import DecoderConfig
from mlx_zip.errors import DataError, ModelError, first_message_line
from mlx_zip.files import check_regular_file
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.decoder_options import TORCH_BITS, TORCH_GROUPS
from mlx_zip.models.model_folder import find_model_folder, read_model_config
from mlx_zip.packs.tuned import TensorFact, fingerprint_tensors, sampled_places

FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # by safetensors' names
_PACKED_DTYPE = "U32"  # dtype of packed matrices
_INDEX = "model.safetensors.index.json"
Weight = torch.Tensor | Packed  # a dense tensor of any axes, or a packed matrix
_FINAL_NORM = "model.norm.weight"  # the dtype of this tensor counts as the folder's


@dataclass
class TensorFolder:
    """A model's folder with its tensors on a device.

    config: contents of config.json. zip: the zip2zip section of config.json, None for a plain model. tensors: by
    checkpoint name; the name of a packed matrix ends in ".weight" too. files: by tensor name, the file of the tensor.
    kernels: True runs the model by kernels, or by their references on a CPU; False by PyTorch's own operations on a
    CPU. dtype: of all floating-point tensors; if `kernels` is False, of activations, and matrices may keep the dtype of
    their file.
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

    def take_weight(self, name: str, *shape: int) -> Weight:
        """Removes a tensor from `tensors` and returns it. Raises `ModelError` if it is missing or has another shape."""
        value = self.tensors.pop(name, None)
        if value is None:
            raise ModelError(f"{self.path}: the tensor {name} is missing")
        if tuple(value.shape) != shape:
            raise ModelError(
                f"{self.path / self.files[name]}: {name} has shape {list(value.shape)}, expected {list(shape)}"
            )
        return value

    def take_dense_tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Removes and returns a tensor as `take_weight` does; also raises `ModelError` if the tensor is packed."""
        value = self.take_weight(name, *shape)
        if isinstance(value, Packed):
            raise ModelError(
                f"{self.path / self.files[name]}: {name} is quantized, which is supported for matrices only"
            )
        return value

    def to_lookup_table(self, value: Weight) -> Weight:
        """Returns a matrix for row look-ups, whose values (if packed: scales and biases) have the model's dtype."""
        if isinstance(value, Packed):
            return value._replace(scales=value.scales.to(self.dtype), biases=value.biases.to(self.dtype))
        return value.to(self.dtype)


def read_tensor_folder(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    skipped_prefixes: Sequence[str] = (),
    kernels: bool = True,
) -> TensorFolder:
    """Returns a model's folder with its tensors on a device.

    path: a folder, a bundled model's name or a hub id. device: None takes the current GPU, else the CPU. dtype:
    bfloat16, float16 or float32 for all floating-point tensors; None keeps the folder's own. skipped_prefixes: name
    prefixes of tensors that are not read. kernels: see `TensorFolder`; without kernels, None for dtype means float32
    activations and matrices in the dtype of their file. Raises `ModelError` naming file and tensor if one is invalid,
    `ModelError` naming needed and free bytes if memory is too small, `ConfigError` if the config is not supported.
    """
    where, folder = find_device(device), find_model_folder(path)
    config = read_model_config(folder)
    decoder = DecoderConfig.from_dict(config)
    section = parse_zip_section(config["zip2zip"]) if config["model_type"] == MODEL_TYPE else None
    skip = (*skipped_prefixes, "lm_head.") if decoder.tied else tuple(skipped_prefixes)
    entries = {
        name: entry
        for name, entry in _read_tensor_headers(folder).items()
        if not name.startswith(skip) and "rotary_emb.inv_freq" not in name
    }
    stored, asked = _stored_dtype(folder, entries), _parse_dtype(dtype)
    kind = asked or (stored if kernels else torch.float32)
    raise_if_dtype_unsupported(kind, where)
    _raise_if_weights_too_large(folder, entries, kind, decoder, where)
    tensors = _read_tensors(folder, config, entries, where, kind, as_stored=not kernels and asked is None)
    files = {name: entry.file for name, entry in entries.items()}
    return TensorFolder(folder, config, section, decoder, kind, where, tensors, files, kernels=kernels)


def _parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    if name is None:
        return None
    for kind in FLOAT_DTYPES.values():
        if name in (kind, str(kind).removeprefix("torch.")):
            return kind
    known = ", ".join(str(kind).removeprefix("torch.") for kind in FLOAT_DTYPES.values())
    raise ModelError(f"dtype {name} is not supported; supported: {known}")


def _stored_dtype(folder: Path, entries: Mapping[str, _TensorHeader]) -> torch.dtype:
    """Returns the folder's dtype, that of the final norm. Raises `ModelError` if it is missing or not supported."""
    if _FINAL_NORM not in entries:
        raise ModelError(f"{folder}: the tensor {_FINAL_NORM} is missing")
    entry = entries[_FINAL_NORM]
    if entry.dtype not in FLOAT_DTYPES:
        raise ModelError(
            f"{folder / entry.file}: {_FINAL_NORM} has the dtype {entry.dtype}; supported: {', '.join(FLOAT_DTYPES)}"
        )
    return FLOAT_DTYPES[entry.dtype]


def _raise_if_weights_too_large(
    folder: Path, entries: Mapping[str, _TensorHeader], dtype: torch.dtype, decoder: DecoderConfig, device: torch.device
) -> None:
    """Raises `ModelError` if the device has too little memory for the weights.

    One layer counts twice: while its matrices are joined, the parts and the joined matrices are both in memory.
    """
    layers = sum(entry.bytes_in(dtype) for name, entry in entries.items() if name.startswith("model.layers."))
    needed = sum(entry.bytes_in(dtype) for entry in entries.values()) + layers // decoder.layers
    raise_if_memory_too_small(f"{folder}: weights", needed, device)


# ---- the safetensors files


@dataclass(frozen=True)
class _TensorHeader:
    """The facts about one tensor from its file's header. dtype: safetensors' name."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Returns the bytes that the tensor takes if floating-point tensors are stored in `dtype`."""
        return math.prod(self.shape) * (dtype.itemsize if self.dtype in FLOAT_DTYPES else 4)


def _read_tensor_headers(folder: Path) -> dict[str, _TensorHeader]:
    """Returns the headers of all tensors in model*.safetensors, by name. Raises `ModelError` naming the bad file."""
    files = sorted(folder.glob("model*.safetensors"))
    _raise_if_shards_missing(folder, {file.name for file in files})
    found: dict[str, _TensorHeader] = {}
    for file in files:
        with _open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                part = tensors.get_slice(name)
                if name in found:
                    raise ModelError(f"{file}: {name} is in {found[name].file} too")
                found[name] = _TensorHeader(file.name, str(part.get_dtype()), tuple(part.get_shape()))
    return found


def _raise_if_shards_missing(folder: Path, files: set[str]) -> None:
    if not files:
        raise ModelError(f"{folder}: there is no model*.safetensors")
    path = folder / _INDEX
    if not path.exists():
        return
    try:
        named = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {first_message_line(error)}") from error
    if missing := sorted(map(str, named - files)):
        raise ModelError(f"{path} names files that are missing: {', '.join(missing)}")


@contextmanager
def _open_tensors(file: Path) -> Iterator[Any]:
    try:
        check_regular_file(file)
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            yield tensors
    except (OSError, SafetensorError, DataError) as error:
        raise ModelError(f"{file} cannot be read: {first_message_line(error)}") from error


def _read_tensors(
    folder: Path,
    config: Mapping[str, Any],
    entries: Mapping[str, _TensorHeader],
    device: torch.device,
    dtype: torch.dtype,
    as_stored: bool = False,
) -> dict[str, Weight]:
    """Returns the tensors of `entries` on a device, floating-point ones in `dtype`, packed ones as `Packed`.

    as_stored: leaves tensors of several axes, such as matrices, in the dtype of their file. Raises `ModelError`, naming
    file and tensor, if a dtype or quantization is not supported.
    """
    settings = {
        name: read_packing(config.get("quantization"), name, folder / entry.file)
        for name, entry in entries.items()
        if entry.dtype == _PACKED_DTYPE
    }
    for name, entry in entries.items():
        if entry.dtype not in (*FLOAT_DTYPES, _PACKED_DTYPE):
            known = ", ".join(FLOAT_DTYPES)
            raise ModelError(f"{folder / entry.file}: {name} has the dtype {entry.dtype}; supported: {known}")
    loose: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        with _open_tensors(folder / file) as tensors:
            for name in (name for name, entry in entries.items() if entry.file == file):
                tensor = tensors.get_tensor(name)
                loose[name] = _to_device(tensor, device, tensor.dtype if as_stored and tensor.dim() > 1 else dtype)
    return _assemble_packed_matrices(folder, entries, settings, loose)


def _to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor on the device: words of packed matrices as int32, all others in `dtype`."""
    if tensor.dtype == torch.uint32:
        return tensor.view(torch.int32).to(device)
    return tensor.to(device, dtype)


def read_packing(record: Any, name: str, where: Path) -> tuple[int, int]:
    """Returns bits and group size of a packed matrix: the matrix's own settings, else the model's.

    record: the quantization section of config.json. name: the tensor with the packed words. where: the tensor's file.
    Raises `ModelError` if the settings are not supported.
    """
    module = name.removesuffix(".weight")
    if not isinstance(record, Mapping):
        raise ModelError(f"{where}: {name} is quantized, but config.json has no quantization section of MLX's")
    stored = record.get(module)
    stored = stored if isinstance(stored, Mapping) else record
    mode, bits, group = stored.get("mode", "affine"), stored.get("bits"), stored.get("group_size")
    if mode != "affine":
        raise ModelError(f"{where}: {name} is quantized in the mode {mode!r}; supported: affine")
    if type(bits) is not int or type(group) is not int or bits not in TORCH_BITS or group not in TORCH_GROUPS:
        raise ModelError(
            f"{where}: {name} is quantized to {bits} bits in groups of {group}; supported: 4 or 8 bits, groups of 32, "
            "64 or 128"
        )
    return bits, group


def _assemble_packed_matrices(
    folder: Path,
    entries: Mapping[str, _TensorHeader],
    settings: Mapping[str, tuple[int, int]],
    loose: dict[str, torch.Tensor],
) -> dict[str, Weight]:
    """Returns the tensors with words, scales and biases of each packed matrix as one `Packed`. Raises `ModelError`."""
    whole: dict[str, Weight] = {}
    for name, (bits, group) in settings.items():
        module = name.removesuffix(".weight")
        parts = [loose.pop(part, None) for part in (name, f"{module}.scales", f"{module}.biases")]
        whole[name] = make_packed_matrix(parts, bits, group, name, folder / entries[name].file)
    return {**loose, **whole}


def make_packed_matrix(parts: Sequence[torch.Tensor | None], bits: int, group: int, name: str, where: Path) -> Packed:
    """Returns a packed matrix. parts: words, scales and biases, None for a missing part.

    Raises `ModelError` if a part is missing or the parts do not fit together.
    """
    words, scales, biases = parts
    if words is None or scales is None or biases is None:
        missing = "words" if words is None else "scales or biases"
        raise ModelError(f"{where}: {name} is quantized, but its {missing} are missing")
    packed = Packed(words, scales, biases, bits, group)
    try:
        packed.check()
    except ValueError as error:
        raise ModelError(f"{where}: {name}: {error}") from error
    return packed


# ---- the fingerprint of a folder, equal to the fingerprint that MLX computes from the loaded model
#
# Packs with tuned rows identify their model by its fingerprint (`mlx_zip.models.rows.fingerprints`), a hash of each
# tensor's name, dtype, shape and a few values. These are read from the files, so that the fingerprint does not depend
# on the dtype that this engine runs in.

_HEAD = "lm_head."


def folder_fingerprint(folder: Path, tied: bool) -> str:
    """Returns a sha256, as hex, of a folder's tensors. tied: whether the head is the embedding. Raises `ModelError`."""
    facts = _fingerprint_facts(folder)
    return fingerprint_tensors(fact for fact in facts if not (tied and fact[0].startswith(_HEAD)))


def _fingerprint_facts(folder: Path) -> Iterator[TensorFact]:
    """Yields the facts of every tensor that MLX would hold as a parameter."""
    names: dict[str, list[str]] = {}
    for name, entry in _read_tensor_headers(folder).items():
        if "rotary_emb.inv_freq" not in name:
            names.setdefault(entry.file, []).append(name)
    for file, inside in names.items():
        with safe_open(str(folder / file), framework="pt", device="cpu") as tensors:
            for name in inside:
                yield _fingerprint_fact(name, tensors.get_tensor(name))


def _fingerprint_fact(name: str, tensor: torch.Tensor) -> TensorFact:
    at = torch.from_numpy(sampled_places(tensor.numel()))
    values = tensor.reshape(-1)[at].contiguous().view(torch.uint8).numpy()
    dtype = str(tensor.dtype).replace("torch.", "mlx.core.")
    return name, dtype, tuple(tensor.shape), values.tobytes().hex()
