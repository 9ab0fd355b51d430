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

from mlx_zip.vocab.hbpe.merges import Merges
from mlx_zip.vocab.hbpe.table import PatchTable

_WORD = re.compile(rb" ?[^\s]+|\s")
LONGEST = 6  # maximum bytes of a patch, as in the paper


def space_patches(data: bytes, longest: int = LONGEST) -> list[bytes]:
    """Cuts bytes into patches: each word with the blank before it, and each other white-space byte.

    A word of more than `longest` bytes becomes several patches. Joined, the patches are `data`.
    """
    return [piece for word in _WORD.findall(data) for piece in _parts(word, longest)]


def entropy_patches(data: bytes, entropies: Any, threshold: float, longest: int = LONGEST) -> list[bytes]:
    """Cuts n bytes into patches, before every byte whose entropy is above `threshold`.

    entropies [n]: a model's entropy of each byte, from the bytes before it. A stretch of more than `longest` bytes
    becomes several patches. Joined, the patches are `data`.
    """
    starts = np.flatnonzero(np.asarray(entropies) > threshold)
    cuts = sorted({0, *starts.tolist(), len(data)})
    return [piece for a, b in pairwise(cuts) for piece in _parts(data[a:b], longest)]


def number(documents: Sequence[Iterable[bytes]], longest: int = LONGEST) -> tuple[list[list[int]], PatchTable]:
    """Gives distinct patches ids in order of appearance -> (ids of each document, table of the patches).

    documents: the patches of each document, of at most `longest` bytes. The table has no merges.
    """
    known: dict[bytes, int] = {}
    ids = [[known.setdefault(patch, len(known)) for patch in document] for document in documents]
    return ids, PatchTable.build(Merges(longest + 1, ()), list(known))


def _parts(data: bytes, longest: int) -> list[bytes]:
    """Cuts bytes into parts of `longest` bytes; the last part may be shorter."""
    return [data[at : at + longest] for at in range(0, len(data), longest)]
