"""`SessionStore`: keeps the caches of ended requests, so that a later request reads only what is new in its prompt.

Sessions are found by the base ids that a prompt begins with, not by a name that a client would have to send: a chat
that goes on, an edited message and a branch all find what they have in common with a kept session. Use a store in one
thread, the engine's.

A request whose prompt continues a whole session takes the session's cache itself, at no cost, and the longer session
replaces it. Any other request, such as an edited message or a second branch, gets a copy, trimmed to the common prefix,
which shares memory with the session until it is written to. The copy ends up to `merge_size` base tokens before the
texts differ, because the choice of an id depends on what follows. The rest gets the ids of the whole text compressed at
once (`compress_next`), so an answer does not depend on what other requests have left. With `keep=False` a request gets
a copy and leaves no session. A purge also covers running requests: their sessions are not kept.
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
from mlx_zip.engine.sessions.files import SessionSnapshot, read_session
from mlx_zip.engine.sessions.folder import SessionFolder
from mlx_zip.engine.sessions.session import (
    AnswerIds,
    Session,
    SessionCaches,
    SessionFile,
    answers_within,
    file_stamp,
    new_session_name,
)
from mlx_zip.engine.sessions.session_list import SessionList
from mlx_zip.errors import EngineError, UnknownSessionError, failure_reason

log = logging.getLogger("mlx_zip")


@dataclass(frozen=True)
class SessionOptions:
    """Bounds of a store. max_bytes: of all sessions in memory. folder: where sessions are kept on disk too, None for
    nowhere. max_disk_bytes: of all sessions of this model in the folder. model_name: name that the model was opened by,
    None if unknown; tokenizer_config: how its tokenizer was loaded. Both are noted in the files, for `mlx_zip
    generate`. share: name of the part of the model that is on this machine, "" for a whole model; files of another part
    are not read.
    """

    max_bytes: int = 4 << 30
    folder: Path | None = None
    max_disk_bytes: int = 16 << 30
    model_name: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    share: str = ""

    @property
    def file_facts(self) -> dict[str, str]:
        """What files say of the model, beside its fingerprint."""
        named = {} if self.model_name is None else {"model": self.model_name}
        return {"tokenizer_config": json.dumps(dict(self.tokenizer_config)), **named}


@dataclass(frozen=True)
class Checkout:
    """A cache for a request. ids, base_tokens: how many it holds. name: to be given to `put` or `release` at the end.

    random_state: the sampler's random state that the session was put with; None if there was none, or if the cache is a
    copy, because copies of a session must not all draw the same numbers.
    """

    cache: Any
    ids: int
    base_tokens: int
    name: str
    random_state: Any = None


class SessionStore:
    """The kept sessions of one model. At the end call `close`, which writes what is not on disk yet."""

    def __init__(self, caches: SessionCaches, options: SessionOptions) -> None:
        self.caches, self.options = caches, options
        self._list = SessionList(caches.merge_size)
        self._storage = _Storage(caches, self._list, options)
        self._checked_out: dict[str, Session] = {}  # sessions that requests have, by name

    # ---- a request

    def checkout(
        self, base_ids: Sequence[int], pack_key: str, share: bool = False, start: Any = None
    ) -> Checkout | None:
        """Returns the cache of the session that has most in common with a prompt, None if no session can be used.

        The common prefix ends where an id of the session ends, and leaves at least one base id of the prompt to be
        read. pack_key: only sessions that were put with the same key are looked at; "" for the model's own pack.

        If the prompt begins with a whole session, that session is taken out of the store, and `put` later stores the
        longer one under its name. Otherwise, and always with `share`, the session stays, and a copy gets a new name.

        start: pack that the request's codebook begins with, None for the model's own. A session from disk has only a
        fingerprint of the pack's tuned rows. Raises `ModelError` if the session began with something else.
        """
        self._storage.write_queued()
        wanted = np.asarray(base_ids, dtype=np.uint32)[:-1]
        while (found := self._list.find_longest_prefix(wanted, pack_key or self.caches.own_pack_key)) is not None:
            if self._storage.load_into_memory(found[0]):
                return self._check_out(*found, share, start)
        return None

    def find_difference(self, base_ids: Sequence[int], pack_key: str) -> Differing | None:
        """Returns where a prompt first differs from the session that has most in common with it.

        None if the prompt begins with all of that session, or no session begins as the prompt does. pack_key: as in
        `checkout`, to be called before it.
        """
        wanted = np.asarray(base_ids, dtype=np.uint32)
        return self._list.find_difference(wanted, pack_key or self.caches.own_pack_key)

    def _check_out(self, session: Session, ids: int, share: bool, start: Any) -> Checkout:
        """Returns the first `ids` ids of a session for a request, or as many of them as it has room for."""
        self._list.mark_used(session)
        ids = self.caches.count_fitting_ids(ids)
        base_tokens, move = int(session.ends[ids - 1]), ids == len(session.ends) and not share
        cache = self.caches.cache_for_request(session, ids, move, start)
        if move:
            first = session.name not in self._checked_out  # False: another request has it, and this one is from disk
            self._check_out_whole(session)
            return Checkout(cache, ids, base_tokens, session.name, session.random_state if first else None)
        answers = answers_within(session.answers, session.base_ids[:base_tokens])
        name = self._note_checkout(
            Session(new_session_name(), "", session.base_ids[:0], session.ends[:0], None, False, 0, answers)
        )
        self._storage.evict_from_memory()  # the session may have come from disk
        return Checkout(cache, ids, base_tokens, name)

    def _check_out_whole(self, session: Session) -> None:
        """Gives up a session's cache, which goes to the request; what is on disk stays."""
        self._storage.cancel_write(session)
        self._storage.drop_cache(session)
        self._note_checkout(session)

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
        if the cache continues it, and a session with exactly these base ids is replaced too. answers: base ids by key,
        in addition to the answers of the session checked out. base_ids: those that a plain model's cache holds, which
        does not store them. random_state: the sampler's. Raises `EngineError` if base_ids are missing or too few.
        """
        held, ends = self.caches.held_ids(cache, base_ids)
        former = self._checked_out.get(name or "")
        noted = {**self.release(name or ""), **{key: tuple(ids) for key, ids in (answers or {}).items()}}
        if not len(held):
            return name or new_session_name()
        cache = self.caches.prepare_to_keep(cache)
        size, is_trimmable = self.caches.measure(cache)
        session = Session(
            name or new_session_name(),
            pack_key or self.caches.own_pack_key,
            held,
            ends,
            cache,
            is_trimmable,
            size,
            noted,
        )
        session.random_state, session.file = random_state, former and former.file
        self._add_session(session)
        return session.name

    def release(self, name: str) -> AnswerIds:
        """Forgets that a session is checked out and returns its answers. For a cache that will not be put back."""
        session = self._checked_out.pop(name, None)
        if session is None:
            return {}
        if self._list.get(name) is not session:  # it is not on disk either
            self._list.answers.remove(name, session.answers)
        return session.answers

    def _note_checkout(self, session: Session) -> str:
        """Notes that a session is checked out, and returns its name; its answers can still be looked up."""
        self._checked_out[session.name] = session
        self._list.answers.add(session.name, session.answers)
        return session.name

    def note_answer(self, name: str, key: str, base_ids: Sequence[int]) -> None:
        """Stores an answer's base ids under `key` with a session. Ignores an unknown session: it may be evicted."""
        session = self._checked_out.get(name) or self._list.get(name)
        if session is None:
            return
        session.answers[key] = tuple(map(int, base_ids))
        session.answers_version += 1
        self._list.answers.add(name, {key: session.answers[key]})
        if session.saved and session.cache is not None:
            self._storage.queue_write(session)

    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns the noted answers of all kept sessions, by key: a live map that any thread may read."""
        return self._list.answers

    # ---- the sessions

    def sessions(self) -> list[SessionInfo]:
        """Returns the kept sessions, the last used first. A session that a request has counts if it is on disk."""
        self._storage.write_queued()
        return [session.info() for session in self._list.last_used_first() if session.can_be_read]

    def save(self, name: str, file: Path) -> None:
        """Writes a session to a file. Raises `EngineError` for an unknown name and if the file cannot be written."""
        session = self._session_named(name)
        if not self._storage.load_into_memory(session):
            raise EngineError(f"the file of session {name} cannot be read any more")
        try:
            SessionSnapshot(session, self.caches, self.options.file_facts).write(file, session.answers)
        except OSError as error:
            raise EngineError(f"session file {file}: cannot be written: {failure_reason(error)}") from error
        self._storage.evict_from_memory()

    def load(self, file: Path) -> SessionInfo:
        """Adds the session in a file and returns its info. The file is not changed.

        Raises `EngineError` naming the file if it is damaged, of another model, or larger than all sessions may be.
        """
        session = read_session(file, self.caches, self.options.max_bytes)
        session.name = new_session_name()
        self._add_session(session)
        return session.info()

    def drop(self, name: str) -> None:
        """Forgets a session, in memory and on disk. Raises `EngineError` for an unknown name."""
        self._storage.delete(self._session_named(name))

    def purge(self) -> int:
        """Forgets all sessions, in memory and on disk, and returns how many there were.

        Raises `EngineError` if files cannot be deleted; everything else is forgotten all the same.
        """
        self._storage.write_queued()
        count, errors = sum(session.can_be_read for session in self._list), list[EngineError]()
        checked_out = list(self._checked_out.items())
        for name, _ in checked_out:
            self.release(name)
        for session in [*(one for name, one in checked_out if self._list.get(name) is not one), *self._list]:
            try:
                self._storage.delete(session)
            except EngineError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return count

    def figures(self) -> dict[str, int]:
        """Returns how many sessions there are and their bytes, as fields of `Figures`."""
        return self._storage.figures()

    def continue_writing(self) -> bool:
        """Writes queued sessions while there is room; returns whether some are not on disk yet, so call again soon."""
        return self._storage.continue_writing()

    def flush(self) -> None:
        """Waits until all sessions are on disk, as far as they fit."""
        self._storage.flush()

    def close(self) -> None:
        """Writes what is not on disk yet."""
        self._storage.close()

    # ---- keeping

    def _add_session(self, session: Session) -> None:
        """Adds a session, in place of the one that it continues or equals, and queues it to be written."""
        former = self._list.get(session.name)
        if former is not None and not former.is_prefix_of(session):
            former, session.name, session.file = None, new_session_name(), None
        former = former or self._list.find_equal(session)
        if former is not None:
            self._list.remove(former)
            self._storage.cancel_write(former)
            session.name, session.file = former.name, former.file
            session.answers = {**former.answers, **session.answers}
        self._list.add(session)
        self._storage.queue_write(session)
        self._storage.evict_from_memory()

    def _session_named(self, name: str) -> Session:
        """Returns a session by its name. Raises `UnknownSessionError` for an unknown name."""
        session = self._list.get(name)
        if session is None or not session.can_be_read:
            raise UnknownSessionError(
                f"there is no session {name!r:.80}; it may have been evicted, or a request has it"
            )
        return session


class _Storage:
    """Where the sessions of one model are: in memory and in a folder, both with a maximum size.

    sessions: those of the store; what is evicted is removed from it.
    """

    def __init__(self, caches: SessionCaches, sessions: SessionList, options: SessionOptions) -> None:
        self.caches, self.sessions, self.options = caches, sessions, options
        self._folder: SessionFolder | None = None
        if options.folder is not None:
            self._folder = SessionFolder(options.folder, options.max_disk_bytes, caches, options.file_facts)
            for session in self._folder.read_index():
                sessions.add(session)
            self._evict_from_disk()

    def queue_write(self, session: Session) -> None:
        if self._folder is not None:
            self._folder.queue_write(session)
            self.write_queued()

    def cancel_write(self, session: Session) -> None:
        if self._folder is not None:
            self._folder.cancel_write(session)

    def figures(self) -> dict[str, int]:
        """Returns how many sessions there are and their bytes, as fields of `Figures`."""
        here = [session for session in self.sessions if session.can_be_read]
        return {
            "sessions": len(here),
            "session_bytes": sum(session.bytes for session in here),
            "disk_bytes": sum(session.file.bytes for session in self.sessions if session.file is not None),
        }

    def continue_writing(self) -> bool:
        """Writes queued sessions while there is room; returns whether some are not on disk yet, so call again soon."""
        self.write_queued()
        return self._folder is not None and self._folder.has_pending_writes

    def flush(self) -> None:
        """Waits until all sessions are on disk, as far as they fit."""
        if self._folder is not None:
            self._forget_failed_writes(self._folder.write_queued(wait=True))

    def close(self) -> None:
        """Writes what is not on disk yet."""
        if self._folder is not None:
            self._forget_failed_writes(self._folder.close())

    def delete(self, session: Session) -> None:
        """Forgets a session, in memory and on disk. Raises `EngineError` if its file cannot be deleted."""
        if self.sessions.get(session.name) is session:
            self.sessions.remove(session)
        if self._folder is not None:
            self._folder.delete(session)

    def load_into_memory(self, session: Session) -> bool:
        """Reads a session's cache from disk, if it is there only. Returns whether the session can be used.

        If its file is gone or damaged, the session is forgotten. If another process has written another session to the
        file, that one takes its place. The result is False in both cases.
        """
        if session.cache is not None:
            return True
        try:
            assert session.file is not None
            stamp = file_stamp(session.file.path)
            read = read_session(session.file.path, self.caches, self.options.max_disk_bytes)
        except (EngineError, OSError) as error:
            log.warning("%s", error)
            self.sessions.remove(session)
            return False
        if not (session.is_prefix_of(read) and read.is_prefix_of(session)):
            read.name, read.file, read.saved = session.name, SessionFile(session.file.path, stamp), True
            self.sessions.remove(session)
            self.sessions.add(read)
            return False
        session.cache, session.bytes, session.is_trimmable, session.random_state = (
            read.cache,
            read.bytes,
            read.is_trimmable,
            read.random_state,
        )
        return True

    def evict_from_memory(self) -> None:
        """Evicts the least recently used sessions from memory until the others fit."""
        excess = sum(session.bytes for session in self.sessions) - self.options.max_bytes
        for session in list(self.sessions):
            if excess <= 0:
                return
            if session.cache is None:
                continue
            excess -= session.bytes
            self.drop_cache(session)

    def drop_cache(self, session: Session) -> None:
        """Drops a session's cache from memory. Forgets the session unless it is on disk or being written."""
        if session.saved or (self._folder is not None and self._folder.start_write(session)):
            session.cache, session.bytes = None, 0
        else:
            self.sessions.remove(session)

    def write_queued(self) -> None:
        if self._folder is not None:
            self._forget_failed_writes(self._folder.write_queued())

    def _forget_failed_writes(self, ended: list[tuple[Session, bool]]) -> None:
        """Forgets sessions that are neither in memory nor, because writing them failed, on disk."""
        for session, worked in ended:
            if not worked and session.cache is None and self.sessions.get(session.name) is session:
                self.sessions.remove(session)
        if ended:
            self._evict_from_disk()

    def _evict_from_disk(self) -> None:
        """Deletes the files of the least recently used sessions until the others fit."""
        if self._folder is None:
            return
        excess = self.figures()["disk_bytes"] + self._folder.unfinished_bytes() - self.options.max_disk_bytes
        for session in list(self.sessions):
            if excess <= 0:
                return
            if session.file is None or not session.saved:
                continue
            excess -= session.file.bytes
            self._folder.evict(session)
            if session.cache is None:
                self.sessions.remove(session)


class NoSessions:
    """Keeps nothing: every prompt is read whole."""

    def checkout(self, base_ids: Sequence[int], pack_key: str, share: bool = False, start: Any = None) -> None:
        """Returns None: there is no session."""

    def find_difference(self, base_ids: Sequence[int], pack_key: str) -> None:
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

    def continue_writing(self) -> bool:
        """Returns False: there is nothing to write."""
        return False

    def close(self) -> None:
        """Does nothing."""

    def figures(self) -> dict[str, int]:
        """Returns no figures."""
        return {}
