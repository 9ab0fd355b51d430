"""How queries and keys are normed and turned: what the rope kernel and its reference are told."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotation(NamedTuple):
    """How queries and keys are normed and turned.

    frequencies [N, R/2] float32: sets of radians per position; the first R columns of a head turn (halves paired) and
    are multiplied by `scale`. which [B] int64: the set of each sequence, None for the first. q_norm, k_norm: weights
    [E] of an RMS norm of each head before it turns, with `eps`; both or none.
    """

    frequencies: torch.Tensor
    scale: float = 1.0
    which: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
