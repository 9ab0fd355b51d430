"""Holds out a share of the training samples for validation."""

from __future__ import annotations

import numpy as np

from mlx_zip.training.joined import Chosen, Joined

LEAST = 4  # samples to hold out at least, if the data have enough
MOST_SHARE = 5  # hold out at most one in 5 samples


def held_out_count(data: Joined, share: float, batch_size: int) -> int:
    """Returns the number of samples to hold out: `share` of them, at least `LEAST`, at most one in `MOST_SHARE`.

    One batch is always left to train on. 0 for a share of 0.
    """
    usable = int((data.lengths >= 2).sum())
    if not share:
        return 0
    wanted = min(max(LEAST, round(share * usable)), usable // MOST_SHARE)
    return max(0, min(wanted, usable - batch_size))


def split(data: Joined, count: int, seed: int) -> tuple[Joined | Chosen, Chosen | None]:
    """Returns the samples to train on, and `count` random ones to validate on; (data, None) for a count of 0."""
    if not count:
        return data, None
    drawn = np.random.default_rng([seed, count]).permutation(np.flatnonzero(data.lengths >= 2))[:count]
    held = np.zeros(len(data), np.bool_)
    held[drawn] = True
    return Chosen(data, ~held), Chosen(data, held)
