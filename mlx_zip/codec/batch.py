"""Pads rows of different lengths to one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.errors import CodecError


def left_pad_batch(
    rows: Sequence[Any], pad_id: int, length: int | None = None, truncate: bool = False
) -> tuple[Uint32s, NDArray[np.int32]]:
    """Left-pads B rows of ids to `length` (default: the longest row) -> ids uint32 [B, L], padding int32 [B].

    padding[b] is the number of pad ids added to row b. A pad id that is part of a row does not count as padding, unlike
    in zip2zip-compression 0.3.4. truncate: cut rows longer than `length` at their end; False: raise `CodecError`.
    """
    arrays = [as_ids(row) for row in rows]
    if length is None:
        length = max(map(len, arrays), default=0)
    out = np.full((len(arrays), length), pad_id, np.uint32)
    padding = np.zeros(len(arrays), np.int32)
    for i, array in enumerate(arrays):
        if len(array) > length and not truncate:
            raise CodecError(f"row {i} has {len(array)} ids, more than {length}: shorten it or pass truncate=True")
        padding[i] = max(0, length - len(array))
        out[i, padding[i] :] = array[:length]
    return out, padding
