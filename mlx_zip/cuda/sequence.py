"""The host's state of one sequence of a batch: start, codebook, and which of its rows the device lacks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.engine.drafts import Draft


@dataclass(frozen=True, eq=False)
class SequenceStart:
    """What sequences with the same pack begin with.

    params: the codec's parameters, start entries included. rows: tuned rows [P, sides, D] of the start entries, on the
    device, or None. pack: the pack or entries that the start was made from, held so that its `id()` is not reused.
    """

    params: CodecParams
    rows: torch.Tensor | None
    pack: Any

    @property
    def entry_count(self) -> int:
        """The number of start entries."""
        return len(self.params.start or ())

    @property
    def tuned_count(self) -> int:
        """The number of start entries with tuned rows: all start entries or none."""
        return 0 if self.rows is None else len(self.rows)


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
