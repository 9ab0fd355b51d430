"""MultiTok's post-processing: removes phrases that training used rarely, and rewrites samples without them.

Source: arXiv 2410.21548, section III. The modes, `PRUNINGS`, for phrases used at most K times:

    published    as in the published code: phrases used 1..K times are replaced by their units; unused phrases are kept
    single       like published, but unused phrases are removed too
    parent       a removed phrase is replaced by the longest kept phrase that it begins with, and then by units
    reencode     the samples are encoded again with the kept phrases, longest match; gives the fewest ids
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import CodecError
from mlx_zip.vocab.multitok.dictionary import Dictionary
from mlx_zip.vocab.multitok.units import NO_ID, Pruning, Samples


def prune(dictionary: Dictionary, at_most: int = 1, mode: str = "reencode") -> Dictionary:
    """Returns the dictionary without the phrases that training used at most `at_most` times. The result cannot learn.

    Ids do not change; see `renumber_ids`. A removed phrase stays in the table without an id as long as a kept phrase
    begins with it. Raises `CodecError` if an argument is invalid.
    """
    pruning = Pruning(at_most, mode)
    n_units, rows, uses, ids = dictionary.settings.units.size, dictionary.rows, dictionary.uses, dictionary.ids
    used = uses[n_units:]
    kept = (ids != NO_ID) & ((used > at_most) | ((used == 0) & (mode == "published")))
    stays = _mark_kept_or_prefix(rows[:, 0], n_units, kept)
    place = np.concatenate([np.arange(n_units), n_units - 1 + np.cumsum(stays)])  # new number of each kept node
    left = np.stack([place[rows[stays, 0]], rows[stays, 1]], axis=1).astype(np.uint32)
    left_ids = np.where(kept, ids, np.uint32(NO_ID))[stays]
    left_uses = np.concatenate([uses[:n_units], np.where(kept, used, 0)[stays]]).astype(np.uint32)
    return Dictionary.from_arrays(dictionary.settings, left, left_ids, left_uses, pruning=pruning)


def _mark_kept_or_prefix(up: Uint32s, n_units: int, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns, for each of n runs, whether the run is kept or is a prefix of a kept run: bool [n].

    up: prefix of each run, numbered as in `Dictionary.rows`. kept: whether each run is kept, bool [n].
    """
    stays, new = kept.copy(), np.flatnonzero(kept)
    while len(new):
        above = up[new]
        new = np.unique(above[above >= n_units] - n_units)
        new = new[~stays[new]]
        stays[new] = True
    return stays


def rewrite_ids(dictionary: Dictionary, pruned: Dictionary, ids: Samples) -> Samples:
    """Returns samples of ids of `dictionary` as ids of `pruned`. To rewrite several times, use a `Rewriter`."""
    return Rewriter(dictionary, pruned)(ids)


class Rewriter:
    """Rewrites samples that `dictionary` encoded to the ids of `pruned = prune(dictionary, ...)`.

    Raises `CodecError` if `dictionary` is pruned or `pruned` is not. Calls raise `CodecError` if an id is unknown.
    """

    def __init__(self, dictionary: Dictionary, pruned: Dictionary) -> None:
        if pruned.pruning is None or dictionary.given_ids is not None:
            raise CodecError("samples are rewritten from an unpruned dictionary to a pruned one")
        self.dictionary, self.pruned, self.mode = dictionary, pruned, pruned.pruning.mode
        self._lengths = dictionary.lengths.astype(np.int64)
        self._front = _replacement_nodes(dictionary, pruned, self.mode == "parent")

    def __call__(self, ids: Samples) -> Samples:
        """Returns the samples with removed phrases replaced according to the pruning mode."""
        units = self.dictionary.expand_all(ids)
        if self.mode == "reencode":
            return self.pruned.encode_all(units)
        first = self.dictionary.settings.first_id
        nodes = np.maximum(ids.ids.astype(np.int64) - first, 0)  # an unk_id below first_id is one unit, like unit 0
        front = self._front[nodes]  # by token: the node that replaces its beginning; units replace the rest
        spans, kept = self._lengths[nodes], self._lengths[front]  # units of each token, and of its node in `front`
        place = np.arange(len(units.ids)) - np.repeat(np.cumsum(spans) - spans, spans)  # of units in their runs
        out = units.ids + np.uint32(first)
        out[place == 0] = np.where(front == nodes, ids.ids, (front + first).astype(np.uint32))
        stays = (place == 0) | (place >= np.repeat(kept, spans))
        ends = np.concatenate([[0], np.cumsum(1 + spans - kept)])[ids.ends.astype(np.int64)]
        return Samples(out[stays], ends.astype(np.uint64))


def _replacement_nodes(dictionary: Dictionary, pruned: Dictionary, phrases: bool) -> NDArray[np.int64]:
    """Returns the node that replaces the beginning of each node when it is rewritten: int64 [units + runs].

    A kept node replaces itself. A removed phrase is replaced by its longest kept prefix if `phrases` is True, else by
    its first unit. Nodes are numbered as in `Dictionary.rows`.
    """
    n_units, up = dictionary.settings.units.size, dictionary.rows[:, 0].astype(np.int64)
    left = np.isin(dictionary.ids, pruned.ids)  # kept phrases; `dictionary` has no NO_ID
    front = np.arange(n_units + len(up))
    stops = np.concatenate([np.ones(n_units, bool), left if phrases else np.zeros(len(left), bool)])
    todo = n_units + np.flatnonzero(~left)  # nodes whose replacement is still to be shortened
    while len(todo):
        front[todo] = up[front[todo] - n_units]
        todo = todo[~stops[front[todo]]]
    return front


def renumber_ids(dictionary: Dictionary, first_id: int = 1) -> Dictionary:
    """Returns the dictionary with consecutive ids from `first_id` on, in the order of the old ids.

    An unk_id that is a unit's id moves with its unit; any other unk_id stays. Raises `CodecError` if an unk_id that
    stays would become the id of a unit.
    """
    old, unk_id = dictionary.settings, dictionary.settings.unk_id
    if unk_id is not None and unk_id >= old.first_id:
        unk_id += first_id - old.first_id
    elif unk_id is not None and unk_id >= first_id:
        raise CodecError(f"unk_id {unk_id} would be a unit's: number from {unk_id + 1} on, or give another before")
    settings = replace(old, first_id=first_id, unk_id=unk_id)
    phrases = dictionary.ids != NO_ID
    ids = np.where(phrases, first_id + settings.units.size - 1 + np.cumsum(phrases), NO_ID).astype(np.uint32)
    return Dictionary.from_arrays(settings, dictionary.rows, ids, dictionary.uses, pruning=dictionary.pruning)
