"""A part of the training samples kept for validation."""

from __future__ import annotations

import numpy as np

from mlx_zip.training.shards import Chosen, Joined

LEAST = 4  # samples that are held out, where the data have enough of them
MOST_SHARE = 5  # at most a fifth of the samples


def held_out_count(data: Joined, share: float, batch_size: int) -> int:
    """How many samples are held out at a share: `LEAST` or more, as long as a batch is left; 0 for a share of 0."""
    usable = int((data.lengths >= 2).sum())
    if not share:
        return 0
    wanted = min(max(LEAST, round(share * usable)), usable // MOST_SHARE)
    return max(0, min(wanted, usable - batch_size))


def split(data: Joined, count: int, seed: int) -> tuple[Joined | Chosen, Chosen | None]:
    """The samples to train on and `count` to validate on, drawn by the seed; (data, None) for a count of 0."""
    if not count:
        return data, None
    drawn = np.random.default_rng([seed, count]).permutation(np.flatnonzero(data.lengths >= 2))[:count]
    held = np.zeros(len(data), np.bool_)
    held[drawn] = True
    return Chosen(data, ~held), Chosen(data, held)
