"""Scores rows of ids with a PyTorch model: the log-probability of each id given the ids before it.

Each row is scored alone. Every entry that the row's codebook ever holds has its own column of the logits. The column is
open from the id that installs the entry until another entry takes the entry's slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mlx_zip.codec import Codebook
from mlx_zip.cuda.model import CudaModel, SequenceStart
from mlx_zip.cuda.network.decoder_config import LONG, SHORT
from mlx_zip.cuda.sampling import exclude_ids
from mlx_zip.cuda.sequence import CHUNK
from mlx_zip.cuda.transfers import ids_to_device
from mlx_zip.engine.sampling.exclusions import find_excluded_ids
from mlx_zip.engine.scored import LOGITS, Compressed, Scored

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class RowEntries:
    """All entries that a row's codebook ever held, in the order of installation.

    first [E] int64: index in the row of the id that installs each entry, -1 for a start entry. last [E] int64: index of
    the id that evicts each entry, `NEVER` if none does. of [n] int64: the entry that each id of the row stands for, -1
    for a base id. slots [E] int64: the slot of each entry. rows [E, sides, D]: hyper rows, on the device.
    """

    first: np.ndarray
    last: np.ndarray
    of: np.ndarray
    slots: np.ndarray
    rows: torch.Tensor


class RowScorer:
    """Scores rows of ids with a model. Has its own KV cache."""

    def __init__(self, model: CudaModel) -> None:
        self._model, config = model, model.config
        self._canonical, self._pad_id = (False, 0) if config is None else (config.canonical, config.pad_id)
        self._kv = model.decoder.make_kv_cache(1, CHUNK)

    @torch.no_grad()
    def score_in_parts(self, row: Compressed, causal: bool = True, top: int = 0) -> Iterator[Scored]:
        """Yields the predictions of a row's ids, from the second id on, some at a time.

        If decoding is canonical, ids that the compressor would not write are excluded. causal: False lets every
        position choose all entries of the whole row ("legacy" in `mlx_zip.engine.mlx.scoring.score_rows`). top: number
        of likeliest ids per position.
        """
        row_entries, vocab_size, begin = self._find_row_entries(row), self._model.layout.vocab_size, 0
        most = max(1, LOGITS // (vocab_size + len(row_entries.rows)))
        first, last = (ids_to_device(part, row_entries.rows.device) for part in (row_entries.first, row_entries.last))
        if not causal:
            first = torch.where(last == NEVER, -1, NEVER)
        excluded = self._find_excluded_ids(row)
        columns = np.where(row_entries.of < 0, row.ids, vocab_size + row_entries.of)
        column_ids = np.concatenate([np.arange(vocab_size), vocab_size + row_entries.slots])
        for outputs in self._body_outputs(row, row_entries):
            for h in outputs.split(most):
                end = begin + len(h)
                at = torch.arange(begin, end, device=h.device)[:, None]
                logits = self._logits(h, row_entries.rows, (first <= at) & (at < last))
                exclude_ids(logits, excluded[begin:end], self._pad_id)
                yield _score_columns(logits, columns[begin + 1 : end + 1], vocab_size, column_ids, top)
                begin = end

    def _logits(self, h: torch.Tensor, rows: torch.Tensor, open_: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [n, V + E] of base ids and entries for outputs h [n, D].

        rows [E, sides, D]: the entries' rows. open_ [n, E] bool, or [1, E]: -inf for an entry that is not open.
        """
        entries = (h @ rows[:, 0].to(h.dtype).T).float()
        return torch.cat([self._model.base_logits(h), entries.masked_fill_(~open_, -torch.inf)], 1)

    def _find_excluded_ids(self, row: Compressed) -> list[list[int]]:
        """Returns, for each id of a row but the last, the ids that canonical decoding forbids next."""
        count = len(row.ids) - 1
        if not self._canonical:
            return [[] for _ in range(count)]
        book = Codebook(self._model.sequence_start(row.pack).params)
        at, ids = find_excluded_ids(book, row.ids[:-1], row.breaks)
        return [some.tolist() for some in np.split(ids, np.searchsorted(at, np.arange(1, count)))]

    @torch.no_grad()
    def score_next_ids(self, row: Compressed, ids: Sequence[int]) -> np.ndarray:
        """Returns what `EvaluatedModel.score_next` returns: log-probabilities float64 [k] of ids after a whole row."""
        last = np.zeros(1, row.ids.dtype)  # a placeholder: the body does not read the last id
        longer = replace(row, ids=np.concatenate([row.ids, last]), spans=np.concatenate([row.spans, [1]]))
        row_entries = self._find_row_entries(longer)
        *_, outputs = self._body_outputs(longer, row_entries)
        open_ = ids_to_device(row_entries.last, outputs.device)[None] == NEVER
        logits = self._logits(outputs[-1:], row_entries.rows, open_)
        return logits.log_softmax(1)[0, list(ids)].double().cpu().numpy()

    def _find_row_entries(self, row: Compressed) -> RowEntries:
        model = self._model
        begin = model.sequence_start(row.pack) if model.has_hypertokens else model.default_start
        book, ids = Codebook(begin.params), row.ids.astype(np.int64)
        start, start_lengths = book.padded_entries(0, begin.entry_count)
        new = book.push(row.ids[:-1])
        slots = np.concatenate([np.arange(begin.entry_count), new.slots]).astype(np.int64)
        first = np.concatenate([np.full(begin.entry_count, -1), new.at])
        of, last = np.full(len(ids), -1), np.full(len(slots), NEVER)
        by_slot: dict[int, list[int]] = {}
        for entry, slot in enumerate(slots.tolist()):
            known = by_slot.setdefault(slot, [])
            if known:
                last[known[-1]] = first[entry]
            known.append(entry)
        for at in np.flatnonzero(ids >= model.layout.vocab_size).tolist():
            known = by_slot[int(ids[at]) - model.layout.vocab_size]
            of[at] = next((one for one in reversed(known) if first[one] < at), known[0])
        entries, lengths = np.concatenate([start, new.base_ids]), np.concatenate([start_lengths, new.lengths])
        return RowEntries(first, last, of, slots, self._rows_of_entries(begin, entries, lengths.astype(np.int64)))

    def _rows_of_entries(self, begin: SequenceStart, entries: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """Returns the rows [E, sides, D] of `entries`, which begin with the codebook's start entries."""
        model = self._model
        if model.store is None or not len(entries):
            return torch.empty((0, model.sides, model.width), dtype=model.dtype, device=model.device)
        tuned = begin.tuned_count
        found = [] if begin.rows is None else [begin.rows]
        if tuned < len(entries):
            found.append(model.store.find_or_encode(entries[tuned:], lengths[tuned:], model.encode_entries))
        return torch.cat(found)

    def _body_outputs(self, row: Compressed, row_entries: RowEntries) -> Iterator[torch.Tensor]:
        """Yields the body's outputs [n, D] for all ids of a row but the last, some at a time.

        Positions before `Rope.long_from` use LongRoPE's short factors, as in generation.
        """
        count, rope = len(row.ids) - 1, self._model.decoder.rope
        positions = row.ends[:-1] - 1 if self._model.by_base else np.arange(count)
        h = self._embed_ids(row.ids[:-1], row_entries)
        border = count if rope.long_from is None else int(np.searchsorted(positions, rope.long_from))
        yield from self._run_body(h[:border], positions[:border], SHORT)
        if border < count:
            yield from self._run_body(h, positions, LONG, border)

    def _embed_ids(self, ids: np.ndarray, row_entries: RowEntries) -> torch.Tensor:
        model, of = self._model, row_entries.of[: len(ids)]
        none = torch.empty((1, 0, model.width), dtype=model.dtype, device=model.device)
        h = model.embed(ids_to_device(np.where(of < 0, ids, 0), model.device)[None], none)[0]
        if len(at := np.flatnonzero(of >= 0)):
            h[ids_to_device(at, model.device)] = row_entries.rows[ids_to_device(of[at], model.device), -1].to(h.dtype)
        return h

    def _run_body(
        self, h: torch.Tensor, positions: np.ndarray, frequency_set: int, wanted: int = 0
    ) -> Iterator[torch.Tensor]:
        """Yields the body's outputs for embeddings h [n, D] of a whole sequence, from index `wanted` on."""
        model, count = self._model, len(h)
        if self._kv.capacity < count:
            self._kv = model.decoder.make_kv_cache(1, count)
        self._kv.trim_row(0, 0)
        self._kv.frequency_set[0] = frequency_set
        at = ids_to_device(positions, model.device)[None]
        for begin in range(0, count, CHUNK):
            end = min(begin + CHUNK, count)
            slots = torch.arange(begin, end, device=model.device)[None]
            found = model.decoder.prefill(h[None, begin:end], at[:, begin:end], slots, self._kv, end)[0]
            if end > wanted:
                yield found[max(0, wanted - begin) :]


def _score_columns(
    logits: torch.Tensor, columns: np.ndarray, vocab_size: int, column_ids: np.ndarray, top: int
) -> Scored:
    """Returns the predictions of n ids, one per position, for logits [n, V + E].

    columns [n]: the column of the id that follows each position. column_ids [V + E]: the id of each column. top: number
    of likeliest ids to return per position.
    """
    total, likely = logits.logsumexp(1), (logits if top else logits[:, :0]).topk(top)  # topk(0) would search too
    chosen = logits.gather(1, ids_to_device(columns, logits.device)[:, None])[:, 0]
    mass = torch.exp(logits[:, vocab_size:].logsumexp(1) - total)
    return Scored(
        (chosen - total).double().cpu().numpy(),
        (chosen == logits.amax(1)).cpu().numpy(),
        mass.double().cpu().numpy(),
        column_ids[likely.indices.cpu().numpy()],
        (likely.values - total[:, None]).double().cpu().numpy(),
    )
