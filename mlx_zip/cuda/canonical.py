"""Canonical decoding in PyTorch: ids that the compressor would not write get no probability (`mlx_zip.exclusions`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mlx_zip.cuda.kernels.head import Head
from mlx_zip.cuda.transfers import to_device
from mlx_zip.exclusions import MOST


def without(logits: torch.Tensor, lse: torch.Tensor, excluded: Sequence[Sequence[int]], never: int) -> torch.Tensor:
    """Returns logits [B, W] with each row's excluded ids at -inf, unless they have more than `MOST` of the probability.

    lse [B]: log-sum-exp of each row. never: an id that is excluded in no row.
    """
    lists = [list(dict.fromkeys(ids)) for ids in excluded]
    if not (width := max(map(len, lists), default=0)):
        return logits
    padded = np.array([[*row, *[never] * (width - len(row))] for row in lists], np.int64)
    ids = to_device(padded, logits.device)
    chosen, real = logits.gather(1, ids), ids != never
    share = torch.where(real, chosen, -torch.inf).logsumexp(1)
    closed = real & (share - lse <= math.log(MOST))[:, None]
    return logits.scatter(1, ids, torch.where(closed, -torch.inf, chosen))


def best_canonical(head: Head, excluded: Sequence[Sequence[int]], never: int) -> torch.Tensor:
    """Returns the best ids [B] of a head with logits, after `without`."""
    assert head.logits is not None
    assert head.lse is not None
    return without(head.logits, head.lse, excluded, never).argmax(1)
