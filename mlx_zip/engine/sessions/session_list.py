"""`SessionList`: the sessions of a store in the order of their last use, found by name or by the ids of a prompt.

`PrefixIndex` keeps the base ids of many sessions in order, to find the sessions that begin as a prompt does.
`AnswersByKey` has the noted answers of all sessions as one map.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from mlx_zip.codec.ids import common_prefix_length
from mlx_zip.engine.interface import Differing
from mlx_zip.engine.sessions.session import AnswerIds, Ids, Session

_DIFFERENCE_IDS = 12  # maximum number of base ids in `Differing.kept` and in `Differing.now`
_MOST_CANDIDATES = 4  # sessions with one common prefix that are tried; the ids that they save differ by one at most


class SessionList:
    """Sessions, the most recently used last. merge_size: maximum base tokens of an id. answers: all noted answers."""

    def __init__(self, merge_size: int) -> None:
        self._merge_size = merge_size
        self._sessions: dict[str, Session] = {}
        self._indexes: dict[str, PrefixIndex] = {}  # by pack key
        self.answers = AnswersByKey()

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def last_used_first(self) -> Iterator[Session]:
        """Yields the sessions, the most recently used first."""
        return reversed(self._sessions.values())

    def get(self, name: str) -> Session | None:
        """Returns the session of this name, None if there is none."""
        return self._sessions.get(name)

    def add(self, session: Session) -> None:
        """Adds a session as the most recently used one."""
        self._sessions[session.name] = session
        self._indexes.setdefault(session.pack_key, PrefixIndex()).add(session.name, session.base_ids)
        self.answers.add(session.name, session.answers)

    def remove(self, session: Session) -> None:
        del self._sessions[session.name]
        self._indexes[session.pack_key].remove(session.name, session.base_ids)
        self.answers.remove(session.name, session.answers)

    def mark_used(self, session: Session) -> None:
        """Makes a session the most recently used one."""
        session.used = time.time()
        self._sessions[session.name] = self._sessions.pop(session.name)

    def _index(self, pack_key: str) -> PrefixIndex:
        return self._indexes.get(pack_key) or PrefixIndex()

    def find_equal(self, session: Session) -> Session | None:
        """Returns a session in the list that has the pack and the base ids of `session`, None if there is none."""
        found = self._index(session.pack_key).beginning_with(session.base_ids)  # equal sequences come first
        return next((self._sessions[name] for name, ids in islice(found, 1) if len(ids) == len(session.base_ids)), None)

    def find_longest_prefix(self, wanted: Ids, pack_key: str) -> tuple[Session, int] | None:
        """Returns the session that can be reused for the longest prefix of `wanted`, and how many of its ids fit.

        If several sessions can be reused equally far, a session that can be reused whole comes first. Returns None if
        no session has an id that can be reused.
        """
        best: tuple[Session, int] | None = None
        for session, ids in self._sessions_with_prefix(wanted, pack_key):
            if ids and (best is None or session.ends[ids - 1] > best[0].ends[best[1] - 1]):
                best = session, ids
        return best

    def find_difference(self, wanted: Ids, pack_key: str) -> Differing | None:
        """Returns where `wanted` first differs from the session with the longest common prefix, None if nowhere."""
        index = self._index(pack_key)
        at = index.common_prefix_length(wanted)
        longer = (ids for _, ids in index.beginning_with(wanted[:at]) if len(ids) > at)
        if not 0 < at < len(wanted) or (kept := next(longer, None)) is None:
            return None
        shown = slice(at, at + _DIFFERENCE_IDS)
        return Differing(at, tuple(kept[shown].tolist()), tuple(wanted[shown].tolist()))

    def _sessions_with_prefix(self, wanted: Ids, pack_key: str) -> Iterator[tuple[Session, int]]:
        """Yields sessions that begin as `wanted` does, each with the number of its ids that can be reused."""
        index = self._index(pack_key)
        for name, _ in index.prefixes_of(wanted):
            session = self._sessions[name]
            if session.can_be_read:
                yield session, len(session.ends)
                break
        depth = index.common_prefix_length(wanted)
        sessions = (self._sessions[name] for name, ids in index.beginning_with(wanted[:depth]) if len(ids) > depth)
        usable = (session for session in sessions if session.is_trimmable and session.can_be_read)
        for session in islice(usable, _MOST_CANDIDATES):
            yield session, session.count_reusable_ids(depth, self._merge_size)


class PrefixIndex:
    """Named sequences of base ids, in lexicographic order.

    A sequence that has the longest common prefix with a prompt is next to the prompt's place in this order.
    """

    def __init__(self) -> None:
        self._sequences: list[tuple[bytes, str, Ids]] = []  # (sort key, name, ids)

    def add(self, name: str, ids: Ids) -> None:
        """Adds a sequence, ids [n] uint32, which must not change. Several sequences may have the same ids."""
        key = _sort_key(ids)
        self._sequences.insert(self._place(key), (key, name, ids))

    def remove(self, name: str, ids: Ids) -> None:
        """Removes a sequence that was added with these ids. Raises `KeyError` if no such sequence was added."""
        key = _sort_key(ids)
        for at in range(self._place(key), len(self._sequences)):
            if self._sequences[at][:2] == (key, name):
                del self._sequences[at]
                return
        raise KeyError(name)

    def common_prefix_length(self, ids: Ids) -> int:
        """Returns the length of the longest common prefix of ids [n] uint32 and any sequence."""
        at = self._place(_sort_key(ids))
        neighbours = self._sequences[max(0, at - 1) : at + 1]
        return max((common_prefix_length(held, ids) for _, _, held in neighbours), default=0)

    def beginning_with(self, ids: Ids) -> Iterator[tuple[str, Ids]]:
        """Yields the name and the ids of each sequence that begins with ids [n] uint32. Equal sequences come first."""
        wanted = _sort_key(ids)
        for key, name, held in islice(self._sequences, self._place(wanted), None):
            if not key.startswith(wanted):
                return
            yield name, held

    def prefixes_of(self, ids: Ids) -> Iterator[tuple[str, Ids]]:
        """Yields the name and the ids of each sequence with which ids [n] uint32 begin, the longest first."""
        whole = _sort_key(ids)
        for key, name, held in reversed(self._sequences):  # all of them: most differ in their first bytes
            if whole.startswith(key):
                yield name, held

    def _place(self, key: bytes) -> int:
        return bisect_left(self._sequences, key, key=itemgetter(0))


def _sort_key(ids: Ids) -> bytes:
    return ids.astype(">u4").tobytes()  # big-endian bytes have the order of the numbers


class AnswersByKey(Mapping[str, Sequence[int]]):
    """A map from answers' keys to base ids. If several sessions have noted a key, the base ids noted last count.

    Only one thread may change the map. Other threads may look up keys meanwhile, because values are replaced whole.
    """

    def __init__(self) -> None:
        self._noted: dict[
            str, tuple[tuple[str, tuple[int, ...]], ...]
        ] = {}  # key -> (session, base ids), last noted last

    def add(self, session: str, answers: AnswerIds) -> None:
        """Notes a session's answers."""
        for key, base_ids in answers.items():
            self._noted[key] = (*self._notes_of_others(session, key), (session, base_ids))

    def remove(self, session: str, answers: AnswerIds) -> None:
        """Forgets a session's answers."""
        for key in answers:
            self._noted[key] = self._notes_of_others(session, key)
            if not self._noted[key]:
                del self._noted[key]

    def _notes_of_others(self, session: str, key: str) -> tuple[Any, ...]:
        return tuple(one for one in self._noted.get(key, ()) if one[0] != session)

    def __getitem__(self, key: str) -> Sequence[int]:
        noted = self._noted.get(key)
        if not noted:
            raise KeyError(key)
        return noted[-1][1]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._noted))

    def __len__(self) -> int:
        return len(self._noted)
