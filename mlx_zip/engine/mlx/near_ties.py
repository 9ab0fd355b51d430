"""Near-ties: where a pass over several ids, which rounds otherwise than one over one id, may choose another id.

With `--draft-exact` such a choice is made again, from a pass over the last id alone. Logits of both passes differ by up
to a share of the largest one, `ROUNDING`. The choice is near if another id is chosen once the logits of all ids up to
the chosen one are lower by twice as much, or those of all ids from the chosen one on. In a greedy choice these include
the chosen id's rivals, before it and after it. A draw takes the id in which the sum of the probabilities, in the order
of the ids, passes a random number, and no other rounding moves the two borders of that id further. Penalties and
constraints are covered because the whole choice is made again. Not covered are ids at the edge of what top-p, top-k,
min-p and XTC leave out.
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

# By the dtype of the logits. Of float32 four times the most that `bench near-ties` has found; of the others, in which
# MLX's CPU backend rounds all passes alike, twice the largest distance from the same model in float32.
ROUNDING = {mx.float32: 2e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}


def choose_exactly(
    requests: Sequence[Request],
    logits: mx.array,
    choose: Callable[[Sequence[Request], mx.array], Choice],
    read_again: Callable[[], mx.array],
) -> tuple[Choice, bool]:
    """Returns a choice from logits [B, W] of a pass over several ids, and whether it was made again because it is near.

    choose: chooses from logits. read_again: returns logits [B, W] of a pass over one id. Waits for the first choice.
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
            request.error = None  # of a choice that is not taken
        if not mx.array_equal(choice.y, other.y).item():
            _set_random_states(requests, before)
            return choose(requests, read_again()), True
    _set_random_states(requests, after)
    return choice, False


def _set_random_states(requests: Sequence[Request], states: Sequence[mx.array | None]) -> None:
    for request, state in zip(requests, states, strict=True):
        request.draws.state = state


def _rounded_otherwise(logits: mx.array, chosen: mx.array) -> Iterator[mx.array]:
    """Yields logits [B, W] with those of the ids up to the chosen ones [B] lower, and with those from there on."""
    size = mx.abs(mx.where(logits == -mx.inf, 0, logits)).max(axis=-1, keepdims=True)
    lower, ids = logits - 2 * ROUNDING[logits.dtype] * size, mx.arange(logits.shape[-1])[None]
    yield mx.where(ids <= chosen[:, None], lower, logits)
    yield mx.where(ids >= chosen[:, None], lower, logits)


def read_last_again(served: Served, cache: list[Any], last: int) -> mx.array:
    """Returns the logits [1, W] after the last id that a request's cache holds, from a pass over this id alone.

    The codebook that the request follows is not told: to whoever looks at it, it would have been rewound.
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
    finally:  # an interrupt may have come between two layers, whose keys and values are there all the same
        for entry, end in zip(entries, ends, strict=True):
            entry.offset = end
