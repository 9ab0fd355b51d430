"""`SessionStore`: keeps the caches of ended requests, so that a later request reads only what is new in its prompt.

Sessions are found by the base ids that a prompt begins with, not by a name that a client would have to send: a chat
that goes on, an edited message and a branch all find what they have in common with a kept session. Use a store in one
thread, the engine's.

A session that the prompt continues is moved, which costs nothing; the longer one replaces it. Any other one is copied:
an edited message or a second branch gets a copy that is trimmed to the common prefix, and shares memory until it is
written to. The copy ends `merge_size` base tokens before the texts part, because which id stands at a place is chosen
by what follows. What follows gets the ids of the whole text compressed at once (`compress_next`), so an answer does not
depend on the beginnings that other requests have left. With `keep=False` a request gets a copy and leaves no session. A
purge holds for requests under way: their sessions are not kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mlx_zip.engine.interface import Differing, SessionInfo
from mlx_zip.engine.sessions.files import SessionBytes, read_session
from mlx_zip.engine.sessions.folder import SessionFolder
from mlx_zip.engine.sessions.kept import Caches, Kept, Noted, Slot, answers_within, new_name, stamp_of
from mlx_zip.engine.sessions.list import SessionList
from mlx_zip.errors import EngineError, UnknownSessionError, failure_reason

log = logging.getLogger("mlx_zip")


@dataclass(frozen=True)
class SessionOptions:
    """Bounds of a store. max_bytes: of all sessions in memory. folder: where sessions are kept on disk too, None for
    nowhere. max_disk_bytes: of all sessions of this model in the folder. model_name: as the model was asked for, None
    if unknown; tokenizer_config: how its tokenizer was loaded. Both are noted in the files, for `mlx_zip generate`.
    share: name of the part of the model that is here, "" for a whole model; files of another part are not read.
    """

    max_bytes: int = 4 << 30
    folder: Path | None = None
    max_disk_bytes: int = 16 << 30
    model_name: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    share: str = ""

    @property
    def about(self) -> dict[str, str]:
        """What files say of the model, beside its fingerprint."""
        named = {} if self.model_name is None else {"model": self.model_name}
        return {"tokenizer_config": json.dumps(dict(self.tokenizer_config)), **named}


@dataclass(frozen=True)
class Checkout:
    """A cache to go on with. ids, base_tokens: what it holds. name: to be given to `put` or `release` at the end.

    random_state: the sampler's random state that the session was put with; None if there was none, or if the session
    stays, because its copies must not all draw the same numbers.
    """

    cache: Any
    ids: int
    base_tokens: int
    name: str
    random_state: Any = None


class SessionStore:
    """The kept sessions of one model. At the end call `close`, which writes what is not on disk yet."""

    def __init__(self, caches: Caches, options: SessionOptions) -> None:
        self.caches, self.options = caches, options
        self._list = SessionList(caches.reach)
        self._room = _Room(caches, self._list, options)
        self._lent: dict[str, Kept] = {}  # what is checked out, by name

    # ---- a request

    def checkout(
        self, base_ids: Sequence[int], pack_key: str, share: bool = False, start: Any = None
    ) -> Checkout | None:
        """Returns the cache of the session that has most in common with a prompt, or None if none has anything.

        The common prefix ends where an id of the session ends, and leaves at least one base id of the prompt to be
        read. pack_key: only sessions that were put with the same key are looked at; "" for the model's own pack.

        A session that the prompt begins with is taken out, for its longer successor to be put back under its name.
        Otherwise, and always with `share`, the session stays, and a copy gets a new name.

        start: what the request's codebook begins with, None for the model's own; a session from disk knows only a
        fingerprint of rows that were tuned for it. Raises `ModelError` if the session began with something else.
        """
        self._room.pump()
        wanted = np.asarray(base_ids, dtype=np.uint32)[:-1]
        while (found := self._list.best(wanted, pack_key or self.caches.own_pack)) is not None:
            if self._room.is_in_memory(found[0]):
                return self._checked_out(*found, share, start)
        return None

    def differing(self, base_ids: Sequence[int], pack_key: str) -> Differing | None:
        """Returns where a prompt first differs from the session that has most in common with it.

        None if the prompt begins with all of that session, or no session begins as the prompt does. pack_key: as in
        `checkout`, to be called before it.
        """
        wanted = np.asarray(base_ids, dtype=np.uint32)
        return self._list.differing(wanted, pack_key or self.caches.own_pack)

    def _checked_out(self, kept: Kept, ids: int, share: bool, start: Any) -> Checkout:
        """Returns the first `ids` ids of a session for a request, or as many of them as it has room for."""
        self._list.touch(kept)
        ids = self.caches.room(ids)
        base_tokens, alone = int(kept.ends[ids - 1]), ids == len(kept.ends) and not share
        cache = self.caches.lent(kept, ids, alone, start)
        if alone:
            first = kept.name not in self._lent  # else another request has it, and this copy came from disk
            self._take_out(kept)
            return Checkout(cache, ids, base_tokens, kept.name, kept.random_state if first else None)
        answers = answers_within(kept.answers, kept.base_ids[:base_tokens])
        name = self._lend(Kept(new_name(), "", kept.base_ids[:0], kept.ends[:0], None, False, 0, answers))
        self._room.make_room()  # the session may have come from disk
        return Checkout(cache, ids, base_tokens, name)

    def _take_out(self, kept: Kept) -> None:
        """Lets go of the cache of a session, of which only what is on disk stays."""
        self._room.leave(kept)
        self._room.free(kept)
        self._lend(kept)

    def put(
        self,
        cache: Any,
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
        plain model, whose cache does not say. random_state: the sampler's. Raises `EngineError` if base_ids
        are missing or too few.
        """
        held, ends = self.caches.held(cache, base_ids)
        former = self._lent.get(name or "")
        noted = {**self.release(name or ""), **{key: tuple(ids) for key, ids in (answers or {}).items()}}
        if not len(held):
            return name or new_name()
        cache = self.caches.kept(cache)
        size, trims = self.caches.size(cache)
        kept = Kept(name or new_name(), pack_key or self.caches.own_pack, held, ends, cache, trims, size, noted)
        kept.random_state, kept.slot = random_state, former and former.slot
        self._keep(kept)
        return kept.name

    def release(self, name: str) -> Noted:
        """Forgets that a session is checked out and returns its answers. For a cache that will not be put back."""
        lent = self._lent.pop(name, None)
        if lent is None:
            return {}
        if self._list.get(name) is not lent:  # it is not on disk either
            self._list.answers.remove(name, lent.answers)
        return lent.answers

    def _lend(self, kept: Kept) -> str:
        """Notes that a session is checked out, and returns its name; its answers can still be looked up."""
        self._lent[kept.name] = kept
        self._list.answers.add(kept.name, kept.answers)
        return kept.name

    def note_answer(self, name: str, key: str, base_ids: Sequence[int]) -> None:
        """Remembers, with a session, that the answer called `key` was these base ids. Unknown sessions are ignored:
        a session may have been evicted meanwhile.
        """
        kept = self._lent.get(name) or self._list.get(name)
        if kept is None:
            return
        kept.answers[key] = tuple(map(int, base_ids))
        kept.notes += 1
        self._list.answers.add(name, {key: kept.answers[key]})
        if kept.saved and kept.cache is not None:
            self._room.want(kept)

    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns the noted answers of all kept sessions, by key. The map follows the store, and any thread may read
        it.
        """
        return self._list.answers

    # ---- the sessions

    def sessions(self) -> list[SessionInfo]:
        """Returns the kept sessions, the last used first. One that a request has is among them if it is on disk."""
        self._room.pump()
        return [kept.info() for kept in self._list.last_used_first() if kept.can_be_read]

    def save(self, name: str, file: Path) -> None:
        """Writes a session to a file. Raises `EngineError` for an unknown name and if the file cannot be written."""
        kept = self._named(name)
        if not self._room.is_in_memory(kept):
            raise EngineError(f"the file of session {name} cannot be read any more")
        try:
            SessionBytes(kept, self.caches, self.options.about).write(file, kept.answers)
        except OSError as error:
            raise EngineError(f"session file {file}: cannot be written: {failure_reason(error)}") from error
        self._room.make_room()

    def load(self, file: Path) -> SessionInfo:
        """Adds the session in a file and returns what it is. The file is not changed.

        Raises `EngineError` naming the file if it is damaged, of another model, or larger than all sessions may be.
        """
        kept = read_session(file, self.caches, self.options.max_bytes)
        kept.name = new_name()
        self._keep(kept)
        return kept.info()

    def drop(self, name: str) -> None:
        """Forgets a session, in memory and on disk. Raises `EngineError` for an unknown name."""
        self._room.forget(self._named(name))

    def purge(self) -> int:
        """Forgets all sessions, in memory and on disk, and returns how many there were.

        Raises `EngineError` if files cannot be deleted; all else is forgotten then.
        """
        self._room.pump()
        count, errors = sum(kept.can_be_read for kept in self._list), list[EngineError]()
        lent = list(self._lent.items())
        for name, _ in lent:
            self.release(name)
        for kept in [*(one for name, one in lent if self._list.get(name) is not one), *self._list]:
            try:
                self._room.forget(kept)
            except EngineError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return count

    def figures(self) -> dict[str, int]:
        """Returns how many sessions there are and their bytes, as fields of `Figures`."""
        return self._room.figures()

    def tend(self) -> bool:
        """Goes on with writing; returns whether to call again soon, because something is not on disk yet."""
        return self._room.tend()

    def flush(self) -> None:
        """Waits until all sessions are on disk, as far as they fit."""
        self._room.flush()

    def close(self) -> None:
        """Writes what is not on disk yet."""
        self._room.close()

    # ---- keeping

    def _keep(self, kept: Kept) -> None:
        """Adds a session in place of the one that it continues, or equals, and has it written."""
        former = self._list.get(kept.name)
        if former is not None and not former.begins(kept):
            former, kept.name, kept.slot = None, new_name(), None
        former = former or self._list.equal(kept)
        if former is not None:
            self._list.remove(former)
            self._room.leave(former)
            kept.name, kept.slot = former.name, former.slot
            kept.answers = {**former.answers, **kept.answers}
        self._list.add(kept)
        self._room.want(kept)
        self._room.make_room()

    def _named(self, name: str) -> Kept:
        """Returns a kept session. Raises `EngineError` for an unknown name."""
        kept = self._list.get(name)
        if kept is None or not kept.can_be_read:
            raise UnknownSessionError(
                f"there is no session {name!r:.80}; it may have been evicted, or a request has it"
            )
        return kept


class _Room:
    """The room that the sessions of one model have, in memory and in a folder.

    sessions: those of the store; what is evicted is removed from it.
    """

    def __init__(self, caches: Caches, sessions: SessionList, options: SessionOptions) -> None:
        self.caches, self.sessions, self.options = caches, sessions, options
        self._folder: SessionFolder | None = None
        if options.folder is not None:
            self._folder = SessionFolder(options.folder, options.max_disk_bytes, caches, options.about)
            for kept in self._folder.sessions():
                sessions.add(kept)
            self._make_room_on_disk()

    def want(self, kept: Kept) -> None:
        """Has a session written to the folder, if there is one."""
        if self._folder is not None:
            self._folder.want(kept)
            self.pump()

    def leave(self, kept: Kept) -> None:
        """Does not write a session, because a successor will be written."""
        if self._folder is not None:
            self._folder.leave(kept)

    def figures(self) -> dict[str, int]:
        """Returns how many sessions there are and their bytes, as fields of `Figures`."""
        here = [kept for kept in self.sessions if kept.can_be_read]
        return {
            "sessions": len(here),
            "session_bytes": sum(kept.bytes for kept in here),
            "disk_bytes": sum(kept.slot.bytes for kept in self.sessions if kept.slot is not None),
        }

    def tend(self) -> bool:
        """Goes on with writing; returns whether to call again soon, because something is not on disk yet."""
        self.pump()
        return self._folder is not None and self._folder.pending

    def flush(self) -> None:
        """Waits until all sessions are on disk, as far as they fit."""
        if self._folder is not None:
            self._note_written(self._folder.pump(patient=True))

    def close(self) -> None:
        """Writes what is not on disk yet."""
        if self._folder is not None:
            self._note_written(self._folder.close())

    def forget(self, kept: Kept) -> None:
        """Forgets a session, in memory and on disk. Raises `EngineError` if its file cannot be deleted."""
        if self.sessions.get(kept.name) is kept:
            self.sessions.remove(kept)
        if self._folder is not None:
            self._folder.forget(kept)

    def is_in_memory(self, kept: Kept) -> bool:
        """Reads a session's cache from disk, if it is there only.

        Returns False if the session is not what it was: if its file is gone or damaged, the session is forgotten, and
        if another process has written another session there, that one takes its place.
        """
        if kept.cache is not None:
            return True
        try:
            assert kept.slot is not None
            stamp = stamp_of(kept.slot.path)
            read = read_session(kept.slot.path, self.caches, self.options.max_disk_bytes)
        except (EngineError, OSError) as error:
            log.warning("%s", error)
            self.sessions.remove(kept)
            return False
        if not (kept.begins(read) and read.begins(kept)):
            read.name, read.slot, read.saved = kept.name, Slot(kept.slot.path, stamp), True
            self.sessions.remove(kept)
            self.sessions.add(read)
            return False
        kept.cache, kept.bytes, kept.trims, kept.random_state = read.cache, read.bytes, read.trims, read.random_state
        return True

    def make_room(self) -> None:
        """Evicts the least recently used sessions from memory until the others fit."""
        excess = sum(kept.bytes for kept in self.sessions) - self.options.max_bytes
        for kept in list(self.sessions):
            if excess <= 0:
                return
            if kept.cache is None:
                continue
            excess -= kept.bytes
            self.free(kept)

    def free(self, kept: Kept) -> None:
        """Lets go of a session's cache. Forgets the session unless it is on disk, or is about to be."""
        if kept.saved or (self._folder is not None and self._folder.is_coming(kept)):
            kept.cache, kept.bytes = None, 0
        else:
            self.sessions.remove(kept)

    def pump(self) -> None:
        """Goes on with writing, and notes what is on disk now."""
        if self._folder is not None:
            self._note_written(self._folder.pump())

    def _note_written(self, ended: list[tuple[Kept, bool]]) -> None:
        """Forgets sessions that are neither in memory nor, because writing them failed, on disk."""
        for kept, worked in ended:
            if not worked and kept.cache is None and self.sessions.get(kept.name) is kept:
                self.sessions.remove(kept)
        if ended:
            self._make_room_on_disk()

    def _make_room_on_disk(self) -> None:
        """Deletes the files of the least recently used sessions until the others fit."""
        if self._folder is None:
            return
        excess = self.figures()["disk_bytes"] + self._folder.unfinished_bytes() - self.options.max_disk_bytes
        for kept in list(self.sessions):
            if excess <= 0:
                return
            if kept.slot is None or not kept.saved:
                continue
            excess -= kept.slot.bytes
            self._folder.evict(kept)
            if kept.cache is None:
                self.sessions.remove(kept)


