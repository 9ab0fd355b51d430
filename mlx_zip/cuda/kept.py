"""`KeptSnapshots`: keeps snapshots of ended requests in memory, for later requests that begin with the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mlx_zip.cuda.seats import Seat, Seats
from mlx_zip.engine.interface import SessionInfo
from mlx_zip.engine.kept_session import Kept, new_name
from mlx_zip.engine.session_answers import Noted, answers_within
from mlx_zip.engine.session_list import SessionList
from mlx_zip.engine.session_options import Checkout
from mlx_zip.errors import EngineError

NO_FILES = "this engine (--engine cuda) keeps sessions in memory only; --engine mlx can write them to files"


class KeptSnapshots:
    """The kept sessions of one model, at most `max_bytes` of them. reach: how many base tokens an id can have.

    A snapshot never changes, so a request takes a copy of it onto the device and the session stays; a longer session
    replaces the one that it continues.
    """

    def __init__(self, seats: Seats, reach: int, max_bytes: int) -> None:
        self._seats, self._max_bytes = seats, max_bytes
        self._list = SessionList(reach)
        self._bytes = 0
        self._lent: dict[str, Noted] = {}  # answers of sessions that began with a part of another one, by name

    # ---- a request

    def checkout(self, base_ids: Sequence[int], pack_key: str, share: bool = False) -> Checkout | None:
        """Returns what the session that has most in common with a prompt holds of it, None if none has anything.

        At least one base id of the prompt is left to be read. pack_key: only sessions put with this key are looked at.
        share: whether the session must not be continued by this request.
        """
        wanted = np.asarray(base_ids, np.uint32)[:-1]
        found = self._list.best(wanted, pack_key)
        if found is None:
            return None
        kept, ids = found
        self._list.touch(kept)
        base_tokens, whole = int(kept.ends[ids - 1]), ids == len(kept.ends)
        seat: Any = self._seats.restore(kept.cache, ids)  # type: ignore[arg-type]
        if whole and not share:
            return Checkout(seat, ids, base_tokens, kept.name, kept.random_state)
        name = new_name()
        self._lent[name] = answers_within(kept.answers, kept.base_ids[:base_tokens])
        return Checkout(seat, ids, base_tokens, name)

    def put(
        self,
        cache: Seat,
        *,
        pack_key: str,
        name: str | None = None,
        answers: Mapping[str, Sequence[int]] | None = None,
        base_ids: Any = None,
        random_state: Any = None,
    ) -> str:
        """Keeps what a request's seat holds, and returns the session's name.

        name: of the checkout that the request went on from. answers: as `note_answer` takes them.
        """
        snapshot, book = self._seats.keep(cache), cache.book
        noted = {**self._lent.pop(name or "", {}), **{key: tuple(ids) for key, ids in (answers or {}).items()}}
        ends = np.cumsum(book.logged()[1], dtype=np.uint32)
        kept = Kept(name or new_name(), pack_key, book.base_ids(0), ends, snapshot, True, snapshot.nbytes, noted)  # type: ignore[arg-type]
        kept.random_state = random_state
        self._keep(kept)
        return kept.name

    def _keep(self, kept: Kept) -> None:
        """Adds a session in place of the one that it continues or equals, and drops others if there is no room."""
        former = self._list.get(kept.name)
        if former is not None and not former.begins(kept):
            former, kept.name = None, new_name()
        former = former or self._list.equal(kept)
        if former is not None:
            self._remove(former)
            kept.name, kept.answers = former.name, {**former.answers, **kept.answers}
        self._list.add(kept)
        self._bytes += kept.bytes
        for oldest in list(self._list):
            if self._bytes <= self._max_bytes:
                return
            self._remove(oldest)

    def _remove(self, kept: Kept) -> None:
        """Forgets a session."""
        self._list.remove(kept)
        self._bytes -= kept.bytes

    def release(self, name: str) -> None:
        """Forgets that a request went on from a part of a session; its cache will not be put."""
        self._lent.pop(name, None)

    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns the noted answers of all sessions, by key. The map follows the store; any thread may read it."""
        return self._list.answers

    def note_answer(self, name: str, key: str, base_ids: Sequence[int]) -> None:
        """Remembers, with a session, that the answer called `key` was these base ids. Ignores unknown sessions."""
        kept = self._list.get(name)
        if kept is not None:
            kept.answers[key] = tuple(map(int, base_ids))
            self._list.answers.add(name, {key: kept.answers[key]})

    # ---- the sessions

    def sessions(self) -> list[SessionInfo]:
        """Returns the kept sessions, the last used first."""
        return [kept.info() for kept in self._list.last_used_first()]

    def save(self, name: str, file: Path) -> NoReturn:
        """Raises `EngineError`: there are no files."""
        raise EngineError(f"session {name!r:.80} cannot be saved: {NO_FILES}")

    def load(self, file: Path) -> NoReturn:
        """Raises `EngineError`: there are no files."""
        raise EngineError(f"{file} cannot be loaded: {NO_FILES}")

    def drop(self, name: str) -> None:
        """Forgets a session. Raises `EngineError` for an unknown name."""
        kept = self._list.get(name)
        if kept is None:
            raise EngineError(f"there is no session {name!r:.80}; it may have been evicted")
        self._remove(kept)

    def purge(self) -> int:
        """Forgets all sessions and returns how many there were."""
        every = list(self._list)
        for kept in every:
            self._remove(kept)
        return len(every)

    def tend(self) -> bool:
        """Returns False: there is nothing to write."""
        return False

    def close(self) -> None:
        """Does nothing: there is nothing to write."""

    def figures(self) -> dict[str, int]:
        """Returns how many sessions there are and their bytes, as fields of `Figures`."""
        return {"sessions": len(self._list), "session_bytes": self._bytes, "disk_bytes": 0}
