"""Chooses an id that a constraint accepts, hypertokens included.

The constraint's mask closes base ids, and every entry that begins with a closed base id. A hypertoken that is then
chosen is shown to the constraint whole. If the constraint refuses it, its column is closed and another id is chosen.
With a temperature alone, that gives each accepted id its share of the accepted ids' probability. Top-p, top-k, min-p
and XTC count refused ids too until they are closed. After `REFUSALS` of them only base ids are open.
"""

from __future__ import annotations

import math
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_zip.canonical import without
from mlx_zip.engine.job import Job
from mlx_zip.errors import GenerationError

REFUSALS = 32  # hypertokens refused in one step before only base ids may be chosen
NOTHING = "the constraint allows no token that the model could emit here"


def choose_constrained(job: Job, logits: mx.array, excluded: list[int], end: int | None) -> tuple[mx.array, mx.array]:
    """Returns the logits [1, W] that an accepted id was chosen from, and the id [1].

    excluded: ids that canonical decoding excludes. end: all columns from there on are -inf. Raises `GenerationError` if
    the constraint allows nothing.
    """
    constraint = job.submission.constraint
    assert constraint is not None
    vocab_size, first_ids = job.vocab_size, job.first_ids
    allowed = _allowed(np.asarray(constraint.mask(), bool), vocab_size, first_ids, logits.shape[1])
    if not allowed.any():
        raise GenerationError(NOTHING)
    refused = 0
    while True:
        open_logits = mx.where(mx.array(allowed)[None], logits, -mx.inf)
        closed = without(open_logits, excluded) if excluded else open_logits
        token, likely = _drawn(job, closed, end)
        if not likely and excluded:
            excluded = []  # what is left is what canonical decoding excludes
            continue
        if not likely:
            raise GenerationError(NOTHING)
        expansion = job.expand(token)
        if len(expansion) == 1 or constraint.accepts(job.cut(expansion)[0]):
            return closed, mx.array([token], mx.uint32)
        refused += 1
        allowed[token] = False
        if refused == REFUSALS:
            allowed[vocab_size : vocab_size + len(first_ids)] = False


def _drawn(job: Job, logits: mx.array, end: int | None) -> tuple[int, bool]:
    """Returns an id drawn from logits [1, W], and whether it has any probability."""
    logprobs = logits - mx.logsumexp(logits[:, :end], axis=-1, keepdims=True)
    token = cast(int, job.draws(logprobs).item())
    return token, math.isfinite(cast(float, logprobs[0, token].item()))


def _allowed(mask: np.ndarray, vocab_size: int, first_ids: np.ndarray, width: int) -> np.ndarray:
    """Returns which columns [W] bool may be chosen from.

    mask: which base ids may come next; those that it does not name may not. first_ids [N]: each entry's first base id.
    """
    allowed = np.zeros(width, bool)
    allowed[: min(len(mask), vocab_size)] = mask[:vocab_size]
    allowed[vocab_size : vocab_size + len(first_ids)] = allowed[first_ids]
    return allowed
