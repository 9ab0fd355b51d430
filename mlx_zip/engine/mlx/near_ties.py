"""Near-ties: choices that a pass over several ids may make differently from a pass over one id, because of rounding.

With `--draft-exact` such a choice is made again, from a pass over the last id alone. The logits of the two passes
differ by at most `ROUNDING` times the largest absolute logit. To find near-ties, the choice is repeated twice: with the
logits of all ids up to and including the chosen id lowered by twice that difference, and with those of the chosen id
and all ids after it. If either gives another id, the choice is a near-tie.

For a greedy choice this covers all rivals, before and after the chosen id. A draw takes the id at which the cumulative
probability, in order of ids, exceeds a random number; no rounding within the bound moves the two limits of that id's
interval further than the two repetitions do. Penalties and constraints are covered, because the whole choice is
repeated. Ids at the edge of what top-p, top-k, min-p and XTC leave out are not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlx_zip.engine.mlx.choosing import Choice
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.request import Request
from mlx_zip.models.batching import flatten_cache_lists
from mlx_zip.models.rows.zip_state import find_zip_state

# Upper bound on the difference between two passes, divided by the largest absolute logit, by dtype of the logits.
# float32: four times the largest difference that `bench near-ties` found. float16 and bfloat16, in which all passes
# round alike on MLX's CPU backend: twice the largest difference from the same model in float32.
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
    for lowered in _rounded_otherwise(logits, choice.y):
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


def _rounded_otherwise(logits: mx.array, chosen: mx.array) -> Iterator[mx.array]:
    """Yields logits [B, W] twice: lowered for all ids up to the chosen ones [B], and for the chosen and later ids."""
    size = mx.abs(mx.where(logits == -mx.inf, 0, logits)).max(axis=-1, keepdims=True)
    lower, ids = logits - 2 * ROUNDING[logits.dtype] * size, mx.arange(logits.shape[-1])[None]
    yield mx.where(ids <= chosen[:, None], lower, logits)
    yield mx.where(ids >= chosen[:, None], lower, logits)


def read_last_again(served: Served, cache: list[Any], last: int) -> mx.array:
    """Reads the last id of a request's cache again, alone, and returns the logits [1, W] after that id.

    The pass uses a copy of the codebook, because objects that follow the request's own codebook, such as canonical
    decoding, must not see it rewound.
    """
    state, ids = find_zip_state(cache), mx.array([[last]], mx.uint32)
    entries = list(flatten_cache_lists(cache if state is None else cache[:-1]))
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
