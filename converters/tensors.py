"""Reads safetensors files: headers are checked completely before any tensor is read, tensors are loaded lazily."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_zip.errors import ConversionError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
FLOATS = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: path, name in the file, dtype as safetensors names it, and shape."""

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


Table = dict[str, StoredTensor]


def read_json(path: Path) -> Any:
    """Reads a JSON file strictly: NaN and a key given twice are errors. Raises `ConversionError` naming the file."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse_json(file.read(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def parse_json(text: str | bytes, where: str) -> Any:
    """Parses JSON; NaN and a key given twice are errors. Raises `ConversionError` naming `where`."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is given twice")
        return found

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{where} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that must hold an object. Raises `ConversionError` naming the file."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConversionError(f"{path} must hold an object, got {type(data).__name__}")
    return data


def read_header(path: Path) -> Table:
    """Returns the tensors that a safetensors file contains, without their data.

    Checks the header's length and JSON, each dtype, each shape against its bytes, and that the tensors fill the file
    without a gap, an overlap or a rest. Raises `ConversionError` for a truncated or corrupt file. Source: the
    safetensors format description.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ConversionError(f"{path} is truncated or not a safetensors file ({size} bytes)")
            header = parse_json(file.read(length), f"the header of {path}")
    except OSError as error:
        raise ConversionError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(header, dict):
        raise ConversionError(f"the header of {path} is not an object")
    header.pop("__metadata__", None)
    _check_extents(path, header, size - 8 - length)
    return {key: StoredTensor(path, key, value["dtype"], tuple(value["shape"])) for key, value in header.items()}


def _check_extents(path: Path, header: Mapping[str, Any], data_bytes: int) -> None:
    """Checks that every header entry is well formed and that the tensors cover the data exactly."""
    extents = []
    for name, entry in header.items():
        dtype, shape, span = _entry_fields(entry)
        if dtype not in ITEM_BYTES or not _is_shape(shape) or not _is_shape(span) or len(span) != 2:
            raise ConversionError(f"{path}: the header's entry for {name} is malformed")
        if span[1] - span[0] != ITEM_BYTES[dtype] * prod(shape):
            raise ConversionError(f"{path}: {name} has {span[1] - span[0]} bytes, not {dtype} {shape}")
        extents.append((span[0], span[1], name))
    end = 0
    for begin, stop, name in sorted(extents):
        if begin != end:
            raise ConversionError(f"{path}: {name} begins at byte {begin}, expected {end}")
        end = stop
    if end != data_bytes:
        raise ConversionError(f"{path} is truncated or has a tail: {data_bytes} data bytes, header says {end}")


def _entry_fields(entry: Any) -> tuple[Any, Any, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return None, None, None
    return entry["dtype"], entry.get("shape"), entry.get("data_offsets")


def _is_shape(value: Any) -> bool:
    """Returns whether a value is a list of integers from 0 to 2^62 - 1."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def read_model_files(folder: Path) -> Table:
    """Returns the tensors of a Hugging Face model folder, by name and without their data.

    They are those of the files in the folder's index, or else of `model.safetensors`. Raises `ConversionError`.
    """
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    if (folder / "model.safetensors").is_file():
        return read_header(folder / "model.safetensors")
    hint = "; only safetensors weights are read" if list(folder.glob("*.bin")) else ""
    raise ConversionError(f"no model.safetensors and no {INDEX} in {folder}{hint}")


def _read_shards(folder: Path) -> Table:
    """Returns the tensors of all files that the index names. Raises `ConversionError` if it and the files disagree."""
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{INDEX} has no weight_map")
    table: Table = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConversionError(f"{INDEX} names {shard!r}, which is not a safetensors file in the same folder")
        if not os.path.isfile(folder / shard):  # unlike Path.is_file, no error for a name that cannot be
            raise ConversionError(f"{INDEX} names {shard}, which is missing from {folder}")
        for name, tensor in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise ConversionError(f"{shard} holds {name}, which {INDEX} puts in {weight_map.get(name)}")
            table[name] = tensor
    if absent := weight_map.keys() - table.keys():
        raise ConversionError(f"{INDEX} names tensors that no shard holds: {list_some_names(absent)}")
    return table


def load_lazily(table: Mapping[str, StoredTensor]) -> dict[str, mx.array]:
    """Returns lazy arrays by name; a tensor's data are read when the array is first evaluated.

    Raises `ConversionError` for a file that MLX refuses although `read_header` accepts it.
    """
    files: dict[Path, Any] = {}
    arrays = {}
    for name, tensor in table.items():
        if tensor.path not in files:
            try:
                files[tensor.path] = mx.load(str(tensor.path))
            except (RuntimeError, ValueError) as error:
                raise ConversionError(f"{tensor.path} cannot be read: {error}") from error
        arrays[name] = files[tensor.path][tensor.key]
    return arrays


def list_some_names(names: Iterable[str], limit: int = 12) -> str:
    """Returns sorted names for a message, at most `limit` of them, and the number of the others."""
    ordered = sorted(names)
    rest = len(ordered) - limit
    return ", ".join(ordered[:limit]) + (f" and {rest} more" if rest > 0 else "")
