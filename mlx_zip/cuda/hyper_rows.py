"""Hyper rows on the device: the store of encoded rows that all requests share, a batch's tables, and new entries' rows.

The store keeps encoded rows, both sides of an entry together, up to a number of bytes; the least recently used entries
are evicted first. A batch's tables hold the rows of each sequence by slot, as the kernels read them.

Unlike on MLX, every sequence has tables of its own, because the addresses of tables must not change. Known rows are
copied from the store into the tables. The kernels read only the rows of installed slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from mlx_zip.codec.entries import Installed
from mlx_zip.cuda.devices import raise_if_memory_too_small
from mlx_zip.cuda.graphs import CudaGraphs, graph_batch_size
from mlx_zip.cuda.kernels.hyper_rows import install_rows
from mlx_zip.cuda.transfers import Upload, ids_to_device

ENTRIES_PER_PASS = 512  # bounds the encoder's activations when a long prompt installs thousands of entries
STORE_BYTES = 256 << 20
EncodeEntries = Callable[
    [torch.Tensor, torch.Tensor], torch.Tensor
]  # entries [N, S], lengths [N] -> rows [N, sides, D]


class RowStore:
    """Encoded rows on the device, found by the base ids of their entries: `pool` [places, sides, D].

    sides: 1 if an entry has one row for input and output, else 2 (output, input). limit: maximum bytes of the pool,
    which always has room for `ENTRIES_PER_PASS` entries. Raises `ModelError`, naming needed and free bytes, if memory
    is too small.
    """

    def __init__(
        self, sides: int, width: int, dtype: torch.dtype, device: torch.device, limit: int = STORE_BYTES
    ) -> None:
        each = sides * width * dtype.itemsize
        self.places = max(ENTRIES_PER_PASS, limit // each)
        raise_if_memory_too_small("the store of hyper rows", self.places * each, device)
        self.pool = torch.empty((self.places, sides, width), dtype=dtype, device=device)
        self._place_by_entry: OrderedDict[bytes, int] = OrderedDict()  # place by entry, the least recently used first

    def __len__(self) -> int:
        return len(self._place_by_entry)

    def __repr__(self) -> str:
        return f"<RowStore: {len(self)} of {self.places} rows>"

    def find_or_claim_places(self, keys: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Returns the place of each entry, and the indices of the entries whose rows the caller must write there.

        keys: at most `ENTRIES_PER_PASS` results of `entry_keys`. If writing fails, call `clear`.
        """
        found, missing = [], []
        for index, key in enumerate(keys):
            place = self._place_by_entry.get(key)
            if place is None:
                missing.append(index)
                place = (
                    len(self._place_by_entry)
                    if len(self._place_by_entry) < self.places
                    else self._place_by_entry.popitem(last=False)[1]
                )
                self._place_by_entry[key] = place
            else:
                self._place_by_entry.move_to_end(key)
            found.append(place)
        return found, missing

    def clear(self) -> None:
        """Empties the store, because rows could not be written or the weights have changed."""
        self._place_by_entry.clear()

    def find_or_encode(self, entries: np.ndarray, lengths: np.ndarray, encode: EncodeEntries) -> torch.Tensor:
        """Returns rows [N, sides, D] of padded entries [N, S] of lengths [N]; encodes the entries that the store lacks.

        encode: called with the missing entries and their lengths, on the device.
        """
        parts = [
            self._find_or_encode_pass(
                entries[begin : begin + ENTRIES_PER_PASS], lengths[begin : begin + ENTRIES_PER_PASS], encode
            )
            for begin in range(0, len(entries), ENTRIES_PER_PASS)
        ]
        return parts[0] if len(parts) == 1 else torch.cat([self.pool[:0], *parts])

    def _find_or_encode_pass(self, entries: np.ndarray, lengths: np.ndarray, encode: EncodeEntries) -> torch.Tensor:
        places, missing = self.find_or_claim_places(entry_keys(entries, lengths))
        device = self.pool.device
        if missing:
            try:
                made = encode(ids_to_device(entries[missing], device), ids_to_device(lengths[missing], device))
                self.pool[ids_to_device(np.array(places)[missing], device)] = made
            except BaseException:
                self.clear()
                raise
        return self.pool[ids_to_device(np.array(places), device)]


