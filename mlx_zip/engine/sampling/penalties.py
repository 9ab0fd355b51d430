"""Computes the terms of penalties and biases at each step, over base tokens. Needs neither MLX nor PyTorch.

A hypertoken pays every penalty of its constituents: presence and frequency penalties and biases are summed, and the
repetition penalty is applied once per constituent seen. If a penalty were applied to the id of a word alone, the word
would come back inside a hypertoken.

A step computes the terms of base ids that entered or left the context, and the sums of entries that are new, changed or
contain one of these base ids. The tests compare this with a plain form that computes every column at every step; both
give the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_zip.codec import Codebook
from mlx_zip.engine.parts import State
from mlx_zip.engine.sampling.options import Sampling


class PenaltyTerms:
    """Follows a sequence's base tokens and computes what mlx-lm's penalties and biases change, and by how much.

    A base id is penalised as in mlx-lm. A hypertoken gets the sum of its base ids' biases, presence and frequency
    penalties, and the repetition penalty r once for each of its k base ids that were seen (a factor r^k).

    A call computes only columns that have a penalty or a bias, and only those sums over base ids that changed.
    """

    def __init__(self, sampling: Sampling, state: State, row: int) -> None:
        self.sampling, self.state, self.row = sampling, state, row
        # Terms over base ids, [V + 1]: bias, 1 where the repetition penalty applies, and what is subtracted. The last
        # element is 0 and stands for the padding of entries.
        size = state.books[row].params.vocab_size + 1
        self._bias, self._seen, self._subtracted = (np.zeros(size, np.float32) for _ in range(3))
        self._terms = self._bias, self._seen, self._subtracted
        for base_id, value in (sampling.logit_bias or {}).items():
            self._bias[base_id] = value
        self._biased, self._context = np.flatnonzero(self._bias), np.zeros(0, np.int64)
        self._changed = np.zeros(size, bool)  # base ids whose terms have changed since the last call
        options = (
            sampling.logit_bias,
            sampling.repetition_penalty,
            sampling.presence_penalty or sampling.frequency_penalty,
        )
        self._used_terms = [index for index, option in enumerate(options) if option]  # which terms can be other than 0
        self._sums = EntryTermSums([self._terms[i] for i in self._used_terms], state.books[row].params.merge_size)

    def bind_to_row(self, state: State, row: int) -> None:
        """Makes the terms follow the same sequence in another state, or in another row, from now on."""
        self.state, self.row = state, row

    def nonzero_columns(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the columns [N] that have a penalty or a bias, and three terms [N] for these columns.

        The terms: the bias, how often the repetition penalty applies, and what the other two penalties subtract.
        """
        changed = self._update_terms()
        self._changed[changed] = True
        sums = self._sums.update(self.state.books[self.row], self._changed)
        self._changed[changed] = False
        context = self._context
        others = (self._bias[context] == 0) & ((self._seen[context] != 0) | (self._subtracted[context] != 0))
        base_ids = np.concatenate([self._biased, context[others]])
        slots = np.flatnonzero(sums.any(axis=0))
        columns = np.concatenate([base_ids, len(self._bias) - 1 + slots])
        terms = [np.zeros(len(columns), np.float32)] * 3
        for index, of in zip(self._used_terms, sums, strict=True):
            terms[index] = np.concatenate([self._terms[index][base_ids], of[slots]])
        return columns, terms

    def _update_terms(self) -> np.ndarray:
        """Computes the terms for the current context and returns the base ids whose terms have changed."""
        repeated, present, counted = self._context_of_each_penalty()
        context = np.unique(np.concatenate([repeated, present, counted]))
        both = np.concatenate([self._context, context])
        seen, subtracted = self._seen[both], self._subtracted[both]
        self._seen[both] = self._subtracted[both] = 0
        self._seen[repeated] = 1
        if self.sampling.presence_penalty:
            self._subtracted[present] += self.sampling.presence_penalty
        if self.sampling.frequency_penalty:
            np.add.at(self._subtracted, counted, self.sampling.frequency_penalty)
        self._context = context
        return both[(seen != self._seen[both]) | (subtracted != self._subtracted[both])]

    def _context_of_each_penalty(self) -> list[np.ndarray]:
        """Returns, for each penalty, the last base tokens that the penalty looks at; none if the penalty is off."""
        options, book = self.sampling, self.state.books[self.row]
        counts = [
            options.repetition_context_size if options.repetition_penalty else 0,
            options.presence_context_size if options.presence_penalty else 0,
            options.frequency_context_size if options.frequency_penalty else 0,
        ]
        last = book.base_ids(max(0, book.mark() - max(counts)))  # the last n ids have at least n base tokens
        last = last[last < len(self._bias) - 1]  # a batch's ended sequence reads a pad id, which may not be a base id
        return [last[max(0, len(last) - count) :] for count in counts]


class EntryTermSums:
    """For each entry of a codebook, the sums of some terms over its base ids, kept up to date while the codebook grows.

    Penalties need the sums at every step, and most of them do not change from one step to the next.

    terms: arrays [V + 1] over base ids, with 0 in the last place. They may be changed between updates.
    """

    def __init__(self, terms: Sequence[np.ndarray], merge_size: int) -> None:
        self._terms = terms
        self._rows, self._lengths = np.zeros((0, merge_size), np.uint32), np.zeros(0, np.uint8)
        self._sums = np.zeros((len(terms), 0), np.float32)

    def update(self, book: Codebook, changed: np.ndarray) -> np.ndarray:
        """Returns the sums [number of terms, entries], computed anew for new entries and those with a changed base id.

        changed [V + 1] bool: base ids whose terms may have changed since the last update.
        """
        rows, lengths = book.padded_entries(0, len(book))
        n, width = rows.shape
        known = min(n, len(self._lengths))
        stale = np.ones(n, bool)
        stale[:known] = lengths[:known] != self._lengths[:known]
        found = changed.take(rows, mode="clip")  # padding may not be a base id; some entries are then computed in vain
        found[:known] |= rows[:known] != self._rows[:known]
        stale[np.flatnonzero(found) // width] = True
        sums = np.empty((len(self._terms), n), np.float32)
        sums[:, :known] = self._sums[:, :known]
        if len(at := np.flatnonzero(stale)):
            entries = np.where(np.arange(width) < lengths[at, None], rows[at], len(changed) - 1)
            for of, term in zip(sums, self._terms, strict=True):
                of[at] = term[entries].sum(axis=1)
        self._rows, self._lengths, self._sums = rows, lengths, sums
        return sums
