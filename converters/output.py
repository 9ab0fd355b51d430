"""Writes model folders. After an error no folder is left. Equal tensors give files with equal bytes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_zip.converters.lora import Lora, read_lora, to_mlx_adapter
from mlx_zip.converters.prepared import ADAPTERS, PreparedModel, tensors_by_name
from mlx_zip.converters.source import ModelPlace
from mlx_zip.converters.tensors import DTYPES, INDEX
from mlx_zip.converters.tokenizer_files import copy_tokenizer
from mlx_zip.errors import ConversionError, errors_as, failure_reason, first_message_line
from mlx_zip.files import atomic_folder, write_json
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.rows.fingerprints import SideFingerprints, host_bytes
from mlx_zip.packs.pack import IN_FOLDER, save_pack
from mlx_zip.progress import ProgressBar
from mlx_zip.text import hub

MAX_SHARD_BYTES = 5 << 30  # as mlx-lm
_DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8"}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed when it is written. make: returns the array, of shape `shape` and type `dtype`."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    make: Callable[[], mx.array]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.dtype.size


def refuse_existing_path(path: Path, flag: str = "--mlx-path") -> None:
    """Raises `ConversionError` if something exists at `path`. flag: command-line flag of the path, for the message."""
    if re.search("[\0\ud800-\udfff]", str(path)):  # the library tokenizers writes to UTF-8 names only
        raise ConversionError(f"{flag} {str(path)!r} is not a file name in UTF-8")
    if os.path.lexists(path):
        raise ConversionError(f"{path} already exists; delete it or choose another {flag}")


@contextlib.contextmanager
def new_model_folder(path: Path, flag: str = "--mlx-path") -> Iterator[Path]:
    """Context manager: yields a temporary folder to fill, which becomes `path` on success (see `files.atomic_folder`).

    Raises `ConversionError` if something exists at `path`, the disk is full or `path` cannot be written.
    """
    refuse_existing_path(path, flag)
    try:
        with atomic_folder(path, replace=False) as partial:
            yield partial
    except FileExistsError:
        refuse_existing_path(path, flag)
        raise
    except OSError as error:
        raise ConversionError(f"cannot write {path}: {failure_reason(error)}; nothing was kept") from error


def take_weights(model: nn.Module) -> tuple[dict[str, mx.array], int]:
    """Returns the model's tensors by name and its number of parameters; the model no longer holds its tensors."""
    from mlx_lm.utils import get_total_parameters

    weights, parameters = tensors_by_name(model), get_total_parameters(model)
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    return weights, parameters


def write_model(
    folder: Path,
    weights: dict[str, Any],
    parameters: int,
    config: dict[str, Any],
    progress: bool,
    framework: str = "mlx",
) -> None:
    """Writes `model*.safetensors`, the index and config.json. To save memory, removes written tensors from `weights`.

    weights: `mx.array` or `LazyTensor` values by name. parameters: number of parameters, for the index. config: the
    content of config.json; a zip2zip section gets a fingerprint of the weights that make hyper rows. progress: whether
    to draw a bar on a terminal. framework: "mlx" or "pt", the format named in the files' metadata.
    """
    section, prints = config.get("zip2zip"), SideFingerprints()
    shards = _group_into_shards(weights)
    total = sum(array.nbytes for array in weights.values())
    weight_map: dict[str, str] = {}
    with ProgressBar(len(weights), "tensor", "Writing", shown=progress) as step:

        def stored(name: str, array: mx.array, data: memoryview) -> None:
            if section is not None:
                prints.add(name, array, data)
            step()

        for number, names in enumerate(shards, start=1):
            single = len(shards) == 1
            file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(folder / file, {name: weights.pop(name) for name in names}, stored, framework)
            weight_map |= dict.fromkeys(names, file)
            mx.clear_cache()
    metadata = {"total_size": total, "total_parameters": parameters}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    if section is not None:
        section["fingerprint"] = prints.sides(ModelArgs(config).zip_config, config.get("quantization", {}))
    write_json(folder / "config.json", config)


def _group_into_shards(weights: Mapping[str, Any]) -> list[list[str]]:
    """Returns the sorted names in groups, one group per file of at most `MAX_SHARD_BYTES`."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(weights):
        if shards[-1] and size + weights[name].nbytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += weights[name].nbytes
    return shards


def write_tensors(
    path: Path,
    arrays: dict[str, Any],
    on_tensor: Callable[[str, mx.array, memoryview], None] | None = None,
    framework: str = "mlx",
) -> None:
    """Writes one safetensors file. To save memory, removes each written tensor from `arrays`.

    arrays: `mx.array` or `LazyTensor` values by name. Tensors are ordered by item size, for alignment, then by name.
    on_tensor(name, array, bytes) is called after each tensor is written. framework: see `write_model`.
    """
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": framework}}
    end = 0
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        dtype, shape = _DTYPES[arrays[name].dtype], list(arrays[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            array = arrays.pop(name)
            array = array.make() if isinstance(array, LazyTensor) else array
            data = host_bytes(array)
            file.write(data)
            if on_tensor is not None:
                on_tensor(name, array, data)


def write_model_folder(out: Path, prepared: PreparedModel, trust_remote_code: bool, progress: bool) -> None:
    """Writes the prepared model to the new folder `out`. progress: as in `write_model`.

    Raises `ConversionError` if the folder cannot be written.
    """
    weights, parameters = take_weights(prepared.model)
    with new_model_folder(out) as folder:
        write_model(folder, weights, parameters, prepared.config, progress)
        copy_tokenizer(prepared.tokenizer, folder, prepared.facts, trust_remote_code)
        (folder / "README.md").write_text(prepared.card, encoding="utf-8")
        if prepared.pack is not None:
            save_pack(folder / IN_FOLDER, prepared.pack)
        if prepared.kept is not None:
            (folder / ADAPTERS).mkdir()
            _write_adapter_files(folder / ADAPTERS, prepared.kept, None)


def write_adapter(out: Path, place: ModelPlace, dtype: str | None) -> None:
    """Writes the PEFT LoRA adapter at `place` to the new folder `out` as an mlx-lm adapter.

    dtype: name of the type to cast to, None for the adapter's own. Raises `ConversionError` if it cannot be converted.
    """
    lora = read_lora(place.folder)
    with new_model_folder(out) as folder:
        _write_adapter_files(folder, lora, DTYPES[dtype] if dtype else None)


def _write_adapter_files(folder: Path, lora: Lora, dtype: mx.Dtype | None) -> None:
    weights, config = to_mlx_adapter(lora, dtype)
    write_tensors(folder / "adapters.safetensors", weights)
    write_json(folder / "adapter_config.json", config)


# ---- the hub


def check_repository_name(name: str) -> None:
    """Raises `ConversionError` if `name` is not a valid name for a hub repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with errors_as(ConversionError, f"--upload-repo {name!r} is not a hub id", HFValidationError):
        validate_repo_id(name)
    if not name:
        raise ConversionError("--upload-repo is empty; name a hub id, owner/name")


def upload_folder(folder: Path, repository: str) -> None:
    """Creates the repository if needed and uploads the folder to it in one commit.

    Raises `ConversionError` if the hub refuses or cannot be reached. The local folder is never changed.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Add model converted by mlx_zip")
    except hub.hub_error_types() as error:
        raise ConversionError(
            f"{folder} is converted, but could not be uploaded to {repository}: {first_message_line(error)}"
        ) from error
