"""Starting codebooks of a request: one per sequence, checked against its codec, and those that bring tuned rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.vocab.tuned import TunedStart

Tuned = TunedStart | str | None  # rows at hand, those that are to be given again, none


def split_start(start: Sequence[Any] | None, batch: int) -> list[Any]:
    """One starting codebook per sequence, from one codebook for all or a list of one per sequence.

    A codebook is a sequence of entries, an entry a sequence of base ids; None stands for the model's own. Raises
    `ModelError` for another number of codebooks than sequences.
    """
    if start is None:
        return [None] * batch
    if len(start) == 0 or any(_is_entry(item) for item in start):
        return [start] * batch
    if len(start) != batch:
        raise ModelError(f"there are {len(start)} starting codebooks for {batch} sequence(s)")
    return list(start)


def _is_entry(item: Any) -> bool:
    return isinstance(item, Sequence | np.ndarray) and len(item) > 0 and isinstance(item[0], int | np.integer)


def with_starts(params: CodecParams, starts: Sequence[Any]) -> list[CodecParams]:
    """One codec per sequence, shared where the codebook is; None keeps the codec's own start entries.

    Raises `CodecError` naming the entry that does not fit.
    """
    made = {id(start): params if start is None else _with_start(params, start) for start in starts}
    return [made[id(start)] for start in starts]


def _with_start(params: CodecParams, start: Any) -> CodecParams:
    try:
        return dataclasses.replace(params, start=start)
    except TypeError as error:  # something that is no sequence where one belongs
        raise CodecError("a starting codebook must be a sequence of entries, each a sequence of base ids") from error


def books_of(params: CodecParams | Sequence[CodecParams], batch: int) -> list[Codebook]:
    """One fresh codebook per sequence. Raises `ModelError` when codecs and sequences do not fit together."""
    codecs = [params] * batch if isinstance(params, CodecParams) else list(params)
    if len(codecs) != batch:
        raise ModelError(f"there are {len(codecs)} codecs (starting codebooks) for {batch} sequence(s)")
    if not all(same_but_start(codecs[0], codec) for codec in codecs):
        raise ModelError("the sequences of one cache may differ in their start entries only, not in other parameters")
    return [Codebook(codec) for codec in codecs]


def same_but_start(a: CodecParams, b: CodecParams) -> bool:
    """Cheap, for it is asked at every step."""
    names = ("vocab_size", "codebook_size", "merge_size", "disabled_ids", "pad_id", "policy")
    return a is b or all(getattr(a, name) == getattr(b, name) for name in names)


def checked_tuned(book: Codebook, tuned: Tuned, start: Any) -> Tuned:
    """The tuned rows of a sequence that was begun with `start`, as is now said; None says nothing.

    Raises `ModelError` where it was begun with another starting codebook.
    """
    if start is None:
        return tuned
    own = book.params.start or ()
    mark, given = _mark(tuned), _mark(start)
    if own != tuple(map(tuple, start)) or mark != given:
        raise ModelError(
            f"the cache was begun with another starting codebook ({_told(own, mark)}) than is given "
            f"({_told(start, given)}): give that one, or make a new cache"
        )
    return start if isinstance(start, TunedStart) else tuned


def _mark(start: Any) -> str | None:
    """The fingerprint of a codebook with tuned rows."""
    return start.fingerprint if isinstance(start, TunedStart) else start if isinstance(start, str) else None


def _told(entries: Sequence[Any], mark: str | None) -> str:
    rows = "" if mark is None else f", tuned rows {mark[:12]}"
    return f"{len(entries)} entries{rows}" if len(entries) else "none"