class HyperRowTables:
    """The hyper rows of B sequences, by slot.

    outputs, inputs [B, C, D]: the same tensor if an entry has one row for both sides. installed [B, C] bool: which
    slots hold an entry. spans [B, before + C] int64: how many base ids each id stands for; 1 for the `before` ids
    before slot 0. Raises `ModelError`, naming needed and free bytes, if memory is too small.
    """

    def __init__(
        self, batch: int, slots: int, sides: int, width: int, dtype: torch.dtype, device: torch.device, before: int = 0
    ) -> None:
        each = sides * width * dtype.itemsize + torch.bool.itemsize + torch.int64.itemsize
        raise_if_memory_too_small(f"tables of hyper rows of {batch} x {slots} slots", batch * slots * each, device)
        self.outputs = torch.zeros((batch, slots, width), dtype=dtype, device=device)
        self.inputs = self.outputs if sides == 1 else torch.zeros_like(self.outputs)
        self.installed = torch.zeros((batch, slots), dtype=torch.bool, device=device)
        self.spans = torch.ones((batch, before + slots), dtype=torch.int64, device=device)

    @property
    def sides(self) -> tuple[torch.Tensor, ...]:
        """The tables in the order of the store's sides: outputs, then inputs unless they are the same tensor."""
        return (self.outputs,) if self.inputs is self.outputs else (self.outputs, self.inputs)

    def install(self, new: torch.Tensor, pool: torch.Tensor) -> None:
        """Installs entries, each in a slot of a sequence. new [4, N], pool [P, sides, D]: see `install_rows`."""
        install_rows(new, pool, self.sides, self.installed, self.spans)

    def clear_slots_from(self, row: int, count: int) -> None:
        """Marks slot `count` and all later slots of one sequence as empty."""
        self.installed[row, count:] = False

    def copy_row(self, source: int, target: int) -> None:
        """Copies all rows of sequence `source` to sequence `target`."""
        for table in (*self.sides, self.installed, self.spans):
            table[target].copy_(table[source])


class NewEntryRows:
    """Makes the rows of entries that a step installs: encodes those that the store lacks, and writes all to the tables.

    tables: those of the batch. width: S, maximum base ids of an entry. most: maximum number of sequences, each of which
    installs at most one entry per step. Encoding and installing are captured as CUDA graphs for 1, 2, 4, 8, ...
    entries. Fewer entries are padded with copies of the first entry, whose row is then written several times with the
    same values.
    """

    def __init__(self, store: RowStore, tables: HyperRowTables, graphs: CudaGraphs, width: int, most: int) -> None:
        self._store, self._tables, self._graphs = store, tables, graphs
        self._width, self._most = width, most
        sizes = {graph_batch_size(count, most) for count in range(1, most + 1)}
        self._encode_inputs = {size: Upload(size * (width + 2), store.pool.device) for size in sizes}
        self._install_inputs = {size: Upload(size * 4, store.pool.device) for size in sizes}

    def install(self, new: Sequence[tuple[int, Installed]], encode: EncodeEntries) -> None:
        """Writes the rows of new entries to the tables. new: pairs (row of a sequence, the one entry it has installed).

        encode: called with the entries that the store lacks; must be the same function in every call, because graphs
        hold it. After an error the store is empty and the tables may lack rows.
        """
        entries = np.concatenate([entry.base_ids for _, entry in new]).astype(np.int64)
        spans = np.concatenate([entry.lengths for _, entry in new]).astype(np.int64)
        slots = np.concatenate([entry.slots for _, entry in new]).astype(np.int64)
        found, missing = self._store.find_or_claim_places(entry_keys(entries, spans))
        places = np.array(found)
        try:
            if missing:
                self._encode(encode, entries[missing], spans[missing], places[missing])
            self._install(np.array([row for row, _ in new]), slots, places, spans)
        except BaseException:
            self._store.clear()
            raise

    def _encode(self, encode: EncodeEntries, entries: np.ndarray, spans: np.ndarray, places: np.ndarray) -> None:
        """Encodes entries [N, S] of `spans` [N] base ids each, and writes the rows to `places` [N] of the store."""
        size = graph_batch_size(len(entries), self._most)
        inputs = self._encode_inputs[size]
        inputs.send(np.concatenate([_pad_with_first_row(part, size).reshape(-1) for part in (entries, spans, places)]))
        self._graphs.run(("encode", size), partial(self._encode_sent_entries, encode, size, inputs.device))

    def _encode_sent_entries(self, encode: EncodeEntries, size: int, sent: torch.Tensor) -> None:
        entries, spans, places = sent.split([size * self._width, size, size])
        self._store.pool[places] = encode(entries.view(size, self._width), spans)

    def _install(self, rows: np.ndarray, slots: np.ndarray, places: np.ndarray, spans: np.ndarray) -> None:
        """Copies rows from `places` [N] of the store into `slots` [N] of the sequences in `rows` [N]."""
        size = graph_batch_size(len(rows), self._most)
        inputs = self._install_inputs[size]
        inputs.send(np.concatenate([_pad_with_first_row(part, size) for part in (rows, slots, places, spans)]))
        work = partial(self._tables.install, inputs.device.view(4, size), self._store.pool)
        self._graphs.run(("install", size), work)


def _pad_with_first_row(part: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([part, np.repeat(part[:1], size - len(part), axis=0)])


def entry_keys(entries: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    """Returns a key for each entry: the bytes of its base ids as uint32. entries [N, S], padded; lengths [N]."""
    words = np.ascontiguousarray(entries, np.uint32)
    return [row[:length].tobytes() for row, length in zip(words, lengths.tolist(), strict=True)]