class NoSessions:
    """Keeps nothing: every prompt is read whole."""

    def checkout(self, base_ids: Sequence[int], pack_key: str, share: bool = False, start: Any = None) -> None:
        """Returns None: there is no session."""

    def differing(self, base_ids: Sequence[int], pack_key: str) -> None:
        """Returns None: there is no session."""

    def put(self, cache: list[Any], **facts: Any) -> None:
        """Returns None: the cache is dropped."""

    def release(self, name: str) -> None:
        """Does nothing."""

    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns no answers."""
        return {}

    def note_answer(self, name: str, key: str, base_ids: Sequence[int]) -> None:
        """Does nothing."""

    def sessions(self) -> list[SessionInfo]:
        """Returns no sessions."""
        return []

    def save(self, name: str, file: Path) -> NoReturn:
        """Raises `EngineError`."""
        raise UnknownSessionError(f"there is no session {name!r}: this engine keeps none")

    def load(self, file: Path) -> NoReturn:
        """Raises `EngineError`."""
        raise EngineError(f"{file}: this engine keeps no sessions")

    def drop(self, name: str) -> NoReturn:
        """Raises `EngineError`."""
        raise UnknownSessionError(f"there is no session {name!r}: this engine keeps none")

    def purge(self) -> int:
        """Returns 0."""
        return 0

    def tend(self) -> bool:
        """Returns False: there is nothing to write."""
        return False

    def close(self) -> None:
        """Does nothing."""

    def figures(self) -> dict[str, int]:
        """Returns no figures."""
        return {}
