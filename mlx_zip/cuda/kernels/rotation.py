"""How queries and keys are normed and rotated: the options of the rope kernel and its reference."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotation(NamedTuple):
    """How queries and keys are normed and rotated.

    frequencies [N, R/2] float32: sets of radians per position; the first R columns of a head are rotated (column i with
    column i + R/2) and multiplied by `scale`. which [B] int64: the set of each sequence, None for the first. q_norm,
    k_norm: weights [E] of an RMS norm of each head before it is rotated, with `eps`; both or none.
    """

    frequencies: torch.Tensor
    scale: float = 1.0
    which: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
