"""Reads GGUF files. The header (metadata and tensor list) is checked completely before any tensor is read.

Source of the format: gguf.md of ggml, versions 2 and 3; block layouts: ggml-common.h of ggml.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.converters.tensors import dtype_name, list_some_names
from mlx_zip.errors import ConversionError, errors_as, import_or_explain

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 100_000_000  # metadata and tensor list; the largest known files need 20 MB
MAX_ITEMS = 1 << 21  # items per array; the largest known vocabularies have 0.5 million merges
MAX_TENSORS, MAX_KEYS, MAX_NAME_BYTES = 1 << 16, 1 << 12, 256
GROUP = 32  # weights in a block of Q8_0, Q4_0 and Q4_1, and the group size of their MLX form
_CHUNK = 1 << 23  # values of a tensor that are read at a time


@dataclass(frozen=True)
class TensorKind:
    """A tensor type. values, bytes: numbers per block. bits: bits per weight in MLX, 0 if MLX lacks the type."""

    name: str
    values: int
    bytes: int
    bits: int = 0


KINDS = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18, 4),
    3: TensorKind("Q4_1", 32, 20, 4),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34, 8),
    10: TensorKind("Q2_K", 256, 84),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    30: TensorKind("BF16", 1, 2),
}
DENSE = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_U32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9


def is_gguf(path: Path) -> bool:
    """Returns whether a file begins with the magic bytes of GGUF. Raises `ConversionError` if it cannot be read."""
    with errors_as(ConversionError, f"cannot read {path}", OSError), open(path, "rb") as file:
        return file.read(4) == MAGIC


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file. shape: [rows, columns] or [columns]. offset: position of the tensor's data in the file."""

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is a whole number of blocks."""
        return self.shape[-1] // self.kind.values * self.kind.bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """The content of a file. metadata: values by key; an array is a NumPy array or a list of strings.

    version: size and time of change of the file whose header was read. The tensors are read from the same version only:
    methods that read the file raise `ConversionError` if the file has changed or cannot be read.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    version: tuple[int, int]

    def error(self, what: str) -> ConversionError:
        """Returns the error for something that is wrong with this file."""
        return ConversionError(f"{self.path}: {what}")

    def sha256(self) -> str:
        """Returns the hash of the whole file in hex."""
        with _open_unchanged(self.path, self.version) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read_bytes(self, begin: int, size: int) -> np.ndarray:
        """Returns `size` bytes of the file, uint8 [size], from the byte `begin` on."""
        data = np.empty(size, np.uint8)
        with _open_unchanged(self.path, self.version) as file:
            file.seek(begin)
            file.readinto(data.data)
        return data

    def dense_values(
        self, tensor: GgufTensor, dtype: mx.Dtype, order: np.ndarray | None, shift: float = 0.0
    ) -> mx.array:
        """Returns the values of a tensor plus `shift`, cast to `dtype`. Computes them in float32, part by part.

        order: indices of the rows to return, None for all rows in the file's order. Raises `ConversionError` if a value
        is not finite in `dtype`, and `InstallationError` if the library gguf is needed and missing.
        """
        parts = (_dequantize_rows(rows, tensor.kind) + shift for rows in self._iterate_rows(tensor, order))
        made = (self._cast_to_finite(part, dtype, f"{tensor.name} has a value") for part in parts)
        return _join_parts(made, tensor.shape[0]).reshape(tensor.shape)

    def packed_words(self, tensor: GgufTensor, order: np.ndarray | None) -> mx.array:
        """Returns the integers of a Q8_0, Q4_0 or Q4_1 matrix as MLX packs them: uint32 [rows, columns * bits / 32]."""
        parts = (_unpack_levels(rows, tensor.kind) for rows in self._iterate_rows(tensor, order))
        return _join_parts(map(mx.array, parts), tensor.shape[0])

    def packed_scales(
        self, tensor: GgufTensor, order: np.ndarray | None, dtype: mx.Dtype, biases: bool = False
    ) -> mx.array:
        """Returns the scales (the biases if `biases`) of a Q8_0, Q4_0 or Q4_1 matrix, `dtype` [rows, columns / 32].

        The values are exact in float16 and float32. Raises `ConversionError` if a value is not finite in `dtype`.
        """
        parts = (_read_scales(rows, tensor.kind)[biases] for rows in self._iterate_rows(tensor, order))
        made = (self._cast_to_finite(mx.array(part), dtype, f"{tensor.name} has a scale") for part in parts)
        return _join_parts(made, tensor.shape[0])

    def _cast_to_finite(self, values: mx.array, dtype: mx.Dtype, what: str) -> mx.array:
        """Casts float32 values to `dtype`. Raises `ConversionError`, naming `what`, unless the results are finite."""
        made = values.astype(dtype)
        if not mx.all(mx.isfinite(made)).item():
            hint = " (--dtype float32 may hold it)" if mx.all(mx.isfinite(values)).item() else ": the file is damaged"
            raise self.error(f"{what} that is not finite in {dtype_name(dtype)}{hint}")
        return made

    def _iterate_rows(self, tensor: GgufTensor, order: np.ndarray | None) -> Iterator[np.ndarray]:
        """Yields a tensor's bytes part by part: uint8 [rows, row_bytes], or [columns, bytes per value] for a vector.

        order: indices of the rows to yield, None for all rows in the file's order.
        """
        count = tensor.shape[0]
        row_bytes, step = tensor.nbytes // count, max(1, _CHUNK * count // prod(tensor.shape))
        for begin in range(0, count, step):
            rows = np.arange(begin, min(begin + step, count)) if order is None else order[begin : begin + step]
            first, last = int(rows.min()), int(rows.max()) + 1
            data = self.read_bytes(tensor.offset + first * row_bytes, (last - first) * row_bytes)
            yield data.reshape(last - first, row_bytes)[rows - first]


