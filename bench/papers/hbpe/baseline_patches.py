"""Patches over bytes, as baselines: cut at blanks, or where the next byte is hard to predict.

Source: arXiv 2510.15517 §3.2, which uses published code for both kinds. Here every patch ends with the end mark, so
that one model can read patches of every kind; the published code has no end mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.models.patches.patch_model import PlainModel
from mlx_zip.vocab.hbpe.patch_merges import Merges
from mlx_zip.vocab.hbpe.patch_table import PatchTable

_WORD = re.compile(rb" ?[^\s]+|\s")
_LONGEST = 6  # maximum bytes of a patch, as in the paper
_WINDOWS_PER_CALL = 16  # windows per model call


def space_patches(data: bytes) -> list[bytes]:
    """Cuts bytes into patches: each word with the blank before it, and each other white-space byte.

    A word of more than `_LONGEST` bytes becomes several patches. Joined, the patches are `data`.
    """
    return [piece for word in _WORD.findall(data) for piece in _cut_long_patch(word)]


def entropy_patches(data: bytes, entropies: Any, threshold: float) -> list[bytes]:
    """Cuts n bytes into patches, before every byte whose entropy is above `threshold`.

    entropies [n]: entropy of a model's prediction of each byte from the preceding bytes. A stretch of more than
    `_LONGEST` bytes becomes several patches. Joined, the patches are `data`.
    """
    starts = np.flatnonzero(np.asarray(entropies) > threshold)
    cuts = sorted({0, *starts.tolist(), len(data)})
    return [piece for a, b in pairwise(cuts) for piece in _cut_long_patch(data[a:b])]


def byte_entropies(model: PlainModel, data: bytes, window: int) -> NDArray[np.float32]:
    """Returns the entropy, in nats, of a byte model's prediction of each byte, float32 [len(data)].

    window: number of bytes that the model reads at a time; predictions do not use the bytes before the window.
    """
    filled = np.frombuffer(data + bytes(-len(data) % window), np.uint8).reshape(-1, window).astype(np.int32)
    out = []
    for at in range(0, len(filled), _WINDOWS_PER_CALL):
        logits = model(mx.array(filled[at : at + _WINDOWS_PER_CALL]))
        logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        out.append(np.array(-(mx.exp(logs) * logs).sum(axis=-1)).reshape(-1))
    return np.concatenate(out)[: len(data)] if out else np.zeros(0, np.float32)


def number_patches(documents: Sequence[Iterable[bytes]], longest: int = _LONGEST) -> tuple[list[list[int]], PatchTable]:
    """Numbers distinct patches in order of appearance; returns (ids of each document, table of the patches).

    documents: the patches of each document, each of at most `longest` bytes. The table has no merges.
    """
    known: dict[bytes, int] = {}
    ids = [[known.setdefault(patch, len(known)) for patch in document] for document in documents]
    return ids, PatchTable.build(Merges(longest + 1, ()), list(known))


def _cut_long_patch(data: bytes) -> list[bytes]:
    return [data[at : at + _LONGEST] for at in range(0, len(data), _LONGEST)]
