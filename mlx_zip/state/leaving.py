"""Entries that are evicted within one call, under a policy other than freeze."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_zip.codec import Installed


@dataclass(frozen=True)
class Left:
    """An evicted entry: base_ids [merge_size], padded; its slot held it after columns begin to end - 1 of a call."""

    sequence: int
    slot: int
    begin: int
    end: int
    base_ids: np.ndarray
    length: int


def differ(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Which of N entries differ, [N] bool. Each side is given as base_ids [N, merge_size] and lengths [N]."""
    return (some[0] != others[0]).any(axis=1) | (some[1] != others[1])


def left_by(b: int, held: tuple[np.ndarray, np.ndarray], new: Installed, first: int) -> list[Left]:
    """The entries of sequence b that were evicted for those that a call installed.

    held: its entries before the call, base_ids and lengths. first: the column of the sequence's first id.
    """
    now, out = dict(enumerate(zip([0] * len(held[0]), *held, strict=True))), []
    entries = zip(new.slots.tolist(), (first + new.at).tolist(), new.base_ids, new.lengths, strict=True)
    for slot, column, base_ids, length in entries:
        if slot in now and now[slot][0] < column:
            out.append(Left(b, slot, now[slot][0], column, now[slot][1], int(now[slot][2])))
        now[slot] = column, base_ids, length
    return out
