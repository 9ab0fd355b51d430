"""Two other ways to cut bytes into patches, as baselines: at blanks, and where the next byte is hard to predict.

Source: arXiv 2510.15517 §3.2, which uses published code for both. Here every patch ends with the end mark, as in
hierarchical BPE, so that one model reads all kinds; the published code has no end mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mlx_zip.vocab.hbpe import Merges
from mlx_zip.vocab.hbpe_table import PatchTable

_WORD = re.compile(rb" ?[^\s]+|\s")
LONGEST = 6  # maximum bytes of a patch, as in the paper


def space_patches(data: bytes, longest: int = LONGEST) -> list[bytes]:
    """Cuts before the blank of each word, other white space on its own; longer pieces become several patches."""
    return [piece for word in _WORD.findall(data) for piece in _pieces(word, longest)]


def entropy_patches(data: bytes, entropies: Any, threshold: float, longest: int = LONGEST) -> list[bytes]:
    """Cuts before every byte whose entropy is above `threshold`; longer pieces become several patches.

    entropies [n]: the model's entropy of each byte before it is read.
    """
    starts = np.flatnonzero(np.asarray(entropies) > threshold)
    cuts = sorted({0, *starts.tolist(), len(data)})
    return [piece for a, b in pairwise(cuts) for piece in _pieces(data[a:b], longest)]


def number(documents: Sequence[Iterable[bytes]], longest: int = LONGEST) -> tuple[list[list[int]], PatchTable]:
    """Numbers distinct patches in order of appearance -> (ids of each document, their table, which has no merges)."""
    known: dict[bytes, int] = {}
    ids = [[known.setdefault(patch, len(known)) for patch in document] for document in documents]
    return ids, PatchTable.build(Merges(longest + 1, ()), list(known))


def _pieces(data: bytes, longest: int) -> list[bytes]:
    return [data[at : at + longest] for at in range(0, len(data), longest)]
