"""Other ways to cut bytes into patches, to compare with: at blanks, and where the next byte is hard to foresee.

Source: arXiv 2510.15517 §3.2, which takes both from others' code. Ours end every patch with the mark, like those of
hierarchical BPE, so that one model reads all of them; theirs have none.
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
LONGEST = 6  # bytes of a patch at most, as in the paper


def space_patches(data: bytes, longest: int = LONGEST) -> list[bytes]:
    """Words with the blank before them, other white space by itself; what is longer falls into several patches."""
    return [piece for word in _WORD.findall(data) for piece in _pieces(word, longest)]


def entropy_patches(data: bytes, entropies: Any, threshold: float, longest: int = LONGEST) -> list[bytes]:
    """A patch begins where the entropy of the byte to come is above `threshold`; entropies [n]: one per byte, before
    it is read. What is longer than `longest` falls into several patches.
    """
    starts = np.flatnonzero(np.asarray(entropies) > threshold)
    cuts = sorted({0, *starts.tolist(), len(data)})
    return [piece for a, b in pairwise(cuts) for piece in _pieces(data[a:b], longest)]


def number(documents: Sequence[Iterable[bytes]], longest: int = LONGEST) -> tuple[list[list[int]], PatchTable]:
    """Patches of bytes to ids in the order of their coming, and the table of them: bytes and the mark, no merges."""
    known: dict[bytes, int] = {}
    ids = [[known.setdefault(patch, len(known)) for patch in document] for document in documents]
    return ids, PatchTable.build(Merges(longest + 1, ()), list(known))


def _pieces(data: bytes, longest: int) -> list[bytes]:
    return [data[at : at + longest] for at in range(0, len(data), longest)]
