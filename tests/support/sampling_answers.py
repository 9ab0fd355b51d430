"""Answers drawn from what a constraint allows, without a model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

MOST = 3000  # base tokens of an answer


def sampled(tokenizer: Any, constraint: Any, rng: random.Random, expand: bool = False) -> list[int] | None:
    """Base ids drawn evenly from what the constraint allows, without the eos that ended them; None if none did.

    expand: now and then take several ids at once, as a hypertoken would, if the constraint accepts them.
    """
    ids: list[int] = []
    while len(ids) < MOST:
        allowed = np.flatnonzero(constraint.mask())
        step = [int(rng.choice(allowed))]
        if expand and rng.random() < 0.5:
            step += [rng.choice((int(rng.choice(allowed)), rng.randrange(len(tokenizer)))) for _ in range(2)]
        while not constraint.accepts(step):
            step.pop()
        constraint.push(step)
        ends = [n for n, i in enumerate(step) if i in tokenizer.eos_token_ids]
        ids += step[: ends[0]] if ends else step
        if ends:
            return ids
    return None


def text_of(tokenizer: Any, ids: Any) -> str:
    """The text of base ids."""
    detokenizer = tokenizer.detokenizer
    for i in ids:
        detokenizer.add_token(i)
    detokenizer.finalize()
    return detokenizer.text
