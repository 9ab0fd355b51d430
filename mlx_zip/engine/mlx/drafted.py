"""`DraftedPass`: one pass over each request's last id and its proposed ids, used to choose several ids in turn.

`choose_exactly` finds choices that rounding may have changed (near-ties), and makes them again from a pass over one id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from mlx_zip.engine.draft_sources import MOST_PROPOSED
from mlx_zip.engine.drafts import Draft
from mlx_zip.engine.mlx.choosing import Choice
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.request import Request
from mlx_zip.models.batching import flatten_cache_lists, restore_columns
from mlx_zip.models.call_inputs import kv_length
from mlx_zip.models.rows.zip_state import ZipState, find_zip_state, kv_caches


class DraftedPass:
    """One pass over each request's last id and the ids proposed after it, with the logits after each of these ids.

    The columns of a row are the last id and the proposed ids. Right after the pass, codebooks and KV caches are trimmed
    to their state before it; keys and values of the pass stay in memory beyond the end (offset) of the KV caches. When
    an id is chosen, it is added to the codebook, and the end of the KV caches moves past it. In a batch the end moves
    only in `close`, because all rows share one end. For a single request it moves at once. So between two ids its cache
    is as without a draft, and may be trimmed, copied or saved.

    rows: the rows that choose their next id from this pass. A row leaves `rows` when the chosen id is not the proposed
    one; such a row waits for the next pass.
    """

    def __init__(
        self,
        served: Served,
        requests: Sequence[Request],
        cache: list[Any],
        last: Sequence[int],
        drafts: Sequence[Draft | None],
    ) -> None:
        self._requests, self._cache, self._drafts = list(requests), cache, list(drafts)
        self._state, self.rows = find_zip_state(cache), list(range(len(requests)))
        proposed = [[] if draft is None else draft.ids for draft in drafts]
        self.width = 1 + max(map(len, proposed))
        columns = np.full((len(requests), self.width), served.model.config.pad_id if served.hyper else 0, np.uint32)
        for row, ids in enumerate(proposed):
            columns[row, : 1 + len(ids)] = [last[row], *ids]
        self._logits = self._read_ids(served, mx.array(columns))
        self._logprobs = self._logits - mx.logsumexp(self._logits, axis=-1, keepdims=True)
        self._best = mx.argmax(self._logprobs, axis=-1)
        for row, one in enumerate(last):
            self._add_id_to_row(row, one)

    def _read_ids(self, served: Served, ids: mx.array) -> mx.array:
        """Returns logits [B, L, W] of ids [B, L], and stores the body's output. Leaves the cache's end where it was.

        The pass uses copies of the codebooks, because objects that follow the requests' own codebooks, such as
        canonical decoding, must not see them rewound.
        """
        state = self._state
        if state is None:
            held = [(entry, kv_length(entry)) for entry in self._cache]
            try:
                logits, self._h = served.read(ids, self._cache)
                return logits
            finally:  # an interrupt may have come between two layers
                for entry, length in held:
                    entry.trim(kv_length(entry) - length)
        books, before = list(state.books), state.offset
        state.books[:] = [book.copy() for book in books]
        try:
            logits, self._h = served.read(ids, self._cache, causal=True, long=state.long_rope)
            self._encoded = state.encoded_rows() if len(books) == 1 else None
            served.model.trim_cache(self._cache, before)
        finally:
            state.books[:] = books
        return logits

    @property
    def _taken(self) -> list[int]:
        """Per row, how many of the proposed ids have been chosen."""
        return [0 if draft is None else draft.taken for draft in self._drafts]

    @property
    def logits(self) -> mx.array:
        """The logits [rows, W] from which the rows in `rows` choose their next ids."""
        return self._at_columns(self._logits)

    @property
    def h(self) -> mx.array | None:
        """The body's output [1, 1, D] that `logits` come from; None if unknown, and in a batch."""
        taken = self._taken
        return None if self._h is None or len(taken) > 1 else self._h[:, taken[0] : taken[0] + 1]

    def _at_columns(self, values: mx.array) -> mx.array:
        """Returns from values [B, L, W] those of the rows in `rows`, each at its present column, [rows, W]."""
        taken = self._taken
        if len(taken) == 1:
            return values[:, taken[0]]
        return values[mx.array(self.rows), mx.array([taken[row] for row in self.rows])]

    def choose_best(self) -> Choice | None:
        """Chooses the likeliest ids without new work for the device, because one argmax has covered all columns.

        Returns None in the first column, or if a row needs more than the likeliest id (`Request.takes_best_id`).
        """
        taken = self._taken
        if not any(taken) or not all(self._requests[row].takes_best_id for row in self.rows):
            return None
        best: Any = self._best.tolist()
        ids = [best[row][taken[row]] for row in self.rows]
        kept = any(self._requests[row].inline.logprobs for row in self.rows)
        logprobs = self._at_columns(self._logprobs) if kept else None
        return Choice(mx.array(ids, mx.uint32), None, (None,) * len(ids), logprobs=logprobs)

    def proposes(self, row: int, chosen: int) -> bool:
        """Returns whether the id `chosen` is the next one that was proposed for a row."""
        draft = self._drafts[row]
        return draft is not None and draft.proposes(chosen)

    def add_chosen_to_cache(self, chosen: Sequence[int]) -> list[int]:
        """Adds the ids chosen for `rows` to the cache if they are the proposed ones. Ends the drafts of other rows.

        Returns the rows whose ids were added, which are the new `rows`.
        """
        rows, self.rows = self.rows, []
        for row, one in zip(rows, chosen, strict=True):
            draft = self._drafts[row]
            if draft is None:
                continue
            if draft.take_if_proposed(one):
                self._add_id_to_row(row, one)
                self.rows.append(row)
            else:
                draft.end()
        return self.rows

    def _add_id_to_row(self, row: int, one: int) -> None:
        """Adds an id of the pass to a row's codebook and, unless this is a batch, moves the end of the KV caches."""
        if len(self._drafts) > 1:
            if self._state is not None:
                self._state.push_to_sequence(row, one)
            return
        if self._state is not None:
            assert self._encoded is not None
            self._state.advance(one)
            self._state.mark_encoded_again(self._encoded)
        for entry in kv_caches(self._cache):
            entry.offset += 1

    def close(self) -> None:
        """Moves the end of a batch's KV caches past the chosen ids. After that no more ids can be chosen."""
        if len(self._drafts) > 1:
            restore_columns(self._cache, [1 + taken for taken in self._taken])


