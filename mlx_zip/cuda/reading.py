"""Runs the decoder's body over the ids that a sequence has read: prompts, and sequences that are read again."""

from __future__ import annotations

import torch

from mlx_zip.cuda.kv import KV
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.rows import Tables
from mlx_zip.cuda.sequence import SequenceState
from mlx_zip.cuda.transfers import ids_to_device

CHUNK = 2048  # ids that are read at once when a sequence is read again


class Reader:
    """Fills the device's side of a batch's sequences from their codebooks.

    kv, tables: of the batch. used [B] int64: receives the number of positions read. by_base_ids: as in
    `SequenceState.positions`.
    """

    def __init__(self, model: CudaModel, kv: KV, tables: Tables, used: torch.Tensor, by_base_ids: bool) -> None:
        self._model, self._kv, self._tables = model, kv, tables
        self._used, self._by_base_ids = used, by_base_ids

    def fill(self, row: int, one: SequenceState) -> None:
        """Puts the missing rows of a sequence's entries into the tables."""
        store, device = self._model.store, self._model.device
        if not one.missing or store is None:
            return
        slots, entries, lengths = one.missing_entries()
        rows, at = store.rows(entries, lengths, self._model.encode), ids_to_device(slots, device)
        self._tables.put(torch.full_like(at, row), at, rows, ids_to_device(lengths, device))
        one.missing.clear()

    def run(self, row: int, one: SequenceState, first: int) -> None:
        """Runs the body over a sequence's ids from number `first` on, or over all if LongRoPE's set of factors changes.

        The set is chosen by the last position, for all ids of a sequence. The output for the last id is kept in `one`.
        """
        end, used = one.book.mark(), one.used(self._by_base_ids)
        which = self._model.decoder.rope.which(used - 1)
        if which != one.which:
            first, one.which = 0, None  # None until all is read
            self._kv.trim(row, 0)
            self._kv.which[row] = which
        for begin in range(first, end, CHUNK):
            one.output = self._part(row, one, begin, min(begin + CHUNK, end))
        one.which, self._used[row] = which, used

    def _part(self, row: int, one: SequenceState, begin: int, end: int) -> torch.Tensor:
        """Returns the body's output [D] for the last of the log's ids `begin` to `end` - 1."""
        model, device = self._model, self._model.device
        ids = ids_to_device(one.book.ids[begin:end], device)[None]
        positions = ids_to_device(one.positions(begin, self._by_base_ids)[: end - begin], device)[None]
        h = model.embed(ids, self._tables.inputs[row : row + 1])
        at, entries, lengths = one.evicted(begin, end - begin)
        if len(at) and model.store is not None:
            h[0, ids_to_device(at, device)] = model.store.rows(entries, lengths, model.encode)[:, -1]
        slots = torch.arange(begin, end, device=device)[None]
        return model.decoder.read(h, positions, slots, self._kv.rows(row, row + 1), end)[0, -1]
