"""`Lookup`: finds an earlier occurrence of a text's last ids, and the ids that followed it (`native/lookup.h`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s, as_ids


class Lookup:
    """Prompt lookup: proposes the base ids that followed the last earlier occurrence of the text's last ids.

    The text is all that a request has read and emitted, in base ids: its prompt with the earlier turns, and its answer.
    """

    def __init__(self, base_ids: Sequence[int] | Uint32s = ()) -> None:
        made = lib.mlxzip_lookup_new()
        if made == ffi.NULL:
            raise MemoryError("no memory for an index of the text")
        self._index = ffi.gc(made, lib.mlxzip_lookup_free)
        self.append(base_ids)

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        """Appends base ids to the text. Raises `MemoryError`."""
        ids = as_ids(base_ids)
        if lib.mlxzip_lookup_append(self._index, ffi.from_buffer("uint32_t[]", ids), len(ids)):
            raise MemoryError("no memory for an index of the text")

    def match(self) -> int:
        """Returns how many of the text's last base ids also precede the proposed ids, at most 32; 0 if none do."""
        return int(lib.mlxzip_lookup_propose(self._index, ffi.NULL, 0))

    def propose(self, most: int) -> tuple[Uint32s, int]:
        """Returns `most` base ids that may come next (none if nothing matches), and the length that `match` returns."""
        out = np.empty(most, np.uint32)
        match = lib.mlxzip_lookup_propose(self._index, ffi.from_buffer("uint32_t[]", out), most)
        return (out if match else out[:0]), int(match)
