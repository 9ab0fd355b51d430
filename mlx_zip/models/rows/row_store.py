"""`RowStore`: hyper rows that are kept from one request to the next, in memory and optionally in a folder.

An entry's rows depend on its base ids and on the model alone, so an entry that occurs again, in any request, is not
encoded again. A row is kept byte for byte as it was encoded. Encoding an entry alone or in a batch gives the same row
within 1e-5 (fp32; bit for bit on most backends), so results do not depend on what a store holds.

With MLX's own CPU matrix product, an entry gets the same bytes alone and in a batch; with OpenBLAS a lone entry
differs by up to 1.4e-6. Padding all passes to one shape would remove this difference, but multiply the work for a lone
entry, which is what a step encodes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_zip.files import expand_home
from mlx_zip.models.rows.encoders import SingleEncoder, can_encode_singly, encode_entries
from mlx_zip.models.rows.fingerprints import TensorPlace, are_unchanged, host_bytes, sample_values, tensor_places
from mlx_zip.models.rows.row_files import RowSet
from mlx_zip.models.rows.row_folder import RowFolder

MEMORY_BYTES = 64 << 20
FOLDER_BYTES = 1 << 30
ROW_OVERHEAD = 250  # bytes that Python needs per row in memory
FORMAT = 1  # increase it when a change makes encoders compute other rows
_QUANTIZATION = ("bits", "group_size", "mode")
_NO_ID = 0xFFFFFFFF  # fills up the key of a short entry: not a base id of any model
_PADDING_BYTE = bytes({*_NO_ID.to_bytes(4, "little")})  # the one byte that `_NO_ID` consists of

Encode = Callable[[NDArray[np.uint32], NDArray[np.int64]], mx.array]


@dataclass(frozen=True)
class RowKind:
    """The name of a set of rows, and how a row is stored.

    rows: name and sizes. dtype: type of a row's values. durable: whether rows may be kept on disk.
    """

    rows: RowSet
    dtype: mx.Dtype
    durable: bool


class _EncodedRows(NamedTuple):
    """Encoded rows that the store does not keep yet: their names in memory, and the rows as bytes [N, row bytes]."""

    kind: RowKind
    names: list[bytes]
    rows: mx.array


class RowStore:
    """Hyper rows by model, side and base ids; the least recently used are evicted. For one thread at a time.

    folder: where rows are also kept on disk, shared with other processes; None keeps them in memory only. The folder
    has mode 0700 and its files 0600, because they hold pieces of people's texts as base ids. memory_bytes,
    folder_bytes: maximum sizes. encoded, from_memory, from_disk: numbers of rows encoded, found in memory and found on
    disk. If the folder is damaged, full, read-only or in use, the logger "mlx_zip" logs a warning; rows are never
    wrong.
    """

    def __init__(
        self, folder: str | Path | None = None, *, memory_bytes: int = MEMORY_BYTES, folder_bytes: int = FOLDER_BYTES
    ) -> None:
        self._memory = _RowMemory(memory_bytes)
        self._disk = None if folder is None else RowFolder(expand_home(folder), folder_bytes)
        self._prefixes: dict[RowKind, bytes] = {}  # the number of each kind, as bytes: rows' names begin with it
        # _fresh: rows that `take_rows_to_submit` has not returned; perhaps not computed yet
        self._fresh: list[_EncodedRows] = []
        self._submitted: list[_EncodedRows] = []  # rows that `take_rows_to_submit` returned
        self.encoded = self.from_memory = self.from_disk = 0

    def find_or_encode_rows(
        self, kind: RowKind, base_ids: NDArray[np.uint32], lengths: NDArray[np.int64], encode: Encode
    ) -> mx.array:
        """Returns rows [N, D] of N entries; entry i is the first lengths[i] ids of row i of base_ids [N, words].

        encode(base_ids, lengths) makes rows. It is called at most once, with those distinct entries that the store
        lacks.
        """
        keys = np.where(np.arange(base_ids.shape[1]) < lengths[:, None], base_ids, np.uint32(_NO_ID))
        names = self._memory_names(kind, keys)
        held = [self._memory.get(name) for name in names]  # per entry its row as bytes, or None
        absent = [i for i, row in enumerate(held) if row is None]  # indices of entries without a row so far
        self.from_memory += len(names) - len(absent)
        if absent and self._disk is not None and kind.durable:
            absent = self._find_on_disk(self._disk, kind, keys, names, held, absent)
        if not absent:
            return _rows_to_device(kind, [row for row in held if row is not None])
        first = {names[i]: i for i in reversed(absent)}  # two sequences may ask for the same entry
        chosen = np.array(sorted(first.values()))
        fresh = encode(base_ids[chosen], lengths[chosen])
        self.encoded += len(chosen)
        self._fresh.append(_EncodedRows(kind, [names[i] for i in chosen], fresh.view(mx.uint8)))
        if len(chosen) == len(names):
            return fresh
        return _order_rows(kind, held, names, [names[i] for i in chosen], fresh)

    def find_row_in_memory(self, kind: RowKind, words: bytes) -> mx.array | None:
        """Returns the row [1, D] of one entry if it is in memory, else None. words: its base ids as 32-bit words.

        Unlike `rows`, this uses no numpy, which would be slow within a step of generation.
        """
        row = self._memory.get(self._memory_name(kind, words))
        if row is None:
            return None
        self.from_memory += 1
        data: Any = memoryview(row)
        if kind.dtype == mx.float32:
            return mx.array(data.cast("f", [1, len(row) // 4]))
        return mx.array(data.cast("B", [1, len(row)])).view(kind.dtype)

    def encode_one(self, kind: RowKind, words: bytes, encode: Callable[[], mx.array]) -> mx.array | None:
        """Encodes and returns the row [1, D] of one entry that is not in memory; returns None if it may be on disk.

        words: as in `find_row_in_memory`. encode: makes the row.
        """
        if self._disk is not None and kind.durable:
            return None
        row = encode()
        self.encoded += 1
        self._fresh.append(_EncodedRows(kind, [self._memory_name(kind, words)], row.view(mx.uint8)))
        return row

    def take_rows_to_submit(self) -> list[mx.array]:
        """Returns the rows, as bytes and not yet computed, that were encoded since the last call.

        Rows that `store_unsubmitted_rows` has kept meanwhile are left out. A decode loop computes them along with the
        next id, and calls `store_submitted_rows` when it has read that id.
        """
        fresh, self._fresh = self._fresh, []
        self._submitted += fresh
        return [one.rows for one in fresh]

    def store_submitted_rows(self) -> None:
        """Keeps the rows that `take_rows_to_submit` returned. Does not wait if the id computed with them has been read.

        If computing these rows raises, they are dropped, so that no later call raises again.
        """
        rows, self._submitted = self._submitted, []
        self._store_rows(rows)

    def store_unsubmitted_rows(self) -> None:
        """Keeps the rows that `take_rows_to_submit` has not returned, and computes them if they are still lazy.

        Called at the beginning of each model call. Outside mlx_zip's decode loops, the caller has usually read the
        result of the previous call by then, so its rows are computed already. Errors as in `store_submitted_rows`.
        """
        rows, self._fresh = self._fresh, []
        self._store_rows(rows)

    def store_all_rows(self) -> None:
        """Keeps all rows encoded so far, and waits for those that are still being computed."""
        self.store_submitted_rows()
        self.store_unsubmitted_rows()

    def _store_rows(self, encoded: list[_EncodedRows]) -> None:
        """Keeps rows in memory and, if their kind is durable, in the folder."""
        for kind, names, rows in encoded:
            data = bytes(host_bytes(rows))  # `rows` is uint8 already, so this enqueues no operation
            self._memory.put(names, _split_bytes(data, kind.rows.row_bytes))
            if self._disk is not None and kind.durable:
                keys = np.frombuffer(b"".join(name[_PREFIX_BYTES:] for name in names), np.uint32)
                array = np.frombuffer(data, np.uint8).reshape(len(names), kind.rows.row_bytes)
                self._disk.add(kind.rows, keys.reshape(len(names), -1), array)

    def flush(self) -> None:
        """Keeps all rows encoded so far, and writes new rows to the folder."""
        self.store_all_rows()
        if self._disk is not None:
            self._disk.flush()

    def close(self) -> None:
        """Does what `flush` does, and closes the files. Waits up to 2 s if another process is writing."""
        self.store_all_rows()
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowStore:
        return self  # copies of a model share their store

    def __repr__(self) -> str:
        folder = "no folder" if self._disk is None else f"folder {self._disk.folder}"
        return (
            f"<RowStore: {self.nbytes} bytes in memory, {folder}; rows by origin: {self.encoded} encoded, "
            f"{self.from_memory} from memory, {self.from_disk} from disk>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of rows in memory, Python's overhead included."""
        return self._memory.used

    def _kind_prefix(self, kind: RowKind) -> bytes:
        return self._prefixes.setdefault(kind, len(self._prefixes).to_bytes(_PREFIX_BYTES, "little"))

    def _memory_name(self, kind: RowKind, words: bytes) -> bytes:
        return self._kind_prefix(kind) + words.ljust(4 * kind.rows.key_words, _PADDING_BYTE)

    def _memory_names(self, kind: RowKind, keys: NDArray[np.uint32]) -> list[bytes]:
        """Returns the names, in memory, of the rows of keys [N, words]: the kind's prefix and the key."""
        prefix = self._kind_prefix(kind)
        return [prefix + key for key in _split_bytes(keys.tobytes(), 4 * keys.shape[1])]

    def _find_on_disk(
        self,
        disk: RowFolder,
        kind: RowKind,
        keys: NDArray[np.uint32],
        names: Sequence[bytes],
        held: list[bytes | None],
        absent: list[int],
    ) -> list[int]:
        """Looks up the rows with the indices `absent` in the folder, and returns the indices not found there.

        names: all rows' names. held: all rows as bytes, None if absent; gets the rows that are found.
        """
        found, data = disk.find_rows(kind.rows, keys[absent])
        there = [i for i, is_there in zip(absent, found.tolist(), strict=True) if is_there]
        rows = _split_bytes(data[found].tobytes(), kind.rows.row_bytes)
        for i, row in zip(there, rows, strict=True):
            held[i] = row
        self._memory.put([names[i] for i in there], rows)
        self.from_disk += len(there)
        return [i for i in absent if held[i] is None]