def max_draft_length(served: Served, cache: Sequence[Any]) -> int:
    """Returns the maximum number of ids per row that may be proposed on this cache.

    Returns 0 on several machines, if caches cannot be trimmed exactly (windows, recurrent states) or have several parts
    per layer, and for batches with `draft_exact`. Before KV caches are quantized, the number is such that quantization
    comes after the same id as without a draft.
    """
    kinds = set(map(type, cache)) - {ZipState}
    trimmed = {KVCache, QuantizedKVCache} if served.options.draft_exact else {KVCache, QuantizedKVCache, BatchKVCache}
    if served.machines is not None or not kinds <= trimmed:
        return 0
    if served.options.kv_bits is None or QuantizedKVCache in kinds:
        return MOST_PROPOSED
    return max(0, served.options.quantized_kv_start - cache[0].offset - 2)


# ---- near-ties: choices that a pass over several ids may make differently from a pass over one id, because of rounding
#
# With `--draft-exact` such a choice is made again, from a pass over the last id alone. The logits of the two passes
# differ by at most `ROUNDING` times the largest absolute logit. To find near-ties, the choice is repeated twice: with
# the logits of all ids up to and including the chosen id lowered by twice that difference, and with those of the chosen
# id and all ids after it. If either gives another id, the choice is a near-tie.
#
# For a greedy choice this covers all rivals, before and after the chosen id. A draw takes the id at which the
# cumulative probability, in order of ids, exceeds a random number; no rounding within the bound moves the two limits of
# that id's interval further than the two repetitions do. Penalties and constraints are covered, because the whole
# choice is repeated. Ids at the edge of what top-p, top-k, min-p and XTC leave out are not covered.

# Upper bound on the difference between two passes, divided by the largest absolute logit, by dtype of the logits.
# float32: four times the largest difference found in 126,000 ids of `stories` and SmolLM2 on a CPU with OpenBLAS
# (4.6e-6, record `near-ties`). float16 and bfloat16, in which all passes round alike on MLX's CPU backend: twice the
# largest difference from the same model in float32.
ROUNDING = {mx.float32: 2e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}


def choose_exactly(
    requests: Sequence[Request],
    logits: mx.array,
    choose: Callable[[Sequence[Request], mx.array], Choice],
    read_again: Callable[[], mx.array],
) -> tuple[Choice, bool]:
    """Chooses from logits [B, W] of a pass over several ids; at a near-tie, chooses again from a pass over one id.

    Returns the choice, and whether a choice was made again. choose: makes a choice from logits. read_again: runs the
    pass over one id and returns its logits [B, W]. Waits until the first choice is computed.
    """
    before = [request.draws.state for request in requests]
    choice = choose(requests, logits)
    if any(request.error is not None for request in requests):
        return choice, False
    after = [request.draws.state for request in requests]
    for lowered in _lowered_up_to_and_from(logits, choice.y):
        _set_random_states(requests, before)
        other = choose(requests, lowered)
        for request in requests:
            request.error = None  # the error belongs to a choice that is not used
        if not mx.array_equal(choice.y, other.y).item():
            _set_random_states(requests, before)
            return choose(requests, read_again()), True
    _set_random_states(requests, after)
    return choice, False


def _set_random_states(requests: Sequence[Request], states: Sequence[mx.array | None]) -> None:
    for request, state in zip(requests, states, strict=True):
        request.draws.state = state


def _lowered_up_to_and_from(logits: mx.array, chosen: mx.array) -> Iterator[mx.array]:
    """Yields logits [B, W] twice: lowered for all ids up to the chosen ones [B], and for the chosen and later ids."""
    size = mx.abs(mx.where(logits == -mx.inf, 0, logits)).max(axis=-1, keepdims=True)
    lower, ids = logits - 2 * ROUNDING[logits.dtype] * size, mx.arange(logits.shape[-1])[None]
    yield mx.where(ids <= chosen[:, None], lower, logits)
    yield mx.where(ids >= chosen[:, None], lower, logits)


def read_last_id_again(served: Served, cache: list[Any], last: int) -> mx.array:
    """Reads the last id of a request's cache again, alone, and returns the logits [1, W] after that id.

    The pass uses a copy of the codebook, because objects that follow the request's own codebook, such as canonical
    decoding, must not see it rewound.
    """
    state, ids = find_zip_state(cache), mx.array([[last]], mx.uint32)
    entries = list(flatten_cache_lists(kv_caches(cache)))
    ends = [entry.offset for entry in entries]
    try:
        if state is None:
            for entry in entries:
                entry.trim(1)
            return served.model(ids, cache=cache)[:, -1]
        book, state.books[0] = state.books[0], state.books[0].copy()
        try:
            served.model.trim_cache(cache, state.offset - 1)
            return served.model(ids, cache=cache)[:, -1]
        finally:
            state.books[0] = book
    finally:  # after an interrupt the layers may end at different ids, but all keys and values still exist
        for entry, end in zip(entries, ends, strict=True):
            entry.offset = end
