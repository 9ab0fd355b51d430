"""`PrefixIndex`: finds, among many kept sequences of base ids, those that begin as a prompt does.

The sequences are kept in a tree. An edge of the tree holds the ids that all sequences below it share, so a search
compares each id of the prompt once at most, however many sequences there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]


@dataclass(slots=True)
class _Node:
    """A place in the tree. ids: what the edge that leads here holds. names: sequences that end here. children: by the
    first id of their edges.
    """

    ids: Ids
    names: dict[str, None] = field(default_factory=dict)
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found. depth: length of the longest common prefix with any sequence. whole: sequences that the
    prompt begins with, the longest first, each with its length. below: a node under which all sequences have the first
    `depth` ids of the prompt; see `PrefixIndex.names_below`. next: what one of them goes on with, as far as an edge of
    the tree holds it; empty if all end there.
    """

    depth: int
    whole: list[tuple[str, int]]
    below: Any
    next: Ids


class PrefixIndex:
    """Named sequences of base ids. compared: number of edges that all searches have compared with a prompt."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.uint32))
        self.compared = 0

    def add(self, name: str, ids: Ids) -> None:
        """Adds a sequence, ids [n] uint32. Several sequences may have the same ids."""
        node, at = self._root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                child = node.children[int(ids[at])] = _Node(ids[at:].copy())
            elif (shared := _shared(child.ids, ids[at:])) < len(child.ids):
                child = node.children[int(ids[at])] = _split(child, shared)
            node, at = child, at + len(child.ids)
        node.names[name] = None

    def remove(self, name: str, ids: Ids) -> None:
        """Removes a sequence that was added with these ids. Raises `KeyError` if there is none."""
        path, at = [self._root], 0
        while at < len(ids):
            path.append(path[-1].children[int(ids[at])])
            at += len(path[-1].ids)
        del path[-1].names[name]
        while len(path) > 1 and not path[-1].names and not path[-1].children:
            gone = path.pop()
            del path[-1].children[int(gone.ids[0])]
        if len(path) > 1:
            _join(path[-1])

    def find(self, ids: Ids) -> Found:
        """Returns the longest common prefix of `ids` [n] uint32 with any sequence, and where it was found."""
        node, at, whole, rest = self._root, 0, list[tuple[str, int]](), self._root.ids
        while True:
            whole += [(name, at) for name in node.names]
            child = node.children.get(int(ids[at])) if at < len(ids) else None
            if child is None:
                rest = next((one.ids for one in node.children.values()), rest)
                break
            self.compared += 1
            shared = _shared(child.ids, ids[at:])
            node, at = child, at + shared
            if shared < len(child.ids):
                rest = child.ids[shared:]
                break
        return Found(at, whole[::-1], node, rest)

    @staticmethod
    def names_below(found: Found) -> Iterator[str]:
        """Yields the names of all sequences that have the first `found.depth` ids of the prompt."""
        nodes = [found.below]
        while nodes:
            node = nodes.pop()
            yield from node.names
            nodes += node.children.values()


def _shared(some: Ids, others: Ids) -> int:
    """Returns how many ids two sequences have in common at their beginning."""
    n = min(len(some), len(others))
    differ = some[:n] != others[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n


def _split(node: _Node, at: int) -> _Node:
    """Returns a new node before `node`, which takes the first `at` ids of its edge."""
    upper = _Node(node.ids[:at].copy(), {}, {int(node.ids[at]): node})
    node.ids = node.ids[at:].copy()
    return upper


def _join(node: _Node) -> None:
    """Joins a node with its only child, if no sequence ends at the node."""
    if node.names or len(node.children) != 1:
        return
    (child,) = node.children.values()
    node.ids = np.concatenate([node.ids, child.ids])
    node.names, node.children = child.names, child.children
