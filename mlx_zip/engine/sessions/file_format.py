"""The format of session files: safetensors with two checksums. `ModelIdentity`: the model that a file belongs to.

Nothing here imports MLX, so that any thread may write a file.

`mlx_lm.models.cache.load_prompt_cache` can also read these files. A file's metadata has the session's facts, under
names with the prefix "0.". The tensors of the index (base ids and the ends of ids) come first, so that a session can be
found without reading its KV cache. One checksum covers the header and the index, the other all other tensors; both are
CRC-32.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.codec import CodecParams
from mlx_zip.codec.params import params_to_json
from mlx_zip.config import ZipConfig
from mlx_zip.files import atomic_file, open_private

INDEX_TENSORS = 2  # number of tensors in the index, which come first in a file: base ids, and the ends of ids
FACT_PREFIX = "0."  # prefix of the facts' names in the metadata
_HEAD_SUM, _BODY_SUM = "head_crc32", "body_crc32"
NUMPY_TYPES = {  # by name in safetensors; numpy has no bfloat16
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "F16": np.float16,
    "BF16": np.uint16, "U32": np.uint32, "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64,
    "F64": np.float64, "C64": np.complex64,
}  # fmt: skip
_ITEM_BYTES = {name: np.dtype(kind).itemsize for name, kind in NUMPY_TYPES.items()}
_MOST_HEADER_BYTES = 64 << 20
_MOST_ITEMS = 1 << 48
_HEADER_LENGTH = struct.Struct("<Q")
_NO_SUM = "0" * 8


class BadFileError(Exception):
    """Raised if a file is damaged or not a session file. The message gives the reason without the file's name."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. dtype: its name in safetensors. data: the values, little endian: the bytes of a file that was
    read, or an array to be written, of any layout in memory.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileContents:
    """Metadata and tensors of a session's file, both by name. Any thread may write them.

    The first two tensors are the base ids and the ends of ids, uint32.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, FileTensor]

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes, without the header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def facts(self) -> dict[str, str]:
        """The session's facts by name."""
        return {
            name.removeprefix(FACT_PREFIX): text for name, text in self.metadata.items() if name.startswith(FACT_PREFIX)
        }

    def with_facts(self, facts: Mapping[str, str]) -> FileContents:
        """Returns these contents with more facts about the session."""
        return replace(self, metadata={**{FACT_PREFIX + name: text for name, text in facts.items()}, **self.metadata})


def write_session_file(path: Path, contents: FileContents) -> None:
    """Writes a session file atomically, with mode 0600. Raises `OSError`."""
    blocks: list[Any] = [np.ascontiguousarray(one.data).reshape(-1).view(np.uint8) for one in contents.tensors.values()]
    body = 0
    for block in blocks[INDEX_TENSORS:]:
        body = zlib.crc32(block, body)
    head = _encode_header(contents, _NO_SUM, f"{body:08x}")
    sum_ = _HEADER_LENGTH.pack(len(head))
    checked = zlib.crc32(head, zlib.crc32(sum_))
    for block in blocks[:INDEX_TENSORS]:
        checked = zlib.crc32(block, checked)
    head = _encode_header(contents, f"{checked:08x}", f"{body:08x}")
    with atomic_file(path) as partial, open_private(partial, buffering=0) as file:
        for block in (sum_, head, *blocks):
            _write_all(file, block)


def _write_all(file: Any, block: Any) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest) :]


