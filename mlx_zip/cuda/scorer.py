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
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.network.frequencies import LONG, SHORT
from mlx_zip.cuda.sequence import SequenceStart
from mlx_zip.cuda.sequence_reader import CHUNK
from mlx_zip.cuda.transfers import ids_to_device
from mlx_zip.engine.sampling.exclusions import MAX_EXCLUDED_SHARE
from mlx_zip.engine.scored import LOGITS, Compressed, Pairs, Scored

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
        self._model = model
        self._by_base_ids = model.config is not None and model.config.position_mode == "base_token_end"
        self._kv = model.decoder.make_kv_cache(1, CHUNK)

    @torch.no_grad()
    def score_in_parts(self, row: Compressed, closed: Pairs, causal: bool = True, top: int = 0) -> Iterator[Scored]:
        """Yields the predictions of a row's ids, from the second id on, some at a time.

        closed: positions, and the ids that canonical decoding forbids there. causal: False opens the row's last entries
        at every position ("legacy" in `mlx_zip.engine.mlx.scoring.score_rows`). top: number of likeliest ids per
        position.
        """
        row_entries, vocab_size, begin = self._find_row_entries(row), self._model.layout.vocab_size, 0
        most = max(1, LOGITS // (vocab_size + len(row_entries.rows)))
        first, last = (ids_to_device(part, row_entries.rows.device) for part in (row_entries.first, row_entries.last))
        if not causal:
            first = torch.where(last == NEVER, -1, NEVER)
        for outputs in self._body_outputs(row, row_entries):
            high = row_entries.rows[:, 0].to(outputs.dtype)
            for h in outputs.split(most):
                end = begin + len(h)
                at = torch.arange(begin, end, device=h.device)[:, None]
                entries = torch.where((first <= at) & (at < last), (h @ high.T).float(), -torch.inf)
                here = (closed[0] >= begin) & (closed[0] < end)
                logits = _PositionLogits(self._model.base_logits(h), entries)
                logits.exclude_ids(closed[0][here] - begin, closed[1][here])
                wanted = slice(begin + 1, end + 1)
                yield logits.score_ids(row.ids[wanted], row_entries.of[wanted], vocab_size + row_entries.slots, top)
                begin = end

    @torch.no_grad()
    def score_next_ids(self, row: Compressed, ids: Sequence[int]) -> np.ndarray:
        """Returns what `EvaluatedModel.score_next` returns: log-probabilities float64 [k] of ids after a whole row."""
        last = np.zeros(1, row.ids.dtype)  # a placeholder: the body does not read the last id
        longer = replace(row, ids=np.concatenate([row.ids, last]), spans=np.concatenate([row.spans, [1]]))
        row_entries = self._find_row_entries(longer)
        *_, outputs = self._body_outputs(longer, row_entries)
        h = outputs[-1:]
        open_now = ids_to_device(np.flatnonzero(row_entries.last == NEVER), h.device)
        entries = (h @ row_entries.rows[open_now, 0].to(h.dtype).T).float()
        logits = _PositionLogits(self._model.base_logits(h), entries)
        return (logits.low[0, list(ids)] - logits.log_sum_exp()[0]).double().cpu().numpy()

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
        positions = row.ends[:-1] - 1 if self._by_base_ids else np.arange(count)
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


class _PositionLogits:
    """The logits of n positions: low [n, V] of base ids; high [n, E] of entries, -inf where an entry is not open."""

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high

    def log_sum_exp(self) -> torch.Tensor:
        """Returns the log-sum-exp [n, 1] over base ids and entries."""
        return torch.logaddexp(self.low.logsumexp(1), self.high.logsumexp(1))[:, None]

    def exclude_ids(self, at: np.ndarray, ids: np.ndarray) -> None:
        """Sets the logits of ids [m] at positions `at` [m] to -inf; see `sampling.exclude_ids` for the exception."""
        if not len(at):
            return
        rows, columns = (ids_to_device(part, self.low.device) for part in np.unique([at, ids], axis=1))
        width = self.low.shape[1]
        is_low = columns < width
        low_at, high_at = (rows[is_low], columns[is_low]), (rows[~is_low], columns[~is_low] - width)
        total = self.log_sum_exp()[:, 0]
        share = torch.zeros_like(total)
        for part, (row, column) in ((self.low, low_at), (self.high, high_at)):
            share.index_add_(0, row, torch.exp(part[row, column] - total[row]))
        for part, (row, column) in ((self.low, low_at), (self.high, high_at)):
            part[row, column] = torch.where(share[row] > MAX_EXCLUDED_SHARE, part[row, column], -torch.inf)

    def score_ids(self, ids: np.ndarray, of: np.ndarray, entry_ids: np.ndarray, top: int) -> Scored:
        """Returns the predictions of n ids, one per position.

        ids [n]: the id that follows each position. of [n]: the entry that the id stands for, -1 for a base id.
        entry_ids [E]: the id of each entry. top: number of likeliest ids to return per position.
        """
        device, total, hyper = self.low.device, self.log_sum_exp(), of >= 0
        base = self.low.gather(1, ids_to_device(np.where(hyper, 0, ids), device)[:, None])
        chosen = base
        if self.high.shape[1]:
            entry = self.high.gather(1, ids_to_device(np.maximum(of, 0), device)[:, None])
            chosen = torch.where(ids_to_device(hyper, device)[:, None].bool(), entry, base)
        best = torch.maximum(self.low.amax(1), self.high.amax(1)) if self.high.shape[1] else self.low.amax(1)
        mass = torch.exp(self.high.logsumexp(1) - total[:, 0])
        likely = torch.cat([self.low, self.high], 1).topk(top) if top else None
        columns = np.zeros((len(ids), 0), np.int64) if likely is None else likely.indices.cpu().numpy()
        width = self.low.shape[1]
        return Scored(
            (chosen - total)[:, 0].double().cpu().numpy(),
            (chosen[:, 0] == best).cpu().numpy(),
            mass.double().cpu().numpy(),
            np.concatenate([np.arange(width), entry_ids])[columns],
            np.zeros(columns.shape) if likely is None else (likely.values - total).double().cpu().numpy(),
        )
