"""Windows of a tiny text, for tests of bits per byte."""

import numpy as np

from mlx_zip.evaluation.bits import ScoredWindow, Windows
from support import tiny

BOS = 1


def windows(*lengths, seed=0):
    """Windows of tiny ids, each with as many bytes as ids."""
    rows = [np.array(tiny.base_ids(n, seed + i), np.uint32) for i, n in enumerate(lengths)]
    return Windows(tuple(ScoredWindow(row, np.ones(len(row), bool), len(row)) for row in rows), BOS, 0)
