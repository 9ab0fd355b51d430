"""`SessionList`: the sessions of a store in the order of their last use, found by name or by the ids of a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator

from mlx_zip.engine.interface import Differing
from mlx_zip.engine.prefix_index import PrefixIndex
from mlx_zip.engine.session_answers import Answers
from mlx_zip.engine.sessions.kept import Ids, Kept

SHOWN = 12  # base ids on either side of a difference
MOST_TRIED = 4  # sessions with the same common prefix; they differ by the border of one id at most


class SessionList:
    """Sessions, the last used last. reach: how many base tokens an id can have. answers: what was noted with them."""

    def __init__(self, reach: int) -> None:
        self._reach = reach
        self._sessions: dict[str, Kept] = {}
        self._indexes: dict[str, PrefixIndex] = {}  # by pack key
        self.answers = Answers()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._sessions.values())

    def last_used_first(self) -> Iterator[Kept]:
        """Yields the sessions, the last used first."""
        return reversed(self._sessions.values())

    def get(self, name: str) -> Kept | None:
        """Returns the session of this name, None if there is none."""
        return self._sessions.get(name)

    def add(self, kept: Kept) -> None:
        """Adds a session as the last used."""
        self._sessions[kept.name] = kept
        self._indexes.setdefault(kept.pack_key, PrefixIndex()).add(kept.name, kept.base_ids)
        self.answers.add(kept.name, kept.answers)

    def remove(self, kept: Kept) -> None:
        """Removes a session."""
        del self._sessions[kept.name]
        self._indexes[kept.pack_key].remove(kept.name, kept.base_ids)
        self.answers.remove(kept.name, kept.answers)

    def touch(self, kept: Kept) -> None:
        """Notes that a session is used now."""
        kept.used = time.time()
        self._sessions[kept.name] = self._sessions.pop(kept.name)

    def equal(self, kept: Kept) -> Kept | None:
        """Returns a session that holds the same base ids as this one, None if there is none."""
        index = self._indexes.get(kept.pack_key)
        whole = [] if index is None else index.find(kept.base_ids).whole
        return next((self._sessions[name] for name, length in whole if length == len(kept.base_ids)), None)

    def best(self, wanted: Ids, pack_key: str) -> tuple[Kept, int] | None:
        """Returns the session with the longest prefix that can be used of `wanted`, and how many ids that prefix has.

        Of equally good ones a session that `wanted` begins with comes first. None if no session has a whole id of it.
        """
        best: tuple[Kept, int] | None = None
        for kept, ids in self._candidates(wanted, pack_key):
            if ids and (best is None or kept.ends[ids - 1] > best[0].ends[best[1] - 1]):
                best = kept, ids
        return best

    def differing(self, wanted: Ids, pack_key: str) -> Differing | None:
        """Returns where `wanted` first differs from the session with the longest common prefix; see `Differing`."""
        index = self._indexes.get(pack_key)
        found = None if index is None else index.find(wanted)
        if found is None or not 0 < found.depth < len(wanted) or not len(found.next):
            return None
        now = wanted[found.depth : found.depth + SHOWN]
        return Differing(found.depth, tuple(found.next[:SHOWN].tolist()), tuple(now.tolist()))

    def _candidates(self, wanted: Ids, pack_key: str) -> Iterator[tuple[Kept, int]]:
        """Yields sessions that begin as `wanted` does, each with how many of its ids can be used."""
        index = self._indexes.get(pack_key)
        if index is None:
            return
        found = index.find(wanted)
        for name, _ in found.whole:
            kept = self._sessions[name]
            if kept.can_be_read:
                yield kept, len(kept.ends)
                break
        tried = 0
        for name in index.names_below(found):
            kept = self._sessions[name]
            if kept.trims and kept.can_be_read and len(kept.base_ids) > found.depth:
                yield kept, kept.border(found.depth, self._reach)
                if (tried := tried + 1) == MOST_TRIED:
                    return
