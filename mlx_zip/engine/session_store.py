"""`SessionStore`: keeps the caches of ended requests, so that a later request reads only what is new in its prompt.

Sessions are found by the base ids that a prompt begins with, not by a name that a client would have to send: a chat
that goes on, an edited message and a branch all find what they have in common with a kept session. Use a store in one
thread, the engine's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.engine.interface import SessionInfo
from mlx_zip.engine.prefix_index import PrefixIndex
from mlx_zip.engine.session_answers import Answers, answers_within
from mlx_zip.engine.session_caches import bytes_of, can_trim, forked, held_ids, settled
from mlx_zip.errors import EngineError

MOST_TRIED = 4  # sessions with the same common prefix; they differ by the border of one id at most
Ids = NDArray[np.uint32]


@dataclass(frozen=True)
class SessionOptions:
    """Bounds of a store. max_bytes: of all sessions in memory."""

    max_bytes: int = 4 << 30


@dataclass(frozen=True)
class Checkout:
    """A cache to go on with. ids, base_tokens: what it holds. name: to be given to `put` or `release` at the end.

    random_state: the sampler's random state that the session was put with, None if there was none or if the cache holds
    less than that session did.
    """

    cache: list[Any]
    ids: int
    base_tokens: int
    name: str
    random_state: Any = None


@dataclass
class Kept:
    """A session. base_ids: all that it holds. ends: for each of its ids, how many base tokens it and those before it
    have. trims: whether its cache can be trimmed. used: seconds since 1970.
    """

    name: str
    pack_key: str
    base_ids: Ids
    ends: Ids
    cache: list[Any]
    trims: bool
    bytes: int
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    random_state: Any = None
    used: float = field(default_factory=time.time)

    def border(self, base_tokens: int) -> int:
        """Returns how many of the session's ids lie wholly within its first `base_tokens` base tokens."""
        return int(np.searchsorted(self.ends, base_tokens, side="right"))


