"""MultiTok's post-processing: phrases that training hardly used give way to what they are made of.

Source: arXiv 2410.21548, section III and lemma 1. Ways of doing it, `PRUNINGS`:

    published    what the published code does: phrases used 1..K times go, those never used stay; units in their place
    single       those never used go too
    parent       in a phrase's place the longest phrase left that it begins with, then units
    reencode     the samples are encoded again with what is left, longest match; fewest ids
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import CodecError
from mlx_zip.vocab.multitok.dictionary import Dictionary
from mlx_zip.vocab.multitok.samples import Samples
from mlx_zip.vocab.multitok.settings import NO_ID, Pruning


@dataclass(frozen=True)
class Bound:
    """What lemma 1 says a corpus grows by at most when phrases used up to K times are given up.

    printed: as in the paper, (N + sum_k lambda_k (w - 1)) / N, which does not hold, as a phrase used k times is
    replaced k times. corrected: with k lambda_k in its place, which holds wherever a phrase gives way to at most its
    units. N tokens, lambda_k phrases used k times, w units in the longest phrase.
    """

    printed: float
    corrected: float


def growth_bound(dictionary: Dictionary, at_most: int) -> Bound:
    """Lemma 1 for a dictionary that is yet to be pruned. Raises `CodecError` for one trained on nothing."""
    longest, tokens = int(dictionary.lengths.max()), dictionary.totals.tokens
    if not tokens:
        raise CodecError("the dictionary was trained on nothing, so there is nothing that could grow")
    used = dictionary.uses[dictionary.settings.units.size :].astype(np.int64)
    used = used[(used > 0) & (used <= at_most)]
    return Bound(1 + len(used) * (longest - 1) / tokens, 1 + int(used.sum()) * (longest - 1) / tokens)


def prune(dictionary: Dictionary, at_most: int = 1, mode: str = "reencode") -> Dictionary:
    """The dictionary without the phrases that its training used at most `at_most` times. It learns no more.

    Ids stay as they are; see `renumbered`. A prefix that was given up stays in the table, without an id, as long as a
    kept phrase begins with it. Raises `CodecError` naming the argument.
    """
    pruning = Pruning(at_most, mode)
    n_units, rows, uses, ids = dictionary.settings.units.size, dictionary.rows, dictionary.uses, dictionary.ids
    used = uses[n_units:]
    kept = (ids != NO_ID) & ((used > at_most) | ((used == 0) & (mode == "published")))
    stays = _with_prefixes(rows[:, 0], n_units, kept)
    place = np.concatenate([np.arange(n_units), n_units - 1 + np.cumsum(stays)])  # of each node that stays
    left = np.stack([place[rows[stays, 0]], rows[stays, 1]], axis=1).astype(np.uint32)
    left_ids = np.where(kept, ids, np.uint32(NO_ID))[stays]
    left_uses = np.concatenate([uses[:n_units], np.where(kept, used, 0)[stays]]).astype(np.uint32)
    return Dictionary.of(dictionary.settings, left, left_ids, left_uses, pruning=pruning)


def _with_prefixes(up: Uint32s, n_units: int, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Kept runs and all that they begin with."""
    stays, new = kept.copy(), np.flatnonzero(kept)
    while len(new):
        above = up[new]
        new = np.unique(above[above >= n_units] - n_units)
        new = new[~stays[new]]
        stays[new] = True
    return stays


def rewrite(dictionary: Dictionary, pruned: Dictionary, ids: Samples) -> Samples:
    """What `Rewriter` does, once."""
    return Rewriter(dictionary, pruned)(ids)


class Rewriter:
    """Samples that `dictionary` encoded, in training or later, as they read after `pruned = prune(dictionary, ...)`.

    Raises `CodecError` for an id that is none, and where `pruned` is no pruned dictionary or `dictionary` is one.
    """

    def __init__(self, dictionary: Dictionary, pruned: Dictionary) -> None:
        if pruned.pruning is None or dictionary.given_ids is not None:
            raise CodecError("samples are rewritten from a dictionary as it was trained to a pruned one")
        self.dictionary, self.pruned, self.mode = dictionary, pruned, pruned.pruning.mode
        self._lengths = dictionary.lengths.astype(np.int64)
        self._front = _fronts(dictionary, pruned, self.mode == "parent")

    def __call__(self, ids: Samples) -> Samples:
        """The samples, of which each phrase that is left stays and the others give way."""
        units = self.dictionary.expand_all(ids)
        if self.mode == "reencode":
            return self.pruned.encode_all(units)
        first = self.dictionary.settings.first_id
        nodes = np.maximum(ids.ids.astype(np.int64) - first, 0)  # an unk_id below first_id is one unit, as unit 0 is
        front = self._front[nodes]
        spans, kept = self._lengths[nodes], self._lengths[front]
        place = np.arange(len(units.ids)) - np.repeat(np.cumsum(spans) - spans, spans)  # of a unit in its token's run
        out = units.ids + np.uint32(first)
        out[place == 0] = np.where(front == nodes, ids.ids, (front + first).astype(np.uint32))
        stays = (place == 0) | (place >= np.repeat(kept, spans))
        ends = np.concatenate([[0], np.cumsum(1 + spans - kept)])[ids.ends.astype(np.int64)]
        return Samples(out[stays], ends.astype(np.uint64))


def _fronts(dictionary: Dictionary, pruned: Dictionary, phrases: bool) -> NDArray[np.int64]:
    """The node that each node's run then begins with: itself, or of its prefixes the longest phrase left, or a unit."""
    n_units, up = dictionary.settings.units.size, dictionary.rows[:, 0].astype(np.int64)
    left = np.isin(dictionary.ids, pruned.ids)  # NO_ID is none of the former's
    front = np.arange(n_units + len(up))
    stops = np.concatenate([np.ones(n_units, bool), left if phrases else np.zeros(len(left), bool)])
    todo = n_units + np.flatnonzero(~left)
    while len(todo):
        front[todo] = up[front[todo] - n_units]
        todo = todo[~stops[front[todo]]]
    return front


def renumbered(dictionary: Dictionary, first_id: int = 1) -> Dictionary:
    """The same units and phrases under consecutive ids from `first_id` on, in the order of the old ones.

    An unk_id that is a unit's follows its unit, another one stays. Raises `CodecError` where that becomes a unit's.
    """
    old, unk_id = dictionary.settings, dictionary.settings.unk_id
    if unk_id is not None and unk_id >= old.first_id:
        unk_id += first_id - old.first_id
    elif unk_id is not None and unk_id >= first_id:
        raise CodecError(f"unk_id {unk_id} would be a unit's: number from {unk_id + 1} on, or give another before")
    settings = replace(old, first_id=first_id, unk_id=unk_id)
    phrases = dictionary.ids != NO_ID
    ids = np.where(phrases, first_id + settings.units.size - 1 + np.cumsum(phrases), NO_ID).astype(np.uint32)
    return Dictionary.of(settings, dictionary.rows, ids, dictionary.uses, pruning=dictionary.pruning)
