"""What fills the device's side of a batch: ids that a sequence reads, and the rows of entries that a step installs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from mlx_zip.codec.entries import Installed
from mlx_zip.cuda.graphs import Graphs
from mlx_zip.cuda.hyper_rows import HyperRowTables, entry_keys
from mlx_zip.cuda.kernels.install import install_rows
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.network.kv_cache import KVCache
from mlx_zip.cuda.sequence import SequenceState
from mlx_zip.cuda.transfers import Upload, ids_to_device

CHUNK = 2048  # ids that are read at once when a sequence is read again


class SequenceReader:
    """Runs the decoder's body over the ids that a sequence has read: prompts, and sequences that are read again.

    kv, tables: of the batch. used [B] int64: receives the number of positions read. by_base_ids: as in
    `SequenceState.positions`.
    """

    def __init__(
        self, model: CudaModel, kv: KVCache, tables: HyperRowTables, used: torch.Tensor, by_base_ids: bool
    ) -> None:
        self._model, self._kv, self._tables = model, kv, tables
        self._used, self._by_base_ids = used, by_base_ids

    def fill_missing_rows(self, row: int, sequence: SequenceState) -> None:
        """Puts the missing rows of a sequence's entries into the tables."""
        store, device = self._model.store, self._model.device
        if not sequence.missing_slots or store is None:
            return
        slots, entries, lengths = sequence.missing_entries()
        rows, at = store.find_or_encode(entries, lengths, self._model.encode), ids_to_device(slots, device)
        self._tables.install(torch.full_like(at, row), at, rows, ids_to_device(lengths, device))
        sequence.missing_slots.clear()

    def run_body(self, row: int, sequence: SequenceState, first: int) -> None:
        """Runs the body over a sequence's ids from number `first` on, or over all if LongRoPE's set of factors changes.

        The set is chosen by the last position, for all ids. The output for the last id is kept in `sequence`.
        """
        end, used = sequence.book.mark(), sequence.position_count(self._by_base_ids)
        frequency_set = self._model.decoder.rope.frequency_set(used - 1)
        if frequency_set != sequence.frequency_set:
            first, sequence.frequency_set = 0, None  # None until all is read
            self._kv.trim(row, 0)
            self._kv.frequency_set[row] = frequency_set
        for begin in range(first, end, CHUNK):
            sequence.output = self._run_chunk(row, sequence, begin, min(begin + CHUNK, end))
        sequence.frequency_set, self._used[row] = frequency_set, used

    def _run_chunk(self, row: int, sequence: SequenceState, begin: int, end: int) -> torch.Tensor:
        model, device = self._model, self._model.device
        ids = ids_to_device(sequence.book.ids[begin:end], device)[None]
        positions = ids_to_device(sequence.positions(begin, self._by_base_ids)[: end - begin], device)[None]
        h = model.embed(ids, self._tables.inputs[row : row + 1])
        at, entries, lengths = sequence.find_evicted(begin, end - begin)
        if len(at) and model.store is not None:
            h[0, ids_to_device(at, device)] = model.store.find_or_encode(entries, lengths, model.encode)[:, -1]
        slots = torch.arange(begin, end, device=device)[None]
        return model.decoder.prefill(h, positions, slots, self._kv.rows(row, row + 1), end)[0, -1]


class NewEntryRows:
    """Makes the rows of the entries that a step installs: encoded if the store has none, and put into the tables.

    tables: of the batch. width: S, base ids of an entry. most: sequences. At most one entry is new in each sequence.
    Both pieces of work have fixed addresses and sizes 1, 2, 4, 8, ...; fewer entries are padded with copies of the
    first one, which is then written several times with the same values.
    """

    def __init__(self, model: CudaModel, tables: HyperRowTables, graphs: Graphs, width: int, most: int) -> None:
        assert model.store is not None
        self._model, self._store, self._tables, self._graphs = model, model.store, tables, graphs
        self._width, self._most = width, most
        self._inputs_by_size = {size: _GraphInputs(size, width, model.device) for size in _graph_sizes(most)}

    def install(self, new: Sequence[tuple[int, Installed]]) -> None:
        """Puts the rows of entries into the tables. new: pairs of a sequence's row and the one entry it has installed.

        If something raises, the store is empty and the tables may lack rows.
        """
        entries = np.concatenate([entry.base_ids for _, entry in new]).astype(np.int64)
        spans = np.concatenate([entry.lengths for _, entry in new]).astype(np.int64)
        slots = np.concatenate([entry.slots for _, entry in new]).astype(np.int64)
        found, missing = self._store.find_or_claim_places(entry_keys(entries, spans))
        places = np.array(found)
        try:
            if missing:
                self._encode_entries(entries[missing], spans[missing], places[missing])
            self._install(np.array([row for row, _ in new]), slots, places, spans)
        except BaseException:
            self._store.clear()
            raise

    def _encode_entries(self, entries: np.ndarray, spans: np.ndarray, places: np.ndarray) -> None:
        """Encodes entries [N, S] with lengths [N] to these places of the store."""
        size = _fitting(len(entries), self._most)
        inputs = self._inputs_by_size[size].encode
        inputs.send(np.concatenate([_pad_with_first(part, size).reshape(-1) for part in (entries, spans, places)]))
        self._graphs.run(("encode", size), partial(self._encode_sent, size, inputs.device))

    def _encode_sent(self, size: int, sent: torch.Tensor) -> None:
        entries, spans, places = sent.split([size * self._width, size, size])
        self._store.pool[places] = self._model.encode(entries.view(size, self._width), spans)

    def _install(self, rows: np.ndarray, slots: np.ndarray, places: np.ndarray, spans: np.ndarray) -> None:
        """Puts rows from places [N] of the store into slots [N] of the sequences `rows` [N]."""
        size = _fitting(len(rows), self._most)
        inputs = self._inputs_by_size[size].install
        inputs.send(np.concatenate([_pad_with_first(part, size) for part in (rows, slots, places, spans)]))
        self._graphs.run(("install", size), partial(self._install_sent, inputs.device.view(4, size)))

    def _install_sent(self, sent: torch.Tensor) -> None:
        tables = self._tables
        install_rows(sent, self._store.pool, tables.sides, tables.installed, tables.spans)


class _GraphInputs:
    """The integers of both pieces of work for one number of entries."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        self.encode = Upload(size * (width + 2), device)
        self.install = Upload(size * 4, device)


def _graph_sizes(most: int) -> list[int]:
    return sorted({_fitting(count, most) for count in range(1, most + 1)})


def _fitting(count: int, most: int) -> int:
    return min(most, 1 << (count - 1).bit_length())


def _pad_with_first(part: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([part, np.repeat(part[:1], size - len(part), axis=0)])
