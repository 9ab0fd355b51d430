"""The packs that a request begins with: one per sequence, with tuned rows or without, checked against the codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.vocab.packs import PackLike, as_pack
from mlx_zip.vocab.tuned import TunedStart

Tuned = TunedStart | str | None  # rows that are here, the fingerprint of rows to be given again, no tuned rows


def split_packs(pack: Any, batch: int) -> list[Any]:
    """The start entries of each of B sequences, from one pack for all of them or from a list of B packs.

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
    """A pack's start entries, with their rows if they are tuned; entries and None as they are. Raises `DataError`."""
    return as_pack(pack).start if isinstance(pack, PackLike) else pack


def _is_one_pack(pack: Any) -> bool:
    """Whether `pack` is one pack, not a list of packs. Raises `ModelError` for what is neither."""
    if isinstance(pack, PackLike | TunedStart):
        return True
    if not isinstance(pack, Sequence | np.ndarray):
        raise ModelError(
            f"pack must be a path, a Pack, entries of base ids, or a list of one pack per sequence, "
            f"not {type(pack).__name__}"
        )
    return len(pack) == 0 or any(_is_entry(item) for item in pack)


def _is_entry(item: Any) -> bool:
    return isinstance(item, Sequence | np.ndarray) and len(item) > 0 and isinstance(item[0], int | np.integer)


def with_starts(params: CodecParams, starts: Sequence[Any]) -> list[CodecParams]:
    """One codec per sequence, the same object for the same start; None keeps the codec's own start entries.

    Raises `CodecError` naming the entry that does not fit.
    """
    made = {id(start): params if start is None else _with_start(params, start) for start in starts}
    return [made[id(start)] for start in starts]


def _with_start(params: CodecParams, start: Any) -> CodecParams:
    try:
        return dataclasses.replace(params, start=start)
    except TypeError as error:  # something that is not a sequence where one belongs
        raise CodecError("a pack must be a sequence of entries, each a sequence of base ids") from error


def books_of(params: CodecParams | Sequence[CodecParams], batch: int) -> list[Codebook]:
    """One fresh codebook per sequence. Raises `ModelError` when codecs and sequences do not fit together."""
    codecs = [params] * batch if isinstance(params, CodecParams) else list(params)
    if len(codecs) != batch:
        raise ModelError(f"there are {len(codecs)} codecs for {batch} sequence(s)")
    if not all(same_but_start(codecs[0], codec) for codec in codecs):
        raise ModelError("the sequences of one cache may differ in their start entries only, not in other parameters")
    return [Codebook(codec) for codec in codecs]


def same_but_start(a: CodecParams, b: CodecParams) -> bool:
    """Whether two codecs differ in their start entries at most. Asked at every step, so it must be quick."""
    names = ("vocab_size", "codebook_size", "merge_size", "disabled_ids", "pad_id", "policy")
    return a is b or all(getattr(a, name) == getattr(b, name) for name in names)


def checked_tuned(book: Codebook, tuned: Tuned, start: Any) -> Tuned:
    """The tuned rows of a sequence that the caller says was begun with `start`; None leaves `tuned` as it is.

    Raises `ModelError` if the sequence was begun with other entries or rows.
    """
    if start is None:
        return tuned
    own = book.params.start or ()
    mark, given = _mark(tuned), _mark(start)
    if own != tuple(map(tuple, start)) or mark != given:
        raise ModelError(
            f"the cache was begun with another pack ({_described(own, mark)}) than the one given "
            f"({_described(start, given)}): give the pack that it was begun with, or make a new cache"
        )
    return start if isinstance(start, TunedStart) else tuned


def _mark(start: Any) -> str | None:
    """The fingerprint of a pack with tuned rows, None for one without."""
    return start.fingerprint if isinstance(start, TunedStart) else start if isinstance(start, str) else None


def _described(entries: Sequence[Any], mark: str | None) -> str:
    """The pack in a few words, for messages."""
    rows = "" if mark is None else f", tuned rows {mark[:12]}"
    return f"{len(entries)} entries{rows}" if len(entries) else "no entries"
