"""`RowStore`: hyper rows that are kept from one request to the next, in memory and optionally in a folder.

An entry's rows depend on its base ids and on the model alone, so an entry that occurs again, in any request, is not
encoded again. A row is kept byte for byte as it was encoded. Encoding an entry alone or in a batch gives the same row
within 1e-5 (fp32; bit for bit on most backends), so results do not depend on what a store holds.

With MLX's own CPU matrix product, an entry gets the same bytes alone and in a batch; with OpenBLAS a lone entry
differs by up to 1.4e-6. Padding all passes to one shape would remove this difference, but multiply the work for a lone
entry, which is what a step encodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.files import expand_home
from mlx_zip.models.rows.fingerprints import host_bytes
from mlx_zip.models.rows.row_folder import RowFolder, RowSet

MEMORY_BYTES = 64 << 20
FOLDER_BYTES = 1 << 30
ROW_OVERHEAD = 250  # bytes that Python needs per row in memory
_NO_ID = 0xFFFFFFFF  # fills up the key of a short entry: not a base id of any model
_PADDING_BYTE = bytes({*_NO_ID.to_bytes(4, "little")})  # the one byte that `_NO_ID` consists of

Encode = Callable[[NDArray[np.uint32], NDArray[np.int64]], mx.array]


class _EncodedRows(NamedTuple):
    """Encoded rows that the store does not keep yet: their names in memory, and the rows as bytes [N, row bytes]."""

    kind: RowSet
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
        self._prefixes: dict[RowSet, bytes] = {}  # the number of each kind, as bytes: rows' names begin with it
        # _fresh: rows that `take_rows_to_submit` has not returned; perhaps not computed yet
        self._fresh: list[_EncodedRows] = []
        self._submitted: list[_EncodedRows] = []  # rows that `take_rows_to_submit` returned
        self._computed: list[_EncodedRows] = []  # submitted rows that have been computed
        self.encoded = self.from_memory = self.from_disk = 0

    def find_or_encode_rows(
        self, kind: RowSet, base_ids: NDArray[np.uint32], lengths: NDArray[np.int64], encode: Encode
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
        kept = {name: row for name, row in zip(names, held, strict=True) if row is not None}
        rows = mx.concatenate([_rows_to_device(kind, list(kept.values())), fresh]) if kept else fresh
        place = {name: i for i, name in enumerate([*kept, *(names[i] for i in chosen)])}  # indices into `rows`
        return rows[mx.array([place[name] for name in names])]

    def find_or_encode_row(self, kind: RowSet, words: bytes, encode: Callable[[], mx.array]) -> mx.array:
        """Returns the row [1, D] of one entry. words: its base ids as 32-bit words. encode: makes the row.

        Unlike `find_or_encode_rows`, this uses numpy only if the row may be on disk, because numpy would be slow within
        a step of generation.
        """
        name = self._memory_name(kind, words)
        row = self._memory.get(name)
        if row is not None:
            self.from_memory += 1
            data: Any = memoryview(row)
            if kind.dtype == mx.float32:
                return mx.array(data.cast("f", [1, len(row) // 4]))
            return mx.array(data.cast("B", [1, len(row)])).view(kind.dtype)
        if self._disk is not None and kind.durable:
            base_ids, length = np.frombuffer(name[_PREFIX_BYTES:], np.uint32)[None], np.array([len(words) // 4])
            return self.find_or_encode_rows(kind, base_ids, length, lambda *entry: encode())
        fresh = encode()
        self.encoded += 1
        self._fresh.append(_EncodedRows(kind, [name], fresh.view(mx.uint8)))
        return fresh

    def take_rows_to_submit(self) -> list[mx.array]:
        """Returns the rows, as bytes and not yet computed, that were encoded since the last call.

        Rows that `store_unsubmitted_rows` has kept meanwhile are left out. A decode loop computes them along with the
        next id. When it has read the ids of all requests it calls `note_submitted_computed` and, once the device has
        work again, `store_computed_rows`.
        """
        fresh, self._fresh = self._fresh, []
        self._submitted += fresh
        return [one.rows for one in fresh]

    def note_submitted_computed(self) -> None:
        """Notes that the rows which `take_rows_to_submit` has returned so far are computed."""
        self._computed += self._submitted
        self._submitted = []

    def store_computed_rows(self) -> None:
        """Keeps the rows that were noted as computed.

        If computing these rows has failed, this raises, and drops the rows, so that no later call raises again.
        """
        rows, self._computed = self._computed, []
        self._store_rows(rows)

    def store_unsubmitted_rows(self) -> None:
        """Keeps the rows that `take_rows_to_submit` has not returned, and computes them if they are still lazy.

        Called at the beginning of each model call. Outside mlx_zip's decode loops, the caller has usually read the
        result of the previous call by then, so its rows are computed already. Errors as in `store_computed_rows`.
        """
        rows, self._fresh = self._fresh, []
        self._store_rows(rows)

    def store_all_rows(self) -> None:
        """Keeps all rows encoded so far, and waits for those that are still being computed."""
        self.note_submitted_computed()
        self.store_computed_rows()
        self.store_unsubmitted_rows()

    def _store_rows(self, encoded: list[_EncodedRows]) -> None:
        """Keeps rows in memory and, if their kind is durable, in the folder."""
        for kind, names, rows in encoded:
            data = bytes(host_bytes(rows))  # `rows` is uint8 already, so this enqueues no operation
            self._memory.put(names, _split_bytes(data, kind.row_bytes))
            if self._disk is not None and kind.durable:
                keys = np.frombuffer(b"".join(name[_PREFIX_BYTES:] for name in names), np.uint32)
                array = np.frombuffer(data, np.uint8).reshape(len(names), kind.row_bytes)
                self._disk.add(kind, keys.reshape(len(names), -1), array)

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

    def _kind_prefix(self, kind: RowSet) -> bytes:
        return self._prefixes.setdefault(kind, len(self._prefixes).to_bytes(_PREFIX_BYTES, "little"))

    def _memory_name(self, kind: RowSet, words: bytes) -> bytes:
        return self._kind_prefix(kind) + words.ljust(4 * kind.key_words, _PADDING_BYTE)

    def _memory_names(self, kind: RowSet, keys: NDArray[np.uint32]) -> list[bytes]:
        """Returns the names, in memory, of the rows of keys [N, words]: the kind's prefix and the key."""
        prefix = self._kind_prefix(kind)
        return [prefix + key for key in _split_bytes(keys.tobytes(), 4 * keys.shape[1])]

    def _find_on_disk(
        self,
        disk: RowFolder,
        kind: RowSet,
        keys: NDArray[np.uint32],
        names: Sequence[bytes],
        held: list[bytes | None],
        absent: list[int],
    ) -> list[int]:
        """Looks up the rows with the indices `absent` in the folder, and returns the indices not found there.

        names: all rows' names. held: all rows as bytes, None if absent; gets the rows that are found.
        """
        found, data = disk.find_rows(kind, keys[absent])
        there = [i for i, is_there in zip(absent, found.tolist(), strict=True) if is_there]
        rows = _split_bytes(data[found].tobytes(), kind.row_bytes)
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


def _rows_to_device(kind: RowSet, rows: Sequence[bytes]) -> mx.array:
    """Returns rows given as bytes as an array [N, D] of the kind's dtype."""
    data = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), kind.row_bytes)
    return mx.array(data).view(kind.dtype)
