"""Texts that evaluations give to a model, and the scores they get back. Imports neither MLX nor PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.packs.pack import Pack

LOGITS = 1 << 25  # values of one call's logits: 128 MB in float32
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # indices of a row's ids, and ids that cannot follow there


@dataclass(frozen=True)
class Compressed:
    """A text as a model reads it: ids uint32 [n], and spans int64 [n], the number of base ids that each id stands for.

    pack: pack that its codebook began with, None for the model's own. breaks: the index of each part's last id, except
    the last part's. Parts are compressed separately, so these ids do not depend on what follows them.
    """

    ids: Uint32s
    spans: NDArray[np.int64]
    pack: Pack | None = None
    breaks: tuple[int, ...] = ()

    @property
    def ends(self) -> NDArray[np.int64]:
        """For each id the number of base ids that it and all ids before it stand for, int64 [n]."""
        return np.cumsum(self.spans)


def compress_parts(params: CodecParams | None, *parts: Uint32s, pack: Pack | None = None) -> Compressed:
    """Compresses consecutive parts of a text with one codebook; no id stands for base ids of two parts.

    Each part is compressed by `Codebook.compress`: as in generation, no entry is used before an id has created it.
    params: the codec, with the entries that the codebook begins with; None for a model without hypertokens. pack: see
    `Compressed`.
    """
    if params is None:
        ids = np.concatenate(parts)
        return Compressed(ids, np.ones(len(ids), np.int64))
    book, marks = Codebook(params), []
    for part in parts:
        book.push(book.compress(part))
        marks.append(book.mark())
    breaks = tuple(mark - 1 for mark in marks[:-1] if mark)
    return Compressed(book.ids, book.logged()[1].astype(np.int64), pack, breaks)


@dataclass(frozen=True)
class Scored:
    """A model's predictions of the second to the last of a row's n ids, each given all ids before it; arrays [n - 1].

    logprobs: natural logarithm of the id's probability. greedy: whether the id was the likeliest one. hyper_mass:
    probability of all hypertokens together. likely_ids, likely_logprobs [n - 1, k]: the k likeliest ids, likeliest
    first.
    """

    logprobs: NDArray[np.float64]
    greedy: NDArray[np.bool_]
    hyper_mass: NDArray[np.float64]
    likely_ids: NDArray[np.int64]
    likely_logprobs: NDArray[np.float64]

    @staticmethod
    def joined(parts: Sequence[Scored]) -> Scored:
        """Concatenates the scores of consecutive parts of a row; at least one part."""
        return Scored(*(np.concatenate([getattr(one, field.name) for one in parts]) for field in fields(Scored)))