def _encode_header(contents: FileContents, head_sum: str, body_sum: str) -> bytes:
    """Returns the header, padded to a multiple of 8 bytes. Its length does not depend on the checksums."""
    sums = {FACT_PREFIX + _HEAD_SUM: head_sum, FACT_PREFIX + _BODY_SUM: body_sum}
    entries: dict[str, Any] = {"__metadata__": {**contents.metadata, **sums}}
    at = 0
    for name, tensor in contents.tensors.items():
        end = at + tensor.nbytes
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def read_session_file(path: Path, whole: bool = True, most_bytes: int | None = None) -> FileContents:
    """Reads a session file and checks its checksums.

    whole: False to read only the tensors of the index. most_bytes: maximum size of the file. Raises `BadFileError` if
    the file is damaged, too large or not a session file, `OSError` if it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb", buffering=0) as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise BadFileError("it is a folder or device, not a file")
        if most_bytes is not None and status.st_size > most_bytes:
            raise BadFileError(f"its {status.st_size} bytes are more than the {most_bytes} that sessions may take")
        length = _read_exactly(file, _HEADER_LENGTH.size, status.st_size)
        head = _read_exactly(file, _decode_header_length(length, status.st_size), status.st_size)
        metadata, places = _parse_header(head, status.st_size - len(length) - len(head))
        wanted = list(places.values())[: None if whole else INDEX_TENSORS]
        blocks = [_read_exactly(file, end - begin, status.st_size) for _, _, begin, end in wanted]
    _raise_if_checksums_wrong(bytes(length) + _header_without_checksum(head, metadata), blocks, metadata, whole)
    found = zip(places.items(), blocks, strict=False)
    tensors = {name: FileTensor(dtype, shape, block) for (name, (dtype, shape, _, _)), block in found}
    return FileContents(metadata, tensors)


def _read_exactly(file: Any, n: int, size: int) -> bytearray:
    """Returns the next `n` bytes of an open file of `size` bytes. Raises `BadFileError` if there are fewer."""
    if n > size:
        raise BadFileError("it is cut off")
    block = bytearray(n)
    view, done = memoryview(block), 0
    while done < n:
        got = file.readinto(view[done:])
        if not got:
            raise BadFileError("it is cut off")
        done += got
    return block


def _decode_header_length(length: bytes | bytearray, size: int) -> int:
    (n,) = _HEADER_LENGTH.unpack(length)
    if n > min(_MOST_HEADER_BYTES, size):
        raise BadFileError(f"its header would have {n} bytes: it is damaged, or no safetensors file")
    return n


def _parse_header(
    head: bytearray, data: int
) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...], int, int]]]:
    """Returns a header's metadata and, per tensor in the file's order, (dtype, shape, begin, end).

    begin, end: byte offsets of the tensor after the header, `end` exclusive. data: number of bytes after the header.
    Raises `BadFileError` if the header is invalid or the tensors do not fill these bytes exactly.
    """
    try:
        entries = json.loads(head)
        metadata = entries.pop("__metadata__")
        places = {name: _parse_tensor_entry(entry) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadFileError("its header cannot be read: it is damaged, or no session's file") from error
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise BadFileError("its header has no metadata: it is no session's file")
    places = dict(sorted(places.items(), key=lambda item: item[1][2:]))
    at = 0
    for name, (dtype, shape, begin, end) in places.items():
        if begin != at or end - begin != prod(shape) * _ITEM_BYTES[dtype]:
            raise BadFileError(f"the place of its tensor {name!r:.40} is wrong")
        at = end
    if at != data:
        raise BadFileError("it is cut off, or has bytes that belong to no tensor")
    return metadata, places


def _parse_tensor_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Returns a tensor's (dtype, shape, begin, end). Raises `ValueError`, `LookupError` or `TypeError` if invalid."""
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if entry["dtype"] not in _ITEM_BYTES:
        raise ValueError("unknown type")
    if not all(type(n) is int and 0 <= n < _MOST_ITEMS for n in (begin, end, *shape)) or len(shape) > 8:
        raise ValueError("not a shape")
    return entry["dtype"], tuple(shape), begin, end


def _header_without_checksum(head: bytearray, metadata: Mapping[str, str]) -> bytes:
    found = metadata.get(FACT_PREFIX + _HEAD_SUM, "")
    return bytes(head).replace(
        f'"{FACT_PREFIX}{_HEAD_SUM}":"{found}"'.encode(), f'"{FACT_PREFIX}{_HEAD_SUM}":"{_NO_SUM}"'.encode(), 1
    )


def _raise_if_checksums_wrong(head: bytes, blocks: list[Any], metadata: Mapping[str, str], whole: bool) -> None:
    """Raises `BadFileError` if a checksum is missing or wrong. Checks the body's checksum only if `whole` is True."""
    if FACT_PREFIX + _HEAD_SUM not in metadata:
        raise BadFileError("it has no checksum: it was not written by mlx_zip; make it with mlx_zip cache-prompt")
    head_sum, body_sum = zlib.crc32(head), 0
    for block in blocks[:INDEX_TENSORS]:
        head_sum = zlib.crc32(block, head_sum)
    for block in blocks[INDEX_TENSORS:]:
        body_sum = zlib.crc32(block, body_sum)
    expected = {_HEAD_SUM: head_sum, **({_BODY_SUM: body_sum} if whole else {})}
    for name, sum_ in expected.items():
        if metadata.get(FACT_PREFIX + name) != f"{sum_:08x}":
            raise BadFileError("its checksum is wrong: it is damaged")


# ---- the model that a file belongs to

