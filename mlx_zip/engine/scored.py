"""Texts that evaluations give to a model, and the scores that the model returns. Imports neither MLX nor PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.packs.pack import Pack

LOGITS = 1 << 25  # maximum number of logits per model call: 128 MB in float32


@dataclass(frozen=True)
class Compressed:
    """A text as a model reads it: ids uint32 [n], and spans int64 [n], the number of base ids that each id stands for.

    pack: pack that the codebook began with, None for the model's own. breaks: the index of the last id of each part but
    the last. Parts are compressed separately, so the id at a break does not depend on the next part.
    """

    ids: Uint32s
    spans: NDArray[np.int64]
    pack: Pack | None = None
    breaks: tuple[int, ...] = ()

    @property
    def ends(self) -> NDArray[np.int64]:
        """For each id the number of base ids up to the end of that id, int64 [n]."""
        return np.cumsum(self.spans)


def compress_parts(params: CodecParams | None, *parts: Uint32s, pack: Pack | None = None) -> Compressed:
    """Compresses consecutive parts of a text with one codebook. No id stands for base ids of two parts.

    As in generation, no entry is used before an id has created that entry (`Codebook.compress`). params: the codec,
    with the entries that the codebook begins with; None for a model without hypertokens. pack: see `Compressed`.
    """
    if params is None:
        ids = np.concatenate(parts)
        return Compressed(ids, np.ones(len(ids), np.int64))
    book, marks = Codebook(params), []
    for part in parts:
        book.push(book.compress(part))
        marks.append(book.mark())
    breaks = tuple(mark - 1 for mark in marks[:-1] if mark)
    return Compressed(book.ids, book.logged_base_ids()[1].astype(np.int64), pack, breaks)


@dataclass(frozen=True)
class Scored:
    """A model's predictions for a row of n ids: arrays [n - 1], for each id but the first, given all earlier ids.

    logprobs: natural log-probability of the id. greedy: whether the id was the likeliest one. hyper_mass: probability
    of all hypertokens together. likely_ids, likely_logprobs [n - 1, k]: the k likeliest ids, likeliest first.
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
