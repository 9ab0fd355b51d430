"""A sequence of a batch: its state on the host, and how the decoder's body reads its ids.

The state is what the sequence began with, its codebook, and which of its rows the device lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mlx_zip.codec import Codebook
from mlx_zip.cuda.hyper_rows import HyperRowTables
from mlx_zip.cuda.model import CudaModel, SequenceStart
from mlx_zip.cuda.network.decoder import KVCache
from mlx_zip.cuda.transfers import ids_to_device
from mlx_zip.engine.drafts import Draft

CHUNK = 2048  # maximum ids per call of the body when a sequence is read


@dataclass(frozen=True)
class ReadDraft:
    """A draft of K ids that the body has read.

    outputs [K + 1, D]: for the id before the draft, then for each id of the draft. In the KV cache, the draft's keys
    and values follow those of the sequence's log. While the draft is in use, the cache's length includes them, so that
    steps of other sequences do not overwrite them.
    """

    draft: Draft
    outputs: torch.Tensor

    @property
    def output(self) -> torch.Tensor:
        """The output [D] for the last id that was taken from the draft, or for the id before the draft."""
        return self.outputs[self.draft.taken]


@dataclass(eq=False)
class SequenceState:
    """One sequence of a batch, and what a request owns of the batch.

    row: the sequence's row in the batch, -1 once it is removed. start: what the sequence began with. book: its
    codebook, whose log holds the ids read; without hypertokens the codebook has no slots. missing_slots: slots whose
    rows are not in the batch's tables. frequency_set: the set of rotary frequencies of the cached keys, None if the
    keys must be computed again. output [D]: the body's output for the last id; None if it is unknown or lies in the
    batch's outputs. can_choose: whether the output for the last id is known. has_chosen: whether an id was chosen that
    the codebook has not read yet. ahead: the draft that the body has read after the log, or None. by_base_ids: whether
    positions count base ids; an id then has the position of its last base id. released: whether the sequence is removed
    as soon as rows may move. kept: a snapshot that outlives the sequence, or None.
    """

    row: int
    start: SequenceStart
    book: Codebook
    missing_slots: set[int] = field(default_factory=set)
    frequency_set: int | None = 0
    output: torch.Tensor | None = None
    can_choose: bool = False
    has_chosen: bool = False
    ahead: ReadDraft | None = None
    by_base_ids: bool = False
    released: bool = False
    kept: Snapshot | None = None

    def __post_init__(self) -> None:
        self.books = [self.book]  # as the engine asks for the codebooks of a cache

    @property
    def can_evict_entries(self) -> bool:
        """Whether a new entry may replace an entry."""
        return self.book.params.policy != "freeze"

    def positions(self, first: int) -> np.ndarray:
        """Returns the positions of the log's ids from index `first` on, int64."""
        if not self.by_base_ids:
            return np.arange(first, self.book.mark(), dtype=np.int64)
        return self.book.ends(first) - 1

    @property
    def position_count(self) -> int:
        """The number of positions that the ids in the log take."""
        return self.book.base_length if self.by_base_ids else self.book.mark()

    def missing_entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the slots [N] whose rows are missing, and their entries: padded base ids [N, S] and lengths [N]."""
        slots = np.array(sorted(self.missing_slots), np.int64)
        if not len(slots):
            return slots, np.zeros((0, self.book.params.merge_size), np.uint32), slots
        low = int(slots[0])
        base_ids, lengths = self.book.padded_entries(low, int(slots[-1]) + 1 - low)
        return slots, base_ids[slots - low], lengths[slots - low].astype(np.int64)

    def rewind(self, length: int) -> None:
        """Trims the log to its first `length` ids. Forgets the last output, the chosen id and the draft."""
        self.book.rewind(length)
        if self.can_evict_entries:  # slots may hold their former entries again
            self.missing_slots.update(range(self.start.tuned_count, len(self.book)))
        self.missing_slots = {slot for slot in self.missing_slots if slot < len(self.book)}
        self.output, self.can_choose, self.has_chosen, self.ahead = None, False, False, None

    def find_evicted(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds ids of the log whose slots hold other entries now than when the ids were read.

        Looks at `count` ids from index `first` on. Returns the indices of the N ids found, counted from `first`, and
        the entries that these ids stood for: base ids [N, S] and lengths [N].
        """
        vocab, ids = self.book.params.vocab_size, self.book.ids[first : first + count].astype(np.int64)
        at = np.flatnonzero(ids >= vocab) if self.can_evict_entries else np.zeros(0, np.int64)
        then, lengths = (part[at] for part in self.book.logged_base_ids(first, count))
        now, others = (part[ids[at] - vocab] for part in self.book.padded_entries(0, len(self.book)))
        real = np.arange(then.shape[1]) < lengths[:, None]
        other = (lengths != others) | ((then != now) & real).any(axis=1)
        return at[other], then[other], lengths[other].astype(np.int64)


@dataclass(frozen=True)
class Snapshot:
    """A copy of a sequence on the host, which any batch of the same model can continue.

    start: what the sequence began with. log: the ids read, uint32 [n]. keys_values [layers, 2, K, n, E]: keys, then
    values. frequency_set: the set of rotary frequencies of the keys. output [D]: the body's output for the last id,
    None if unknown.
    """

    start: SequenceStart
    log: np.ndarray
    keys_values: torch.Tensor
    frequency_set: int
    output: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Size of the log and the tensors in bytes."""
        return self.log.nbytes + self.keys_values.nbytes + (0 if self.output is None else self.output.nbytes)

    def truncated(self, ids: int) -> Snapshot:
        """Returns a snapshot of the first `ids` ids, without output: its sequence must read before it can choose."""
        return replace(self, log=self.log[:ids], keys_values=self.keys_values[..., :ids, :], output=None)


# ---- the body reads ids

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
