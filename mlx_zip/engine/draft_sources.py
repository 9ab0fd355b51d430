"""Where drafts come from: `Lookup` in what a request has read and emitted, and the interface of all sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s, as_ids

LEAST_MATCH = 3  # base ids that a text must have in common with an earlier place
FIRST_SHARES = {LEAST_MATCH: 0.5, 5: 0.65, 9: 0.8, 17: 0.9}  # of accepted ids by length of the match, before any draft
PRIOR, MEMORY = 4, 64  # drafted ids that these shares count as much as, and ids after which older ones count half


class Source(Protocol):
    """Proposes base ids for one request. It hears of each base id that the request emits, proposed or not."""

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        """Appends base ids to the text."""
        ...

    def share(self) -> float:
        """Returns the share of ids proposed now that would be accepted, each if those before it were; 0 for no ids."""
        ...

    def propose(self, most: int) -> Sequence[int] | Uint32s:
        """Returns up to `most` base ids that may come next."""
        ...

    def note(self, proposed: int, accepted: int) -> None:
        """Learns from what was proposed last: it was accepted whole or ended with a refused id. Both count ids."""
        ...


class Lookup:
    """Proposes what followed the last time that the text ended as it does now (prompt lookup).

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

    def propose(self, most: int) -> tuple[Uint32s, int]:
        """Returns base ids that may come next, `most` or none, and how many base ids the text has in common there."""
        out = np.empty(most, np.uint32)
        match = lib.mlxzip_lookup_propose(self._index, ffi.from_buffer("uint32_t[]", out), most)
        return (out if match else out[:0]), int(match)


class LookupSource:
    """Prompt lookup as a source. base_ids: what the request has so far."""

    def __init__(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text, self._acceptance, self._match = Lookup(base_ids), Acceptance(), 0
        self._match_now: int | None = None  # of the text as it ends now, once it was asked for

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text.append(base_ids)
        self._match_now = None

    def share(self) -> float:
        if self._match_now is None:
            self._match_now = self._text.propose(0)[1]
        return 0.0 if self._match_now < LEAST_MATCH else self._acceptance.share(self._match_now)

    def propose(self, most: int) -> Uint32s:
        base_ids, self._match = self._text.propose(most)
        return base_ids

    def note(self, proposed: int, accepted: int) -> None:
        self._acceptance.note(self._match, proposed, accepted)


class Acceptance:
    """How many of the proposed ids are accepted, by how much the text had in common with the earlier place."""

    def __init__(self) -> None:
        # accepted and refused ids per class of matches; the first numbers count as much as four drafts of one id
        self._counts = {length: [share * PRIOR, (1 - share) * PRIOR] for length, share in FIRST_SHARES.items()}

    def share(self, match: int) -> float:
        """Returns the share of proposed ids that are accepted after a match of so many base ids."""
        accepted, refused = self._counts[self._class_of(match)]
        return accepted / (accepted + refused)

    def note(self, match: int, proposed: int, accepted: int) -> None:
        """Notes a draft; what came after its first refused id was never asked."""
        counts = self._counts[self._class_of(match)]
        counts[0] += accepted
        counts[1] += accepted < proposed
        if sum(counts) > MEMORY:
            counts[:] = [count / 2 for count in counts]

    def _class_of(self, match: int) -> int:
        return max(length for length in FIRST_SHARES if length <= max(match, LEAST_MATCH))
