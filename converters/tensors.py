"""Reads safetensors files: headers are checked before any tensor is read, tensors are loaded lazily."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_zip.errors import ConversionError, DataError, errors_as, failure_reason
from mlx_zip.files import check_regular_file, refuse_json_constant

FLOATS = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. key: name in the file. dtype: name of the dtype in safetensors, for example "BF16"."""

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


Table = dict[str, StoredTensor]


def read_json_object_strictly(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises `ConversionError` for other content, for NaN and for a repeated key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is given twice")
        return found

    with errors_as(ConversionError, f"cannot read {path}", OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8")
    with errors_as(ConversionError, f"{path} is not valid JSON", ValueError, RecursionError):
        data = json.loads(text, parse_constant=refuse_json_constant, object_pairs_hook=unique)
    if not isinstance(data, dict):
        raise ConversionError(f"{path} must hold an object, got {type(data).__name__}")
    return data


def read_safetensors_header(path: Path) -> Table:
    """Returns the tensors that a safetensors file contains, without their data.

    Raises `ConversionError` if the file is truncated, or if the header does not match the file's size.
    """
    try:
        check_regular_file(path)
        path.stat()  # fails with the system's reason, which the library's own errors leave out
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            found = {name: file.get_slice(name) for name in names}
            return {
                name: StoredTensor(path, name, one.get_dtype(), tuple(one.get_shape())) for name, one in found.items()
            }
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {failure_reason(error)}") from error
    except DataError as error:
        raise ConversionError(str(error)) from error
    except SafetensorError as error:
        raise ConversionError(f"{path} is no whole safetensors file: {failure_reason(error)}") from error


def read_folder_headers(folder: Path) -> Table:
    """Returns the tensors of a Hugging Face model folder, by name and without their data.

    Reads the files in the folder's index, or else `model.safetensors`. Raises `ConversionError` if neither is there
    or a file is invalid.
    """
    if (folder / INDEX).is_file():
        return _read_shard_headers(folder)
    if (folder / "model.safetensors").is_file():
        return read_safetensors_header(folder / "model.safetensors")
    hint = "; only safetensors weights are read" if list(folder.glob("*.bin")) else ""
    raise ConversionError(f"no model.safetensors and no {INDEX} in {folder}{hint}")


def _read_shard_headers(folder: Path) -> Table:
    """Returns the tensors of all files that the index names. Raises `ConversionError` if index and files disagree."""
    weight_map = read_json_object_strictly(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{INDEX} has no weight_map")
    table: Table = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConversionError(f"{INDEX} names {shard!r}, which is not a safetensors file in the same folder")
        if not os.path.isfile(folder / shard):  # unlike Path.is_file, raises no error for an invalid name
            raise ConversionError(f"{INDEX} names {shard}, which is missing from {folder}")
        for name, tensor in read_safetensors_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise ConversionError(f"{shard} holds {name}, which {INDEX} puts in {weight_map.get(name)}")
            table[name] = tensor
    if absent := weight_map.keys() - table.keys():
        raise ConversionError(f"{INDEX} names tensors that no shard holds: {list_some_names(absent)}")
    return table


def load_tensors_lazily(table: Mapping[str, StoredTensor]) -> dict[str, mx.array]:
    """Returns lazy arrays by name; an array's data are read when the array is first evaluated.

    Raises `ConversionError` if MLX refuses a file, although `read_safetensors_header` accepted the file.
    """
    files: dict[Path, Any] = {}
    arrays = {}
    for name, tensor in table.items():
        if tensor.path not in files:
            with errors_as(ConversionError, f"{tensor.path} cannot be read", RuntimeError, ValueError):
                files[tensor.path] = mx.load(str(tensor.path))
        arrays[name] = files[tensor.path][tensor.key]
    return arrays


def list_some_names(names: Iterable[str], limit: int = 12) -> str:
    """Returns text for a message: the first `limit` names in sorted order, and the number of further names."""
    ordered = sorted(names)
    rest = len(ordered) - limit
    return ", ".join(ordered[:limit]) + (f" and {rest} more" if rest > 0 else "")
