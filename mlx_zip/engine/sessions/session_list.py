"""`SessionList`: the sessions of a store in the order of their last use, found by name or by the ids of a prompt.

`PrefixIndex` keeps the base ids of many sessions in a tree, to find the sessions that begin as a prompt does. An edge
of the tree holds ids that all sequences below it share, so a search compares each id of the prompt at most once, for
any number of sessions. `AnswersByKey` has the noted answers of all sessions as one map.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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

    def __len__(self) -> int:
        return len(self._sessions)

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

    def find_equal(self, session: Session) -> Session | None:
        """Returns a session in the list that has the pack and the base ids of `session`, None if there is none."""
        index = self._indexes.get(session.pack_key)
        whole = [] if index is None else index.find(session.base_ids).whole
        return next((self._sessions[name] for name, length in whole if length == len(session.base_ids)), None)

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
        index = self._indexes.get(pack_key)
        found = None if index is None else index.find(wanted)
        if found is None or not 0 < found.depth < len(wanted) or not len(found.next):
            return None
        now = wanted[found.depth : found.depth + _DIFFERENCE_IDS]
        return Differing(found.depth, tuple(found.next[:_DIFFERENCE_IDS].tolist()), tuple(now.tolist()))

    def _sessions_with_prefix(self, wanted: Ids, pack_key: str) -> Iterator[tuple[Session, int]]:
        """Yields sessions that begin as `wanted` does, each with the number of its ids that can be reused."""
        index = self._indexes.get(pack_key)
        if index is None:
            return
        found = index.find(wanted)
        for name, _ in found.whole:
            session = self._sessions[name]
            if session.can_be_read:
                yield session, len(session.ends)
                break
        tried = 0
        for name in found.names():
            session = self._sessions[name]
            if session.is_trimmable and session.can_be_read and len(session.base_ids) > found.depth:
                yield session, session.count_reusable_ids(found.depth, self._merge_size)
                if (tried := tried + 1) == _MOST_CANDIDATES:
                    return


@dataclass(slots=True)
class _TreeNode:
    """A node of the tree. ids: ids on the edge that leads to this node. names: names of the sequences that end at this
    node. children: child nodes by the first id on their edges.
    """

    ids: Ids
    names: dict[str, None] = field(default_factory=dict)
    children: dict[int, _TreeNode] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The result of searching for a prompt. depth: length of the longest common prefix of the prompt and any sequence.
    whole: (name, length) of each sequence with which the prompt begins, the longest first. below: a node under which
    all sequences begin with the first `depth` ids of the prompt. next: the next ids of one of these sequences, up to
    the end of an edge; empty if they all end after `depth` ids.
    """

    depth: int
    whole: list[tuple[str, int]]
    below: _TreeNode
    next: Ids

    def names(self) -> Iterator[str]:
        """Yields the names of all sequences that begin with the first `depth` ids of the prompt."""
        nodes = [self.below]
        while nodes:
            node = nodes.pop()
            yield from node.names
            nodes += node.children.values()


class PrefixIndex:
    """Named sequences of base ids."""

    def __init__(self) -> None:
        self._root = _TreeNode(np.empty(0, np.uint32))

    def add(self, name: str, ids: Ids) -> None:
        """Adds a sequence, ids [n] uint32. Several sequences may have the same ids."""
        node, at = self._root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                child = node.children[int(ids[at])] = _TreeNode(ids[at:].copy())
            elif (shared := common_prefix_length(child.ids, ids[at:])) < len(child.ids):
                child = node.children[int(ids[at])] = _split_edge(child, shared)
            node, at = child, at + len(child.ids)
        node.names[name] = None

    def remove(self, name: str, ids: Ids) -> None:
        """Removes a sequence that was added with these ids. Raises `KeyError` if no such sequence was added."""
        path, at = [self._root], 0
        while at < len(ids):
            path.append(path[-1].children[int(ids[at])])
            at += len(path[-1].ids)
        del path[-1].names[name]
        while len(path) > 1 and not path[-1].names and not path[-1].children:
            gone = path.pop()
            del path[-1].children[int(gone.ids[0])]
        if len(path) > 1:
            _join_with_only_child(path[-1])

    def find(self, ids: Ids) -> PrefixMatch:
        """Finds the longest common prefix of a prompt, ids [n] uint32, and any sequence in the index."""
        node, at, whole, rest = self._root, 0, list[tuple[str, int]](), self._root.ids
        while True:
            whole += [(name, at) for name in node.names]
            child = node.children.get(int(ids[at])) if at < len(ids) else None
            if child is None:
                rest = next((one.ids for one in node.children.values()), rest)
                break
            shared = common_prefix_length(child.ids, ids[at:])
            node, at = child, at + shared
            if shared < len(child.ids):
                rest = child.ids[shared:]
                break
        return PrefixMatch(at, whole[::-1], node, rest)


def _split_edge(node: _TreeNode, at: int) -> _TreeNode:
    """Moves the first `at` ids of a node's edge to a new node above it, and returns the new node."""
    upper = _TreeNode(node.ids[:at].copy(), {}, {int(node.ids[at]): node})
    node.ids = node.ids[at:].copy()
    return upper


def _join_with_only_child(node: _TreeNode) -> None:
    if node.names or len(node.children) != 1:
        return
    (child,) = node.children.values()
    node.ids = np.concatenate([node.ids, child.ids])
    node.names, node.children = child.names, child.children


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
