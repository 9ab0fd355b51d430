"""Entries that leave within one call, under a policy other than freeze."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_zip.codec import Installed


@dataclass(frozen=True)
class Left:
    """An entry, base_ids [merge_size] padded, that a slot had behind columns begin..end-1 of a call's ids."""

    sequence: int
    slot: int
    begin: int
    end: int
    base_ids: np.ndarray
    length: int


def differ(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """[N] bool: where entries differ, each given as base_ids [N, merge_size] and lengths [N]."""
    return (some[0] != others[0]).any(axis=1) | (some[1] != others[1])


def left_by(b: int, held: tuple[np.ndarray, np.ndarray], new: Installed, first: int) -> list[Left]:
    """What left sequence b for the entries that a call installed; held: its entries before, first: its first column."""
    now, out = dict(enumerate(zip([0] * len(held[0]), *held, strict=True))), []
    entries = zip(new.slots.tolist(), (first + new.at).tolist(), new.base_ids, new.lengths, strict=True)
    for slot, column, base_ids, length in entries:
        if slot in now and now[slot][0] < column:
            out.append(Left(b, slot, now[slot][0], column, now[slot][1], int(now[slot][2])))
        now[slot] = column, base_ids, length
    return out