class SessionStore:
    """The kept sessions of one model, the last used last."""

    def __init__(self, model: Any, tokenizer: Any, options: SessionOptions | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.options = SessionOptions() if options is None else options
        self._kept: dict[str, Kept] = {}
        self._indexes: dict[str, PrefixIndex] = {}  # by pack key
        self._lent: dict[str, dict[str, tuple[int, ...]]] = {}  # answers of the sessions that are checked out, by name
        self._answers = Answers()

    # ---- a request

    def checkout(self, base_ids: Sequence[int], pack_key: str, share: bool = False) -> Checkout | None:
        """Returns the cache of the session that has most in common with a prompt, or None if none has anything.

        The common prefix ends where an id of the session ends, and leaves at least one base id of the prompt to be
        read. pack_key: only sessions that were put with the same key are looked at. A session that the prompt begins
        with is taken out, for its longer successor to be put back under its name. Otherwise, and always with `share`,
        the session stays, and a copy gets a new name.
        """
        wanted = np.asarray(base_ids, dtype=np.uint32)[:-1]
        found = self._best(wanted, pack_key)
        if found is None:
            return None
        kept, ids = found
        self._touch(kept)
        base_tokens, whole = int(kept.ends[ids - 1]), ids == len(kept.ends)
        if whole and not share:
            self._remove(kept)
            self._lend(kept.name, kept.answers)
            return Checkout(kept.cache, ids, base_tokens, kept.name, kept.random_state)
        name = _new_name()
        self._lend(name, answers_within(kept.answers, kept.base_ids[:base_tokens]))
        cache = forked(kept.cache, ids, len(kept.ends) - ids)
        return Checkout(cache, ids, base_tokens, name, kept.random_state if whole else None)

    def put(
        self,
        cache: list[Any],
        *,
        pack_key: str,
        name: str | None = None,
        answers: Mapping[str, Sequence[int]] | None = None,
        base_ids: Sequence[int] | None = None,
        random_state: Any = None,
    ) -> str:
        """Keeps a cache and returns the session's name. The cache must not be used by the caller any more.

        name: of the checkout that the cache came from, None for a new session. A kept session of that name is replaced
        if the cache continues it, and a session with exactly these base ids is replaced too. answers: as
        `note_answer` takes them, in addition to those of the session checked out. base_ids: what the cache holds, for a
        plain model, whose cache does not say. Raises `EngineError` if base_ids are missing or too few.
        """
        held, ends = _held(cache, base_ids)
        noted = {**self.release(name or ""), **{key: tuple(ids) for key, ids in (answers or {}).items()}}
        if not len(held):
            return name or _new_name()
        name = self._name_for(held, pack_key, name, noted)
        cache = settled(cache)
        kept = Kept(name, pack_key, held, ends, cache, can_trim(cache), bytes_of(cache), noted, random_state)
        self._add(kept)
        self._make_room()
        return name

    def release(self, name: str) -> dict[str, tuple[int, ...]]:
        """Forgets that a session is checked out and returns its answers. For a cache that will not be put back."""
        answers = self._lent.pop(name, {})
        self._answers.remove(name, answers)
        return answers

    def _lend(self, name: str, answers: dict[str, tuple[int, ...]]) -> None:
        """Notes that a session is checked out under a name; its answers can still be looked up."""
        self._lent[name] = answers
        self._answers.add(name, answers)

    def note_answer(self, name: str, key: str, base_ids: Sequence[int]) -> None:
        """Remembers, with a session, that the answer called `key` was these base ids. Unknown sessions are ignored:
        a session may have been evicted meanwhile.
        """
        answer = tuple(map(int, base_ids))
        answers = self._lent.get(name)
        if answers is None and (kept := self._kept.get(name)) is not None:
            answers = kept.answers
        if answers is not None:
            answers[key] = answer
            self._answers.add(name, {key: answer})

    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns the noted answers of all kept sessions, by key. The map follows the store, and any thread may read
        it.
        """
        return self._answers

    # ---- the sessions

    def sessions(self) -> list[SessionInfo]:
        """Returns the kept sessions, the last used first."""
        return [_info(kept) for kept in reversed(self._kept.values())]

    def drop(self, name: str) -> None:
        """Forgets a session. Raises `EngineError` for an unknown name."""
        self._remove(self._named(name))

    def purge(self) -> int:
        """Forgets all sessions and returns how many there were."""
        count = len(self._kept)
        for kept in list(self._kept.values()):
            self._remove(kept)
        for name in list(self._lent):
            self.release(name)
        return count

    def figures(self) -> dict[str, int]:
        """Returns how many sessions there are and their bytes, as fields of `Figures`."""
        return {"sessions": len(self._kept), "session_bytes": self._bytes(), "disk_bytes": 0}

    # ---- finding

    def _best(self, wanted: Ids, pack_key: str) -> tuple[Kept, int] | None:
        """Returns the session with the longest prefix that can be used of `wanted`, and how many ids that prefix has.

        Of equally good ones a session that `wanted` begins with comes first. None if no session has a whole id of it.
        """
        best: tuple[Kept, int] | None = None
        for kept, ids in self._candidates(wanted, pack_key):
            if ids and (best is None or kept.ends[ids - 1] > best[0].ends[best[1] - 1]):
                best = kept, ids
        return best

    def _candidates(self, wanted: Ids, pack_key: str) -> Iterator[tuple[Kept, int]]:
        """Yields sessions that begin as `wanted` does, each with how many of its ids can be used."""
        index = self._indexes.get(pack_key)
        if index is None:
            return
        found = index.find(wanted)
        if found.whole:
            kept = self._kept[found.whole[0][0]]
            yield kept, len(kept.ends)
        tried = 0
        for name in index.names_below(found):
            kept = self._kept[name]
            if kept.trims and len(kept.base_ids) > found.depth:
                yield kept, kept.border(found.depth)
                if (tried := tried + 1) == MOST_TRIED:
                    return

    def _named(self, name: str) -> Kept:
        """Returns a kept session. Raises `EngineError` for an unknown name."""
        kept = self._kept.get(name)
        if kept is None:
            raise EngineError(f"there is no session {name!r:.80}; it may have been evicted")
        return kept

    # ---- keeping

    def _name_for(self, held: Ids, pack_key: str, name: str | None, noted: dict[str, tuple[int, ...]]) -> str:
        """Returns the name to keep base ids under, and forgets the session that they replace, whose answers go to
        `noted`.
        """
        former = self._kept.get(name or "")
        if former is not None and not (former.pack_key == pack_key and _begins(held, former.base_ids)):
            former, name = None, None
        if former is None and (index := self._indexes.get(pack_key)) is not None:
            equal = [other for other, length in index.find(held).whole if length == len(held)]
            former = self._kept[equal[0]] if equal else None
        if former is None:
            return name or _new_name()
        self._remove(former)
        noted |= {key: ids for key, ids in former.answers.items() if key not in noted}
        return former.name

    def _add(self, kept: Kept) -> None:
        """Adds a session as the last used."""
        self._kept[kept.name] = kept
        self._indexes.setdefault(kept.pack_key, PrefixIndex()).add(kept.name, kept.base_ids)
        self._answers.add(kept.name, kept.answers)

    def _remove(self, kept: Kept) -> None:
        """Forgets a session."""
        del self._kept[kept.name]
        self._indexes[kept.pack_key].remove(kept.name, kept.base_ids)
        self._answers.remove(kept.name, kept.answers)

    def _touch(self, kept: Kept) -> None:
        """Notes that a session is used now."""
        kept.used = time.time()
        self._kept[kept.name] = self._kept.pop(kept.name)

    def _bytes(self) -> int:
        """Returns the bytes of all sessions in memory."""
        return sum(kept.bytes for kept in self._kept.values())

    def _make_room(self) -> None:
        """Evicts the least recently used sessions until the others fit."""
        excess = self._bytes() - self.options.max_bytes
        for kept in list(self._kept.values()):
            if excess <= 0:
                return
            excess -= kept.bytes
            self._remove(kept)


def _held(cache: Sequence[Any], base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
    """Returns a cache's base ids, and how many base tokens each of its ids and those before it have.

    base_ids: for a plain model's cache. Raises `EngineError` if they do not cover what the cache holds.
    """
    held = held_ids(cache)
    if held is not None:
        return held
    ids = np.asarray(() if base_ids is None else base_ids, dtype=np.uint32)
    for entry in cache:
        if getattr(entry, "offset", len(ids)) != len(ids):
            raise EngineError(f"the cache holds {entry.offset} ids, and {len(ids)} base ids were given for it")
    return ids, np.arange(1, 1 + len(ids), dtype=np.uint32)


def _begins(ids: Ids, prefix: Ids) -> bool:
    """Returns whether ids begin with a prefix."""
    return len(ids) >= len(prefix) and np.array_equal(ids[: len(prefix)], prefix)


def _new_name() -> str:
    """Returns a name that no other session has, in this process or another."""
    return secrets.token_hex(8)


def _info(kept: Kept) -> SessionInfo:
    """Returns what a front may know of a session."""
    return SessionInfo(kept.name, len(kept.base_ids), len(kept.ends), kept.bytes, False, kept.used)