MLX_FORMAT, TORCH_FORMAT = "mlx_zip session 1", "mlx_zip torch session 1"
_WRITERS = {MLX_FORMAT: "--engine mlx", TORCH_FORMAT: "--engine torch"}
_IDENTITY_WORDS = {
    "model_fingerprint": "model",
    "tokenizer_fingerprint": "tokenizer",
    "codec": "codec parameters",
    "dtype": "type of numbers",
    "positions": "position mode, rotary setting or attention window",
}


@dataclass(frozen=True)
class ModelIdentity:
    """What a session file and the loaded model must have in common, so that the model can continue the session.

    positions: result of `position_settings_text`. dtype: dtype that the model computes in, "" if the KV cache's arrays
    show it. format: `MLX_FORMAT` or `TORCH_FORMAT`.
    """

    model_fingerprint: str
    tokenizer_fingerprint: str
    codec: str
    positions: str
    dtype: str = ""
    format: str = MLX_FORMAT

    @property
    def facts(self) -> dict[str, str]:
        """The fields by name, as facts for a file."""
        found = {"format": self.format, **{name: getattr(self, name) for name in _IDENTITY_WORDS}}
        return {name: text for name, text in found.items() if text or name != "dtype"}

    def raise_if_other_model(self, facts: Mapping[str, str]) -> None:
        """Raises `BadFileError` if a file's facts name another format, model, tokenizer, codec, dtype or positions."""
        found = facts.get("format", "unknown")
        if found in _WRITERS and found != self.format:
            raise BadFileError(f"{_WRITERS[found]} wrote it, and {_WRITERS[self.format]} cannot go on from it")
        if found != self.format:
            raise BadFileError(f"its format is {found!r:.60}, this version of mlx_zip reads {self.format!r}")
        for name, word in _IDENTITY_WORDS.items():
            if facts.get(name, "") != getattr(self, name):
                raise BadFileError(f"it was made with another {word} than the one that is loaded")


def codec_settings_text(params: CodecParams | None) -> str:
    """Returns codec parameters as text, without the entries that a codebook begins with; "" if `params` is None."""
    if params is None:
        return ""
    fields = json.loads(params_to_json([params]))
    return json.dumps({name: value for name, value in fields.items() if name != "start"}, sort_keys=True)


def pack_key_of(start: Any, tuned: str | None) -> str:
    """Returns the key of the pack that a model's codebooks begin with by default, "" without a pack.

    start: the pack's entries, or None. tuned: the fingerprint of the pack's tuned rows, or None.
    """
    if not (start or tuned):
        return ""
    return hashlib.sha256(json.dumps([start, tuned]).encode()).hexdigest()


# ---- settings, other than weights, on which keys and values depend: position mode, rotary settings, attention windows

_ROPE_SCALING_KEYS = ("rope_scaling", "rope_parameters")
_POSITION_KEYS = (
    "rope_theta", *_ROPE_SCALING_KEYS, "rope_local_base_freq", "rope_traditional", "partial_rotary_factor",
    "no_rope_layers", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
"layer_types", )  # fmt: skip
_CONTEXT_KEYS = ("max_position_embeddings", "original_max_position_embeddings")  # some scaling rules use these


def position_settings_text(config: Mapping[str, Any], zip_config: ZipConfig | None) -> str:
    """Returns the settings of positions and attention windows as text. Two spellings of one setting give two texts.

    config: contents of config.json, or the part that mlx-lm keeps. zip_config: None for a model without hypertokens.
    """
    mode = "compressed" if zip_config is None else zip_config.position_mode
    return json.dumps(
        {"position_mode": mode, "config": [_position_settings(part) for part in _config_and_text_config(config)]},
        sort_keys=True,
    )


def _config_and_text_config(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields `config` and, if it has one, the nested config of the text decoder."""
    yield config
    if isinstance(inner := config.get("text_config"), Mapping):
        yield inner


def _position_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config's position settings that are not null; the context length only if the rotation is scaled."""
    is_scaled = any(kind != "default" for name in _ROPE_SCALING_KEYS for kind in _rope_types(config.get(name)))
    names = (*_POSITION_KEYS, *(_CONTEXT_KEYS if is_scaled else ()))
    return {name: config[name] for name in names if config.get(name) is not None}


def _rope_types(scaling: Any) -> Iterator[Any]:
    """Yields the rope types in `rope_scaling` or `rope_parameters`, which may have one set of values per layer kind."""
    if not isinstance(scaling, Mapping):
        return
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    for one in nested or [scaling]:
        yield one.get("rope_type", one.get("type", "default"))
