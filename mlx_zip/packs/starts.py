"""Reads the packs that a request begins with, one per sequence, and makes the codebooks that begin with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.packs.pack import PackLike, as_pack
from mlx_zip.packs.tuned import TunedStart

Tuned = TunedStart | str | None  # tuned rows; their fingerprint only, after loading a saved state; or no tuned rows


def split_packs(pack: Any, batch: int) -> list[Any]:
    """Returns what each of `batch` sequences begins with, given one pack for all of them or a list of one pack each.

    The result holds for each sequence a `TunedStart`, plain entries, or None.

    A pack is the path of a pack file, a `Pack`, a `TunedStart`, a sequence of entries (each a sequence of base ids), or
    None for the model's own. Raises `ModelError` for something else and for another number of packs than sequences,
    `DataError` for a file that is no pack.
    """
    if pack is None or _is_one_pack(pack):
        return [start_of(pack)] * batch
    if len(pack) != batch:
        raise ModelError(f"there are {len(pack)} packs for {batch} sequence(s)")
    starts = {id(one): start_of(one) for one in pack}  # a pack that several sequences share is read once
    return [starts[id(one)] for one in pack]


def start_of(pack: Any) -> Any:
    """Returns a pack's entries, as a `TunedStart` if the pack has tuned rows. Entries and None are returned as given.

    Raises `DataError` for a file that is no pack.
    """
    return as_pack(pack).start if isinstance(pack, PackLike) else pack


def _is_one_pack(pack: Any) -> bool:
    """Returns whether `pack` is one pack, not a list of packs. Raises `ModelError` if it is neither."""
    if isinstance(pack, PackLike | TunedStart):
        return True
    if not isinstance(pack, Sequence | np.ndarray):
        raise ModelError(
            f"pack must be a path, a Pack, entries of base ids, or a list of one pack per sequence, "
            f"not {type(pack).__name__}"
        )
    return len(pack) == 0 or any(_is_entry(item) for item in pack)


def _is_entry(item: Any) -> bool:
    """Returns whether `item` is one entry, a sequence of base ids."""
    return isinstance(item, Sequence | np.ndarray) and len(item) > 0 and isinstance(item[0], int | np.integer)


def with_starts(params: CodecParams, starts: Sequence[Any]) -> list[CodecParams]:
    """Returns one codec per sequence: `params` with the sequence's start entries, or `params` itself for None.

    Sequences that share one start object share one codec. Raises `CodecError` naming the entry that does not fit.
    """
    made = {id(start): params if start is None else _with_start(params, start) for start in starts}
    return [made[id(start)] for start in starts]


def _with_start(params: CodecParams, start: Any) -> CodecParams:
    """Returns `params` with other start entries. Raises `CodecError`."""
    try:
        return dataclasses.replace(params, start=start)
    except TypeError as error:  # something that is not a sequence where one belongs
        raise CodecError("a pack must be a sequence of entries, each a sequence of base ids") from error


def books_of(params: CodecParams | Sequence[CodecParams], batch: int) -> list[Codebook]:
    """Returns a new codebook per sequence. params: one codec for all, or one per sequence.

    Raises `ModelError` for another number of codecs, or codecs that differ in more than their start entries.
    """
    codecs = [params] * batch if isinstance(params, CodecParams) else list(params)
    if len(codecs) != batch:
        raise ModelError(f"there are {len(codecs)} codecs for {batch} sequence(s)")
    if not all(same_but_start(codecs[0], codec) for codec in codecs):
        raise ModelError("the sequences of one cache may differ in their start entries only, not in other parameters")
    return [Codebook(codec) for codec in codecs]


def same_but_start(a: CodecParams, b: CodecParams) -> bool:
    """Returns whether two codecs are equal except for their start entries. Asked at every step, so it is quick."""
    names = ("vocab_size", "codebook_size", "merge_size", "disabled_ids", "pad_id", "policy")
    return a is b or all(getattr(a, name) == getattr(b, name) for name in names)


def checked_tuned(book: Codebook, tuned: Tuned, start: Any) -> Tuned:
    """Returns the tuned rows of a sequence, taken from `start`, the pack that the caller says it was begun with.

    book: the sequence's codebook. tuned: what is known of its tuned rows so far, returned if `start` is None. Raises
    `ModelError` if the sequence was begun with other entries or rows than `start`.
    """
    if start is None:
        return tuned
    own = book.params.start or ()
    mark, given = tuned_fingerprint(tuned), tuned_fingerprint(start)
    if own != tuple(map(tuple, start)) or mark != given:
        raise ModelError(
            f"the cache was begun with another pack ({_described(own, mark)}) than the one given "
            f"({_described(start, given)}): give the pack that it was begun with, or make a new cache"
        )
    return start if isinstance(start, TunedStart) else tuned


def tuned_fingerprint(start: Any) -> str | None:
    """Returns the fingerprint of tuned rows (given as such, or as the rows), or None for entries without tuned rows."""
    return start.fingerprint if isinstance(start, TunedStart) else start if isinstance(start, str) else None


def _described(entries: Sequence[Any], mark: str | None) -> str:
    """Returns a pack in a few words, for messages. mark: the fingerprint of its tuned rows, None without them."""
    rows = "" if mark is None else f", tuned rows {mark[:12]}"
    return f"{len(entries)} entries{rows}" if len(entries) else "no entries"