class _RowMemory:
    """Rows by name. The least recently used are evicted, so that the bytes `used` stay within `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._rows: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, name: bytes) -> bytes | None:
        row = self._rows.get(name)
        if row is not None:
            self._rows.move_to_end(name)
        return row

    def put(self, names: Sequence[bytes], rows: Sequence[bytes]) -> None:
        """Adds rows, all of one size."""
        before = len(self._rows)
        self._rows.update(zip(names, rows, strict=True))
        if rows:
            self.used += (len(self._rows) - before) * _memory_cost(names[0], rows[0])
        while self.used > self.limit:
            self.used -= _memory_cost(*self._rows.popitem(last=False))


_PREFIX_BYTES = 4  # bytes of a name that stand for the kind of the row


def _split_bytes(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _memory_cost(name: bytes, row: bytes) -> int:
    return len(name) + len(row) + ROW_OVERHEAD


def _order_rows(
    kind: RowKind, held: Sequence[bytes | None], names: Sequence[bytes], made: Sequence[bytes], fresh: mx.array
) -> mx.array:
    """Returns the rows of `names` [N, D], in that order.

    held: per name its row as bytes, or None if the row was just encoded. fresh [M, D]: the encoded rows, whose names
    are `made`.
    """
    kept = [row for row in held if row is not None]
    place = {name: len(kept) + i for i, name in enumerate(made)}  # indices into `both` below
    at, order = 0, []
    for name, row in zip(names, held, strict=True):
        order.append(place[name] if row is None else at)
        at += row is not None
    both = mx.concatenate([_rows_to_device(kind, kept), fresh]) if kept else fresh
    return both[mx.array(order)]


def _rows_to_device(kind: RowKind, rows: Sequence[bytes]) -> mx.array:
    """Returns rows given as bytes as an array [N, D] of the kind's dtype."""
    data = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), kind.rows.row_bytes)
    return mx.array(data).view(kind.dtype)


