"""`SequenceReader`: runs the decoder's body over ids that sequences have read, or that drafts propose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mlx_zip.cuda.hyper_rows import HyperRowTables
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.network.decoder import KVCache
from mlx_zip.cuda.sequence import SequenceState
from mlx_zip.cuda.transfers import ids_to_device

CHUNK = 2048  # maximum ids per call of the body when a sequence is read
_Span = tuple[SequenceState, int, int]  # a sequence, and a range of its log: first index, index after the last id


class SequenceReader:
    """Runs the decoder's body over ids of sequences: a prompt, a log that is read again, or drafts.

    kv, tables: those of the batch. used [B] int64: receives the number of positions that each sequence takes.
    """

    def __init__(self, model: CudaModel, kv: KVCache, tables: HyperRowTables, used: torch.Tensor) -> None:
        self._model, self._kv, self._tables, self._used = model, kv, tables, used

    def fill_missing_rows(self, row: int, sequence: SequenceState) -> None:
        """Installs a sequence's missing rows in the tables; encodes rows that the store lacks."""
        store = self._model.store
        if not sequence.missing_slots or store is None:
            return
        slots, entries, lengths = sequence.missing_entries()
        self.install_rows(row, slots, store.find_or_encode(entries, lengths, self._model.encode_entries), lengths)
        sequence.missing_slots.clear()

    def install_rows(self, row: int, slots: np.ndarray, rows: torch.Tensor, lengths: np.ndarray) -> None:
        """Installs entries of a sequence in the tables: rows [N, sides, D] of entries of lengths [N] in slots [N]."""
        new = np.stack([np.full_like(slots, row), slots, np.arange(len(slots)), lengths])
        self._tables.install(ids_to_device(new, self._model.device), rows)

    def run_body(self, row: int, sequence: SequenceState, first: int) -> None:
        """Runs the body over a sequence's ids from index `first` on, or over all ids if LongRoPE's factors change.

        The last position decides which factors all ids use. `sequence.output` becomes the output for the last id.
        """
        end, used = sequence.book.mark(), sequence.position_count
        frequency_set = self._model.decoder.rope.frequency_set(used - 1)
        if frequency_set != sequence.frequency_set:
            first, sequence.frequency_set = 0, None  # None until all ids are read
            self._kv.trim_row(row, 0)
            self._kv.frequency_set[row] = frequency_set
        for begin in range(first, end, CHUNK):
            sequence.output = self._run_body_over_spans({row: (sequence, begin, min(begin + CHUNK, end))})[row][-1]
        sequence.frequency_set, self._used[row] = frequency_set, used

    def read_last_ids_and_drafts(
        self, parts: Mapping[int, tuple[SequenceState, Sequence[int]]]
    ) -> dict[int, torch.Tensor]:
        """Runs the body over each sequence's last id and the ids proposed after it. Returns outputs [1 + K, D] by row.

        parts: by row, the sequence and its K proposed ids, which are not in the sequence's log. Afterwards the store
        holds the rows of entries that the proposed ids would install.
        """
        spans, installed = dict[int, _Span](), dict[int, list[int]]()
        for row, (sequence, ids) in parts.items():
            book = sequence.book.copy()
            installed[row] = book.push(ids).slots.tolist()
            ahead = replace(sequence, book=book, missing_slots=set(installed[row]))
            self.fill_missing_rows(row, ahead)
            spans[row] = ahead, sequence.book.mark() - 1, book.mark()
        together = [spans] if self._model.decoder.takes_rows_of_any_length else [{row: spans[row]} for row in spans]
        outputs = {row: output for some in together for row, output in self._run_body_over_spans(some).items()}
        for row, (sequence, _) in parts.items():
            self._tables.clear_slots_from(row, count := len(sequence.book))
            # slots that the draft overwrote get their former entries back
            sequence.missing_slots.update(slot for slot in installed[row] if slot < count)
            self.fill_missing_rows(row, sequence)
            self._used[row] = sequence.position_count
        return outputs

    def _run_body_over_spans(self, spans: Mapping[int, _Span]) -> dict[int, torch.Tensor]:
        """Runs the body once over one span of ids of each sequence. spans: by row. Returns outputs [L, D] by row.

        Shorter spans are padded. Rows without a span stay unchanged.
        """
        model, device, first = self._model, self._model.device, min(spans)
        shape = max(spans) + 1 - first, max(end - begin for _, begin, end in spans.values())
        ids, positions, slots = (np.full(shape, padding, np.int64) for padding in (0, 0, -1))
        for row, (sequence, begin, end) in spans.items():
            at = row - first, slice(end - begin)
            ids[at] = sequence.book.ids[begin:end]
            positions[at] = sequence.positions(begin)[: end - begin]
            slots[at] = np.arange(begin, end)
        rows = slice(first, first + shape[0])
        h = model.embed(ids_to_device(ids, device), self._tables.inputs[rows])
        for row, (sequence, begin, end) in spans.items():
            columns, entries, lengths = sequence.find_evicted(begin, end - begin)
            if len(columns) and model.store is not None:
                then = model.store.find_or_encode(entries, lengths, model.encode_entries)[:, -1]
                h[row - first, ids_to_device(columns, device)] = then
        places = ids_to_device(positions, device), ids_to_device(slots, device)
        end = spans[first][2] if len(spans) == 1 else None
        out = model.decoder.prefill(h, *places, self._kv.slice_rows(rows.start, rows.stop), end)
        return {row: out[row - first, : end - begin] for row, (_, begin, end) in spans.items()}