def _join_parts(parts: Iterable[mx.array], count: int) -> mx.array:
    """Joins the parts of a tensor, each some of its rows. count: number of all rows.

    Besides the result, only one part at a time is in memory.
    """
    joined: Any = None
    begin = 0
    for part in parts:
        joined = mx.zeros((count, *part.shape[1:]), part.dtype) if joined is None else joined
        joined[begin : begin + len(part)] = part
        begin += len(part)
        mx.eval(joined)
    return joined


def _unpack_levels(rows: np.ndarray, kind: TensorKind) -> np.ndarray:
    """Returns the integers of Q8_0, Q4_0 or Q4_1 blocks as MLX packs them: uint32 [rows, columns * bits / 32]."""
    blocks = rows.reshape(-1, kind.bytes)
    if kind.bits == 8:
        levels = blocks[:, 2:] ^ 0x80  # signed to unsigned
    else:
        halves = blocks[:, -16:]  # byte j holds levels j and j + 16
        flat = np.concatenate([halves & 15, halves >> 4], axis=1)
        levels = flat[:, ::2] | flat[:, 1::2] << 4
    return np.ascontiguousarray(levels).view("<u4").reshape(len(rows), -1)


def _read_scales(rows: np.ndarray, kind: TensorKind) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and the biases of rows of Q8_0, Q4_0 or Q4_1 blocks, each float32 [rows, columns / 32]."""
    blocks = rows.reshape(-1, kind.bytes)
    stored = np.ascontiguousarray(blocks[:, : 4 if kind.name == "Q4_1" else 2]).view("<f2").astype(np.float32)
    scales = stored[:, 0].reshape(len(rows), -1)
    biases = stored[:, 1].reshape(scales.shape) if kind.name == "Q4_1" else scales * -(1 << kind.bits - 1)
    return scales, biases


def _dequantize_rows(rows: np.ndarray, kind: TensorKind) -> mx.array:
    """Returns the values of rows of blocks, in float32 [rows, columns]."""
    if kind.bits:
        parts = (mx.array(part) for part in (_unpack_levels(rows, kind), *_read_scales(rows, kind)))
        return mx.dequantize(*parts, group_size=GROUP, bits=kind.bits)
    if kind.name == "BF16":
        return mx.array(np.ascontiguousarray(rows).view("<u2")).view(mx.bfloat16).astype(mx.float32)
    if kind.name in DENSE:
        own = "<f4" if kind.name == "F32" else "<f2"
        return mx.array(np.ascontiguousarray(rows).view(own).astype(np.float32))
    return mx.array(gguf_dequantizer()(rows, kind.name))


def gguf_dequantizer() -> Callable[[np.ndarray, str], np.ndarray]:
    """Returns gguf's function from (rows of blocks, tensor type) to values. Raises `InstallationError` without gguf."""
    gguf = import_or_explain("gguf", "this GGUF file's tensor types", "gguf", extra="gguf")
    return lambda rows, name: gguf.dequantize(rows, gguf.GGMLQuantizationType[name])


