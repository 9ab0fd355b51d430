"""Reads JSON and safetensors files strictly: headers are checked before any tensor is read, tensors are lazy arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_zip.errors import ConversionError, DataError, errors_as, failure_reason
from mlx_zip.files import check_regular_file, refuse_json_constant

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
FLOATS = tuple(DTYPES.values())
_REFUSED = ("F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")  # MLX reads none of them, or as bytes
INDEX = "model.safetensors.index.json"

Tensors = dict[str, mx.array]  # lazy arrays by name; an array's data are read when the array is first evaluated


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


def read_tensors(path: Path) -> Tensors:
    """Returns the tensors of a safetensors file.

    Raises `ConversionError` if the file is truncated, if the header does not match the file's size, or if MLX does
    not read the type of a tensor.
    """
    try:
        check_regular_file(path)
        path.stat()  # fails with the system's reason, which the library's own errors leave out
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            kinds = {name: file.get_slice(name).get_dtype() for name in names}
        if odd := [f"{name} {kind}" for name, kind in kinds.items() if kind in _REFUSED]:
            raise ConversionError(f"{path} has tensors of types that are not read: {list_some_names(odd)}")
        tensors: Any = mx.load(str(path))
        return tensors
    except DataError as error:
        raise ConversionError(str(error)) from error
    except SafetensorError as error:
        raise ConversionError(f"{path} is no whole safetensors file: {failure_reason(error)}") from error
    except (OSError, RuntimeError, ValueError) as error:  # the last two: MLX refuses the file
        raise ConversionError(f"{path} cannot be read: {failure_reason(error)}") from error


def read_folder_tensors(folder: Path) -> Tensors:
    """Returns the tensors of a Hugging Face model folder.

    Reads the files in the folder's index, or else `model.safetensors`. Raises `ConversionError` if neither is there
    or a file is invalid.
    """
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    if (folder / "model.safetensors").is_file():
        return read_tensors(folder / "model.safetensors")
    hint = "; only safetensors weights are read" if list(folder.glob("*.bin")) else ""
    raise ConversionError(f"no model.safetensors and no {INDEX} in {folder}{hint}")


def _read_shards(folder: Path) -> Tensors:
    """Returns the tensors of all files that the index names. Raises `ConversionError` if index and files disagree."""
    weight_map = read_json_object_strictly(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{INDEX} has no weight_map")
    tensors: Tensors = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConversionError(f"{INDEX} names {shard!r}, which is not a safetensors file in the same folder")
        if not os.path.isfile(folder / shard):  # unlike Path.is_file, raises no error for an invalid name
            raise ConversionError(f"{INDEX} names {shard}, which is missing from {folder}")
        for name, tensor in read_tensors(folder / shard).items():
            if weight_map.get(name) != shard:
                raise ConversionError(f"{shard} holds {name}, which {INDEX} puts in {weight_map.get(name)}")
            tensors[name] = tensor
    if absent := weight_map.keys() - tensors.keys():
        raise ConversionError(f"{INDEX} names tensors that no shard holds: {list_some_names(absent)}")
    return tensors


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns the name of a type, for example "bfloat16"."""
    return str(dtype).removeprefix("mlx.core.")


def list_some_names(names: Iterable[str], limit: int = 12) -> str:
    """Returns text for a message: the first `limit` names in sorted order, and the number of further names."""
    ordered = sorted(names)
    rest = len(ordered) - limit
    return ", ".join(ordered[:limit]) + (f" and {rest} more" if rest > 0 else "")