# ---- the kinds of a model's rows


@dataclass(frozen=True)
class _KnownKind:
    """A kind of rows, the modules that it was made for, and the modules' tensors at that time."""

    kind: RowKind
    encoder: nn.Module
    matrix: nn.Module
    places: list[TensorPlace]

    def is_current(self) -> bool:
        """Returns whether no tensor has been replaced since the kind was made."""
        return are_unchanged(self.places)


class RowKinds:
    """The kinds of the rows that a model makes now, one per side, and the model's encoders for single entries.

    A store never mixes rows of different weights. A kind's name covers the fingerprint in config.json, which the
    converter or the trainer wrote. Other tools quantize, fuse or adapt a model without changing that fingerprint, and a
    program may change weights in memory. So a kind's name also covers the type, the quantization and a few values of
    every tensor that rows depend on (no tensor is hashed whole), and a new name is made when a tensor is replaced.

    recorded: the fingerprints in the model's config, by side. A side without a fingerprint gets a random name, and its
    rows are not kept on disk. pad_id: the base id that pads entries of fewer than `merge_size` base ids.
    """

    def __init__(self, recorded: Any, merge_size: int, pad_id: int) -> None:
        self._recorded: Mapping[str, Any] = recorded if isinstance(recorded, Mapping) else {}
        self._merge_size, self._pad_id = merge_size, pad_id
        self._known: dict[str, _KnownKind] = {}
        self._singles: dict[str, tuple[_KnownKind, SingleEncoder | None]] = {}
        self._changed = False

    def forget(self) -> None:
        """Makes both sides use new kinds, which no other model has. Call this when weights have changed."""
        self._known.clear()
        self._singles.clear()
        self._changed = True

    def kind(self, side: str, encoder: nn.Module, matrix: nn.Module) -> RowKind:
        """Returns the kind of the rows that `encoder` makes from rows of `matrix` now; side: "input" or "output"."""
        known = self._known.get(side)
        if known is not None and known.encoder is encoder and known.matrix is matrix and known.is_current():
            return known.kind
        if known is not None:  # a tensor was replaced, perhaps by one with equal samples
            self.forget()
        kind = self._make_kind(side, encoder, matrix)
        self._known[side] = _KnownKind(kind, encoder, matrix, [*tensor_places(encoder), *tensor_places(matrix)])
        return kind

    def single_encoder(self, side: str, encoder: nn.Module, matrix: nn.Module) -> SingleEncoder | None:
        """Returns a `SingleEncoder` with the side's current weights, or None if it does not support the encoder."""
        self.kind(side, encoder, matrix)
        known, made = self._known[side], self._singles.get(side)
        if made is None or made[0] is not known:
            supported = can_encode_singly(encoder)
            single = SingleEncoder(encoder, matrix, self._merge_size, self._pad_id) if supported else None
            made = self._singles[side] = known, single
        return made[1]

    def _make_kind(self, side: str, encoder: nn.Module, matrix: nn.Module) -> RowKind:
        """Returns a new kind; its rows may be kept on disk if the config has a fingerprint that still applies."""
        entry = np.zeros((1, self._merge_size), np.uint32)
        row = encode_entries(encoder, matrix, entry, np.array([self._merge_size]))  # for its shape and type
        recorded = self._recorded.get(side)
        durable = isinstance(recorded, str) and bool(recorded) and not self._changed
        facts = [
            FORMAT,
            side,
            recorded if durable else os.urandom(16).hex(),
            str(row.dtype),
            row.shape[-1],
            str(mx.default_device().type),
            _tensor_facts(encoder),
            _tensor_facts(matrix),
        ]
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        return RowKind(RowSet(digest, self._merge_size, row.shape[-1] * row.dtype.size), row.dtype, durable)


def _tensor_facts(module: nn.Module) -> list[Any]:
    """Returns what a kind covers of a module: its tensors' names, types, shapes, sampled values and quantization."""
    found = list(tensor_places(module))
    tensors = [(key, value, sample_values(value)) for _, key, value in found if isinstance(value, mx.array)]
    mx.eval([some for _, _, some in tensors])
    modules = [module, *(value for _, _, value in found if isinstance(value, nn.Module))]
    return [
        [[str(key), str(value.dtype), value.shape, bytes(host_bytes(some)).hex()] for key, value, some in tensors],
        [[type(node).__name__, *(str(getattr(node, name, None)) for name in _QUANTIZATION)] for node in modules],
    ]
