"""Where drafts come from: `Lookup` in what a request has read and emitted, and the interface of all sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s, as_ids

LEAST_MATCH = 3  # base ids that a text must have in common with an earlier place
FIRST_SHARES = {LEAST_MATCH: 0.5, 5: 0.65, 9: 0.8, 17: 0.9}  # of accepted ids by length of the match, before any draft
PRIOR, MEMORY = 4, 64  # drafted ids that these shares count as much as, and ids after which older ones count half


class Source(Protocol):
    """Proposes base ids for one request. It hears of each base id that the request emits, proposed or not.

    width: ids per draft where not their costs decide, None for a number that follows what was accepted.
    """

    width: int | None

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        """Appends base ids to the text."""
        ...

    def share(self) -> float:
        """Returns the share of ids proposed now that would be accepted, each if those before it were; 0 for no ids."""
        ...

    def seconds(self) -> float:
        """Returns how long an id takes to be proposed; 0 for hardly any time."""
        ...

    def propose(self, most: int) -> Sequence[int] | Uint32s | Iterator[int]:
        """Returns up to `most` base ids that may come next; an iterator if it saves time to take fewer of them."""
        ...

    def note(self, proposed: int, accepted: int) -> None:
        """Learns from what was proposed last: it was accepted whole or ended with a refused id. Both count ids."""
        ...


class Head(Source, Protocol):
    """A source that follows the passes of the model, and proposes ids, hypertokens among them, in place of base ids."""

    def see(self, h: Any, last: int, cache: Any) -> None:
        """Notes the body's output h [1, 1, D] from which the id `last` was chosen, None if unknown.

        cache: the request's, which has not read `last`.
        """
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

    width = None

    def __init__(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text, self._acceptance, self._match = Lookup(base_ids), Acceptance(), 0

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text.append(base_ids)

    def share(self) -> float:
        match = self._text.propose(0)[1]
        return 0.0 if match < LEAST_MATCH else self._acceptance.share(match)

    def seconds(self) -> float:
        return 0.0

    def propose(self, most: int) -> Uint32s:
        base_ids, self._match = self._text.propose(most)
        return base_ids

    def note(self, proposed: int, accepted: int) -> None:
        self._acceptance.note(self._match, proposed, accepted)


class Acceptance:
    """How many of the proposed ids are accepted, by how much the text had in common with the earlier place."""

    def __init__(self) -> None:
        self._shares = {length: Share(first) for length, first in FIRST_SHARES.items()}

    def share(self, match: int) -> float:
        """Returns the share of proposed ids that are accepted after a match of so many base ids."""
        return self._shares[self._class_of(match)].value

    def note(self, match: int, proposed: int, accepted: int) -> None:
        """Learns from a draft after a match of so many base ids."""
        self._shares[self._class_of(match)].note(proposed, accepted)

    def _class_of(self, match: int) -> int:
        return max(length for length in FIRST_SHARES if length <= max(match, LEAST_MATCH))


class Share:
    """The share of proposed ids that are accepted, each if those before it were. first: before any draft."""

    def __init__(self, first: float) -> None:
        self._accepted, self._refused = first * PRIOR, (1 - first) * PRIOR  # count as much as four drafts of one id

    @property
    def value(self) -> float:
        return self._accepted / (self._accepted + self._refused)

    def note(self, proposed: int, accepted: int) -> None:
        """Learns from a draft; what came after its first refused id was never asked."""
        self._accepted += accepted
        self._refused += accepted < proposed
        if self._accepted + self._refused > MEMORY:
            self._accepted, self._refused = self._accepted / 2, self._refused / 2