@contextlib.contextmanager
def _open_unchanged(path: Path, version: tuple[int, int] | None = None) -> Iterator[BufferedReader]:
    """Context manager: opens a file to read. Raises `ConversionError` if the file cannot be read or changes meanwhile.

    version: result of `_file_version` that the file must have after the block, None for the one before the block.
    """
    with errors_as(ConversionError, f"cannot read {path}", OSError), open(path, "rb") as file:
        before = version or _file_version(file)
        try:
            yield file
        finally:  # also explains an error in the block
            if _file_version(file) != before:
                raise ConversionError(f"{path}: the file changed while it was read; convert it again")


def _file_version(file: BufferedReader) -> tuple[int, int]:
    """Returns an open file's size in bytes and the time of its last change in nanoseconds."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def read_gguf(path: Path) -> GgufFile:
    """Returns the content of a file, with tensors that are read later. Raises `ConversionError` if a check fails.

    Checks every length, type and string. Checks also that no key or tensor name occurs twice, and that the tensors lie
    one after another and fill the file.
    """
    with _open_unchanged(path) as file:
        version = _file_version(file)
        if version[0] < 24 or file.read(4) != MAGIC:
            raise ConversionError(f"{path} is no GGUF file, or its beginning is missing")
        metadata, tensors = _HeaderReader(path, file, version[0]).read_header()
        return GgufFile(path, metadata, tensors, version)


class _HeaderReader:
    """Reads a file's header from front to back. Each read is checked against the file's end.

    size: bytes of the file. at: the position.
    """

    def __init__(self, path: Path, file: BufferedReader, size: int) -> None:
        self.path, self.file, self.size, self.at = path, file, size, 4
        self.end = min(size, MAX_HEADER_BYTES)

    def read_header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Returns the metadata and the tensors, by name."""
        version = self.read_number(_U32)
        if version not in (2, 3):
            big = version in (2 << 24, 3 << 24)
            raise self.error(f"version {'of a big-endian machine' if big else version} is not supported; 2 and 3 are")
        tensors, keys = self.read_count(24, MAX_TENSORS, "tensors"), self.read_count(13, MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.read_name("key", metadata)
            metadata[key] = self.read_value(self.read_number(_U32), key)
        listed: dict[str, GgufTensor] = {}
        for _ in range(tensors):
            name = self.read_name("tensor", listed)
            listed[name] = self.read_tensor_entry(name)
        return metadata, self.place_tensors(listed, metadata)

    def error(self, what: str) -> ConversionError:
        return ConversionError(f"{self.path}: {what}")

    def take_bytes(self, size: int) -> bytes:
        if size > self.end - self.at:
            longer = "is longer than this reader allows" if self.end == MAX_HEADER_BYTES else "is truncated or damaged"
            raise self.error(f"the header {longer}: {size} bytes are needed at byte {self.at} of {self.size}")
        self.at += size
        return self.file.read(size)

    def read_number(self, kind: int) -> Any:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take_bytes(dtype.itemsize), dtype)[0].item()

    def read_count(self, size: int, most: int, what: str) -> int:
        """Returns the next uint64: the number of items that follow, at most `most`. size: minimum bytes per item."""
        count = self.read_number(10)
        if count > most or count * size > self.end - self.at:
            raise self.error(f"{count} {what} are announced at byte {self.at - 8}, more than fit; the file is damaged")
        return count

    def read_string(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        data = self.take_bytes(self.read_count(1, most, f"bytes of {what}"))
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {self.at - len(data)} is not valid UTF-8") from error

    def read_name(self, what: str, known: dict[str, Any]) -> str:
        """Returns the next string, the name of a key or tensor.

        Raises `ConversionError` if the name is empty, not printable ASCII, or in `known`.
        """
        name = self.read_string(f"the name of a {what}", MAX_NAME_BYTES)
        if not name or not name.isascii() or not name.isprintable():
            raise self.error(f"{name!r} cannot be the name of a {what}")
        if name in known:
            raise self.error(f"the {what} {name} is there twice")
        return name

    def read_value(self, kind: int, key: str) -> Any:
        if kind == _BOOL:
            return self.read_boolean(key)
        if kind == _STRING:
            return self.read_string(key)
        if kind == _ARRAY:
            return self.read_array(key)
        if kind not in _NUMBERS:
            raise self.error(f"{key} has the unknown type {kind}")
        return self.read_number(kind)

    def read_boolean(self, key: str) -> bool:
        value = self.read_number(0)
        if value > 1:
            raise self.error(f"{key} must be true or false, got {value}")
        return bool(value)

    def read_array(self, key: str) -> Any:
        """Returns the next array: a NumPy array for numbers or truth values, a list for strings."""
        kind = self.read_number(_U32)
        if kind == _STRING:
            return self.read_strings(self.read_count(8, MAX_ITEMS, f"strings of {key}"), key)
        if kind != _BOOL and kind not in _NUMBERS:
            raise self.error(f"{key} is an array of the type {kind}, which is not supported")
        dtype = np.dtype("u1" if kind == _BOOL else _NUMBERS[kind])
        count = self.read_count(dtype.itemsize, MAX_ITEMS, f"values of {key}")
        return np.frombuffer(self.take_bytes(count * dtype.itemsize), dtype).astype(bool if kind == _BOOL else dtype)

    def read_strings(self, count: int, key: str) -> list[str]:
        """Returns the next `count` strings. Faster than `read_string`, because a vocabulary may have a million."""
        read, at, end, found = self.file.read, self.at, self.end, []
        for _ in range(count):
            last = at + 8 + int.from_bytes(read(8), "little")
            if last > end:
                break
            try:
                found.append(str(read(last - at - 8), "utf-8"))
            except UnicodeDecodeError:
                break
            at = last
        self.at = at
        if len(found) < count:
            self.file.seek(at)
            self.read_string(key)  # raises
        return found

    def read_tensor_entry(self, name: str) -> GgufTensor:
        """Reads the entry of the tensor `name`, whose offset counts from the beginning of all tensor data."""
        rank = self.read_number(_U32)
        if not 1 <= rank <= 4:
            raise self.error(f"{name} has {rank} dimensions")
        shape = tuple(self.read_number(10) for _ in range(rank))[::-1]
        number, offset = self.read_number(_U32), self.read_number(10)
        kind = KINDS.get(number)
        if kind is None:
            known = ", ".join(one.name for one in KINDS.values())
            raise self.error(f"{name} has the tensor type number {number}, which is not supported; supported: {known}")
        if min(shape) < 1 or prod(shape) >= 1 << 62 or shape[-1] % kind.values:
            raise self.error(f"{name} cannot have the shape {list(shape)} in {kind.name}")
        return GgufTensor(name, kind, shape, offset)

    def place_tensors(self, tensors: dict[str, GgufTensor], metadata: dict[str, Any]) -> dict[str, GgufTensor]:
        """Returns the tensors with offsets from the file's beginning, after checking that they fill the file."""
        step = metadata.get("general.alignment", 32)
        if type(step) is not int or not 8 <= step <= 1 << 16 or step & (step - 1):
            raise self.error(
                f"general.alignment must be a power of two from 8 to 65536, got {list_some_names([str(step)[:40]])}"
            )
        begin = -(-self.at // step) * step
        end, placed = begin, {}
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if begin + tensor.offset != end:
                raise self.error(f"{tensor.name} begins at byte {begin + tensor.offset}, expected {end}")
            placed[tensor.name] = GgufTensor(tensor.name, tensor.kind, tensor.shape, end)
            last = end + tensor.nbytes
            end = -(-last // step) * step
            if last > self.size:
                raise self.error(f"the file is truncated: {tensor.name} ends at byte {last} of {self.size}")
        if self.size > end:
            raise self.error(f"{self.size - end} bytes follow the last tensor, which nothing accounts for")
        return placed
