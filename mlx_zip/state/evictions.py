"""Entries that are evicted within one call, under a policy other than freeze."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_zip.codec import Installed


@dataclass(frozen=True)
class Evicted:
    """An entry that was evicted within a call of L ids.

    sequence, slot: where it was installed. begin, end: it was installed after each id in columns begin to end - 1 of
    the call. base_ids [merge_size]: padded; the first `length` of them are real.
    """

    sequence: int
    slot: int
    begin: int
    end: int
    base_ids: np.ndarray
    length: int


def differ(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Returns whether each of N entries differs in `some` and `others`, [N] bool.

    some, others: (base_ids [N, merge_size], lengths [N]).
    """
    return (some[0] != others[0]).any(axis=1) | (some[1] != others[1])


def evicted_in_call(b: int, held: tuple[np.ndarray, np.ndarray], new: Installed, first: int) -> list[Evicted]:
    """Returns the entries of sequence b that were evicted within a call.

    held: the sequence's entries before the call, as (base_ids, lengths). new: the entries that the call installed.
    first: the column of the sequence's first id in the call, after any left padding.
    """
    now, out = dict(enumerate(zip([0] * len(held[0]), *held, strict=True))), []
    entries = zip(new.slots.tolist(), (first + new.at).tolist(), new.base_ids, new.lengths, strict=True)
    for slot, column, base_ids, length in entries:
        if slot in now and now[slot][0] < column:
            out.append(Evicted(b, slot, now[slot][0], column, now[slot][1], int(now[slot][2])))
        now[slot] = column, base_ids, length
    return out
