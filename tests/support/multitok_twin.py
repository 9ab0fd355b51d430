"""MultiTok in plain Python over tuples, slow and obvious, which the tests compare `mlx_zip.vocab.multitok` with.

The rules are those of `native/phrases.h`; a dictionary is a dict from phrase to id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Phrases = dict[tuple[int, ...], int]


def train(
    samples: Iterable[Sequence[int]],
    units: int,
    window: int = 0,
    first_id: int = 1,
    limit: int | None = None,
    unk_id: int | None = None,
) -> tuple[list[list[int]], Phrases]:
    """Learns from samples of units -> (ids of each sample, phrases of two or more units in the order of learning).

    units: number of units. The other arguments are those of `Settings`; limit None: no limit.
    """
    known: Phrases = {(unit,): first_id + unit for unit in range(units)}
    out = []
    for sample in samples:
        ids, at = [], 0
        while at < len(sample):
            n = _walk(known, sample, at, window)
            if n == 0:
                ids.append(_unknown(sample, at, unk_id))
                at += 1
                continue
            ids.append(known[tuple(sample[at : at + n])])
            ends = n == window or at + n == len(sample) or sample[at + n] >= units
            if not ends and (limit is None or len(known) - units < limit):
                known[tuple(sample[at : at + n + 1])] = first_id + len(known)
            at += n
        out.append(ids)
    return out, dict(list(known.items())[units:])


def encode(
    phrases: Phrases,
    sample: Sequence[int],
    units: int,
    window: int = 0,
    first_id: int = 1,
    longest: bool = True,
    unk_id: int | None = None,
) -> list[int]:
    """Returns the ids of one sample of units, without learning.

    longest: take the longest phrase that fits; False: stop at the first run that is no phrase ("walk").
    """
    known = {**{(unit,): first_id + unit for unit in range(units)}, **phrases}
    greatest = max(map(len, known))
    ids, at = [], 0
    while at < len(sample):
        most = min(len(sample) - at, window or greatest, greatest)
        if longest:
            n = max((n for n in range(1, most + 1) if tuple(sample[at : at + n]) in known), default=0)
        else:
            n = _walk(known, sample, at, window)
        ids.append(known[tuple(sample[at : at + n])] if n else _unknown(sample, at, unk_id))
        at += max(n, 1)
    return ids


def _walk(known: Phrases, sample: Sequence[int], at: int, window: int) -> int:
    """Returns the length of the run at index `at`, extended unit by unit as long as it is in `known`; 0: none is."""
    n = 0
    while at + n < len(sample) and (window == 0 or n < window) and tuple(sample[at : at + n + 1]) in known:
        n += 1
    return n


def _unknown(sample: Sequence[int], at: int, unk_id: int | None) -> int:
    """Returns the id for the unknown unit at index `at`. Raises `ValueError` if there is no unk_id."""
    if unk_id is None:
        raise ValueError(f"unit {sample[at]} at {at}")
    return unk_id


def kept(phrases: Phrases, encoded: Iterable[Sequence[int]], at_most: int, mode: str) -> Phrases:
    """Returns the phrases that pruning keeps: those used more than `at_most` times, and unused ones if "published".

    encoded: the ids of the training samples.
    """
    uses = Counter(id for ids in encoded for id in ids)
    stays = lambda n: n > at_most or (mode == "published" and n == 0)
    return {phrase: id for phrase, id in phrases.items() if stays(uses[id])}


def rewrite(
    phrases: Phrases, kept_phrases: Phrases, encoded: Iterable[Sequence[int]], units: int, first_id: int, mode: str
) -> list[list[int]]:
    """Returns encoded samples with the removed phrases replaced as the pruning mode says.

    phrases: all phrases before pruning. kept_phrases: those that pruning kept.
    """
    runs = {**{first_id + unit: (unit,) for unit in range(units)}, **{id: run for run, id in phrases.items()}}
    if mode == "reencode":
        flat = [[unit for id in ids for unit in runs[id]] for ids in encoded]
        return [encode(kept_phrases, sample, units, 0, first_id) for sample in flat]
    known = {**{(unit,): first_id + unit for unit in range(units)}, **kept_phrases}
    return [[x for id in ids for x in _replacement(known, runs[id], first_id, mode)] for ids in encoded]


def _replacement(known: Phrases, run: tuple[int, ...], first_id: int, mode: str) -> list[int]:
    """Returns the ids that replace a run of units. known: units and kept phrases, with their ids."""
    if run in known:
        return [known[run]]
    front = next(n for n in range(len(run) - 1, 0, -1) if run[:n] in known) if mode == "parent" else 1
    return [known[run[:front]], *(first_id + unit for unit in run[front:])]
