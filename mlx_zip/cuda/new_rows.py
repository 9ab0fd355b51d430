"""The rows of the entries that a step installs: encoded if the store has none, and put into the batch's tables.

At most one entry is new in each sequence. Both pieces of work have fixed addresses and sizes 1, 2, 4, 8, ...; fewer
entries are padded with copies of the first one, which is then written several times with the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from mlx_zip.codec.entries import Installed
from mlx_zip.cuda.graphs import Graphs
from mlx_zip.cuda.kernels.install import install_rows
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.rows import Tables, keys_of
from mlx_zip.cuda.transfers import Upload


class NewRows:
    """Makes the rows of new entries. tables: of the batch. width: S, base ids of an entry. most: sequences."""

    def __init__(self, model: CudaModel, tables: Tables, graphs: Graphs, width: int, most: int) -> None:
        assert model.store is not None
        self._model, self._store, self._tables, self._graphs = model, model.store, tables, graphs
        self._width, self._most = width, most
        self._sizes = {size: _Room(size, width, model.device) for size in _sizes(most)}

    def make(self, new: Sequence[tuple[int, Installed]]) -> None:
        """Puts the rows of entries into the tables. new: pairs of a sequence's row and the one entry it has installed.

        If something raises, the store is empty and the tables may lack rows.
        """
        entries = np.concatenate([entry.base_ids for _, entry in new]).astype(np.int64)
        spans = np.concatenate([entry.lengths for _, entry in new]).astype(np.int64)
        slots = np.concatenate([entry.slots for _, entry in new]).astype(np.int64)
        found, missing = self._store.find(keys_of(entries, spans))
        places = np.array(found)
        try:
            if missing:
                self._encode(entries[missing], spans[missing], places[missing])
            self._install(np.array([row for row, _ in new]), slots, places, spans)
        except BaseException:
            self._store.forget()
            raise

    def _encode(self, entries: np.ndarray, spans: np.ndarray, places: np.ndarray) -> None:
        """Encodes entries [N, S] with lengths [N] to these places of the store."""
        size = _fitting(len(entries), self._most)
        room = self._sizes[size].encode
        room.send(np.concatenate([_filled(part, size).reshape(-1) for part in (entries, spans, places)]))
        self._graphs.run(("encode", size), partial(self._encode_sent, size, room.device))

    def _encode_sent(self, size: int, sent: torch.Tensor) -> None:
        entries, spans, places = sent.split([size * self._width, size, size])
        self._store.pool[places] = self._model.encode(entries.view(size, self._width), spans)

    def _install(self, rows: np.ndarray, slots: np.ndarray, places: np.ndarray, spans: np.ndarray) -> None:
        """Puts rows from places [N] of the store into slots [N] of the sequences `rows` [N]."""
        size = _fitting(len(rows), self._most)
        room = self._sizes[size].install
        room.send(np.concatenate([_filled(part, size) for part in (rows, slots, places, spans)]))
        self._graphs.run(("install", size), partial(self._install_sent, room.device.view(4, size)))

    def _install_sent(self, sent: torch.Tensor) -> None:
        tables = self._tables
        install_rows(sent, self._store.pool, tables.sides, tables.installed, tables.spans)


class _Room:
    """The integers of both pieces of work for one number of entries."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        self.encode = Upload(size * (width + 2), device)
        self.install = Upload(size * 4, device)


def _sizes(most: int) -> list[int]:
    """Returns 1, 2, 4, 8, ... up to `most`, which is the last."""
    return sorted({_fitting(count, most) for count in range(1, most + 1)})


def _fitting(count: int, most: int) -> int:
    """Returns the smallest of these sizes that `count` entries fit in."""
    return min(most, 1 << (count - 1).bit_length())


def _filled(part: np.ndarray, size: int) -> np.ndarray:
    """Returns an array [N, ...] padded to [size, ...] with copies of its first item."""
    return np.concatenate([part, np.repeat(part[:1], size - len(part), axis=0)])
