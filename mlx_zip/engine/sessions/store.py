"""`SessionStore`: keeps the caches of ended requests, so that a later request reads only what is new in its prompt.

Sessions are found by the base ids that a prompt begins with, not by a name that a client would have to send: a chat
that goes on, an edited message and a branch all find what they have in common with a kept session. Use a store in one
thread, the engine's.

A request whose prompt continues a whole session takes over the session's cache without a copy, and at its end a longer
session replaces the old one. Any other request, such as an edited message or a second branch, gets a copy of the cache,
trimmed to the common prefix; the copy shares memory with the session until it is written to. The copy ends up to
`merge_size` base tokens before the texts differ, because the choice of an id depends on what follows. The rest of the
prompt is read as the ids that compressing the whole prompt at once gives (`compress_next`), so an answer does not
depend on which sessions exist. A request with `keep=False` gets a copy and leaves no session. After a purge, requests
that were running leave no session.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np

from mlx_zip.engine.interface import Differing, SessionInfo
from mlx_zip.engine.sessions.folder import SessionFolder
from mlx_zip.engine.sessions.session import (
    AnswerIds,
    Session,
    SessionCaches,
    SessionFile,
    answers_within,
    file_stamp,
    new_session_name,
    read_session,
    session_as_file,
    write_session,
)
from mlx_zip.engine.sessions.session_list import SessionList
from mlx_zip.errors import EngineError, UnknownSessionError, failure_reason

log = logging.getLogger("mlx_zip")


@dataclass(frozen=True)
class SessionOptions:
    """Options of a store. max_bytes: maximum bytes of all sessions in memory. folder: folder for sessions on disk, None
    to keep sessions in memory only. max_disk_bytes: maximum bytes of this model's sessions in `folder`. model_name:
    name that the model was opened by, None if unknown. tokenizer_config: arguments with which the tokenizer was loaded.
    (`mlx_zip generate` reads these two from a session file.) share: name of the part of the model that is on this
    machine, "" for a whole model; files of another part are not read.
    """

    max_bytes: int = 4 << 30
    folder: Path | None = None
    max_disk_bytes: int = 16 << 30
    model_name: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    share: str = ""

    @property
    def file_facts(self) -> dict[str, str]:
        """Facts for session files: the model's name, if known, and the tokenizer's arguments."""
        named = {} if self.model_name is None else {"model": self.model_name}
        return {"tokenizer_config": json.dumps(dict(self.tokenizer_config)), **named}


@dataclass(frozen=True)
class Checkout:
    """A cache for a request. ids, base_tokens: how many of each `cache` holds. name: argument for `put` or `release`.

    random_state: the sampler's random state stored with the session, None if there is none; also None if `cache` is a
    copy, because several copies of a session must not draw the same random numbers.
    """

    cache: Any
    ids: int
    base_tokens: int
    name: str
    random_state: Any = None


class SessionStore:
    """The kept sessions of one model. At the end call `close`, which writes unsaved sessions to disk."""

    def __init__(self, caches: SessionCaches, options: SessionOptions) -> None:
        self.caches, self.options = caches, options
        self._list = SessionList(caches.merge_size)
        self._folder = SessionFolder(options.folder, options.max_disk_bytes, caches, options.file_facts)
        self._checked_out: dict[str, Session] = {}  # sessions in use by requests, by name
        for session in self._folder.read_index():
            self._list.add(session)
        self._evict_from_disk()

    # ---- a request

    def checkout(
        self, base_ids: Sequence[int], pack_key: str, share: bool = False, start: Any = None
    ) -> Checkout | None:
        """Returns a cache that holds the longest possible prefix of a prompt, None if no session can be reused.

        At least one base id of the prompt is left to be read. pack_key: key of the pack that the codebook begins with,
        "" for the model's own pack; only sessions with this key are used.

        If the prompt begins with all base ids of a session, the cache is that session's own: the session leaves the
        store, and `put` later stores a longer session under its name. Otherwise, or if `share` is True, the cache is a
        copy with a new name, and the session stays.

        start: the pack itself, None for the model's own; needed because a session file has only a fingerprint of the
        pack's tuned rows. Raises `ModelError` if the session began with another pack than `start`.
        """
        self.continue_writing()
        wanted = np.asarray(base_ids, dtype=np.uint32)[:-1]
        while (found := self._list.find_longest_prefix(wanted, pack_key or self.caches.own_pack_key)) is not None:
            if self._load_into_memory(found[0]):
                return self._check_out_session(*found, share, start)
        return None

    def find_difference(self, base_ids: Sequence[int], pack_key: str) -> Differing | None:
        """Returns where a prompt first differs from the session with which it has the longest common prefix.

        None if one is a prefix of the other, or no session begins as the prompt does. pack_key: as in `checkout`. Call
        this method before `checkout`.
        """
        wanted = np.asarray(base_ids, dtype=np.uint32)
        return self._list.find_difference(wanted, pack_key or self.caches.own_pack_key)

    def _check_out_session(self, session: Session, ids: int, share: bool, start: Any) -> Checkout:
        """Returns a cache with the first `ids` ids of a session, or with fewer if a request's cache is too small."""
        self._list.mark_used(session)
        ids = self.caches.count_fitting_ids(ids)
        base_tokens, move = int(session.ends[ids - 1]), ids == len(session.ends) and not share
        cache = self.caches.cache_for_request(session, ids, move, start)
        if move:
            first = session.name not in self._checked_out  # False: another request has taken the cache in memory
            self._hand_cache_to_request(session)
            return Checkout(cache, ids, base_tokens, session.name, session.random_state if first else None)
        answers = answers_within(session.answers, session.base_ids[:base_tokens])
        name = self._note_checkout(
            Session(new_session_name(), "", session.base_ids[:0], session.ends[:0], None, False, 0, answers)
        )
        self._evict_from_memory()  # the session may have come from disk
        return Checkout(cache, ids, base_tokens, name)

    def _hand_cache_to_request(self, session: Session) -> None:
        """Removes a session's cache from the store, because a request takes it over. The session's file stays."""
        self._folder.cancel_write(session)
        self._drop_cache(session)
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
        """Stores a cache as a session and returns the session's name. The caller must not use the cache after that.

        name: `Checkout.name` of the cache, None for a new session. A kept session of that name is replaced if the cache
        continues it; a kept session with exactly the base ids of the cache is replaced, too. answers: base ids of
        answers by key, added to the answers of the session checked out. base_ids: base ids that a plain model's cache
        holds, because such a cache does not store them. random_state: the sampler's random state. Raises `EngineError`
        if `base_ids` are missing or their number is wrong.
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
        """Ends a checkout whose cache will not be put back. Returns the answers of the session checked out."""
        session = self._checked_out.pop(name, None)
        if session is None:
            return {}
        if self._list.get(name) is not session:  # it is not on disk either
            self._list.answers.remove(name, session.answers)
        return session.answers

    def _note_checkout(self, session: Session) -> str:
        """Records a session as checked out and returns its name. `answers` still includes the session's answers."""
        self._checked_out[session.name] = session
        self._list.answers.add(session.name, session.answers)
        return session.name

    def note_answer(self, name: str, key: str, base_ids: Sequence[int]) -> None:
        """Stores an answer's base ids under `key` with a session. Does nothing if the session is unknown."""
        session = self._checked_out.get(name) or self._list.get(name)
        if session is None:
            return
        session.answers[key] = tuple(map(int, base_ids))
        session.answers_version += 1
        self._list.answers.add(name, {key: session.answers[key]})
        if session.saved and session.cache is not None:
            self._queue_write(session)

    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns the base ids of all sessions' noted answers, by key: a live map that any thread may read."""
        return self._list.answers

    # ---- the sessions

    def sessions(self) -> list[SessionInfo]:
        """Returns the kept sessions, the most recently used first. Includes a session in use only if it is on disk."""
        self.continue_writing()
        return [session.info() for session in self._list.last_used_first() if session.can_be_read]

    def save(self, name: str, file: Path) -> None:
        """Writes a session to a file. Raises `EngineError` if the name is unknown or the file cannot be written."""
        session = self._session_named(name)
        if not self._load_into_memory(session):
            raise EngineError(f"the file of session {name} cannot be read any more")
        try:
            contents = session_as_file(session, self.caches, self.options.file_facts)
            write_session(file, contents, session.answers)
        except OSError as error:
            raise EngineError(f"session file {file}: cannot be written: {failure_reason(error)}") from error
        self._evict_from_memory()

    def load(self, file: Path) -> SessionInfo:
        """Reads a session from a file, adds it to the store and returns its info. Does not change the file.

        Raises `EngineError`, naming the file, if the file is damaged, of another model, or larger than
        `SessionOptions.max_bytes`.
        """
        session = read_session(file, self.caches, self.options.max_bytes)
        session.name = new_session_name()
        self._add_session(session)
        return session.info()

    def drop(self, name: str) -> None:
        """Deletes a session from memory and disk. Raises `EngineError` if the name is unknown."""
        self._delete(self._session_named(name))

    def purge(self) -> int:
        """Deletes all sessions from memory and disk, and returns how many there were.

        If some files cannot be deleted, deletes everything else and then raises `EngineError`.
        """
        self.continue_writing()
        count, errors = sum(session.can_be_read for session in self._list), list[EngineError]()
        checked_out = list(self._checked_out.items())
        for name, _ in checked_out:
            self.release(name)
        for session in [*(one for name, one in checked_out if self._list.get(name) is not one), *self._list]:
            try:
                self._delete(session)
            except EngineError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return count

    def figures(self) -> dict[str, int]:
        """Returns the number of sessions and their bytes in memory and on disk, as fields of `Figures`."""
        here = [session for session in self._list if session.can_be_read]
        return {
            "sessions": len(here),
            "session_bytes": sum(session.bytes for session in here),
            "disk_bytes": sum(session.file.bytes for session in self._list if session.file is not None),
        }

    # ---- writing

    def continue_writing(self) -> bool:
        """Hands queued sessions to the writer while it has room. Returns whether sessions are left to be written."""
        self._forget_failed_writes(self._folder.write_queued())
        return self._folder.has_pending_writes

    def flush(self) -> None:
        """Writes all queued sessions to disk, as far as they fit, and waits for the writes to end."""
        self._forget_failed_writes(self._folder.write_queued(wait=True))

    def close(self) -> None:
        """Writes all queued sessions to disk and ends the writer's thread."""
        self._forget_failed_writes(self._folder.close())

    def _queue_write(self, session: Session) -> None:
        self._folder.queue_write(session)
        self.continue_writing()

    def _forget_failed_writes(self, ended: list[tuple[Session, bool]]) -> None:
        """Removes sessions whose write failed and whose cache is no longer in memory."""
        for session, worked in ended:
            if not worked and session.cache is None and self._list.get(session.name) is session:
                self._list.remove(session)
        if ended:
            self._evict_from_disk()

    # ---- keeping

    def _add_session(self, session: Session) -> None:
        """Adds a session, in place of the session that it continues or equals, and queues it to be written to disk."""
        former = self._list.get(session.name)
        if former is not None and not former.is_prefix_of(session):
            former, session.name, session.file = None, new_session_name(), None
        former = former or self._list.find_equal(session)
        if former is not None:
            self._list.remove(former)
            self._folder.cancel_write(former)
            session.name, session.file = former.name, former.file
            session.answers = {**former.answers, **session.answers}
        self._list.add(session)
        self._queue_write(session)
        self._evict_from_memory()

    def _delete(self, session: Session) -> None:
        """Deletes a session from memory and disk. Raises `EngineError` if its file cannot be deleted."""
        if self._list.get(session.name) is session:
            self._list.remove(session)
        self._folder.delete(session)

    def _session_named(self, name: str) -> Session:
        """Returns the session of this name. Raises `UnknownSessionError` if there is none that can be read."""
        session = self._list.get(name)
        if session is None or not session.can_be_read:
            raise UnknownSessionError(
                f"there is no session {name!r:.80}; it may have been evicted, or a request has it"
            )
        return session

    # ---- memory and disk

    def _load_into_memory(self, session: Session) -> bool:
        """Reads a session's cache from disk if it is not in memory. Returns whether the session can be used.

        Returns False, and removes the session, if the file is gone or damaged. Also returns False if another process
        has written a different session to the file; that session then replaces `session` in the list.
        """
        if session.cache is not None:
            return True
        try:
            assert session.file is not None
            stamp = file_stamp(session.file.path)
            read = read_session(session.file.path, self.caches, self.options.max_disk_bytes)
        except (EngineError, OSError) as error:
            log.warning("%s", error)
            self._list.remove(session)
            return False
        if not (session.is_prefix_of(read) and read.is_prefix_of(session)):
            read.name, read.file, read.saved = session.name, SessionFile(session.file.path, stamp), True
            self._list.remove(session)
            self._list.add(read)
            return False
        session.cache, session.bytes, session.is_trimmable, session.random_state = (
            read.cache,
            read.bytes,
            read.is_trimmable,
            read.random_state,
        )
        return True

    def _evict_from_memory(self) -> None:
        """Evicts the least recently used sessions from memory until the rest fits `max_bytes`."""
        excess = sum(session.bytes for session in self._list) - self.options.max_bytes
        for session in list(self._list):
            if excess <= 0:
                return
            if session.cache is None:
                continue
            excess -= session.bytes
            self._drop_cache(session)

    def _drop_cache(self, session: Session) -> None:
        """Drops a session's cache from memory. Removes the session unless it is on disk or being written."""
        if session.saved or self._folder.start_write(session):
            session.cache, session.bytes = None, 0
        else:
            self._list.remove(session)

    def _evict_from_disk(self) -> None:
        """Deletes the files of the least recently used sessions until the rest fits `max_disk_bytes`."""
        excess = self.figures()["disk_bytes"] + self._folder.unfinished_bytes() - self.options.max_disk_bytes
        for session in list(self._list):
            if excess <= 0:
                return
            if session.file is None or not session.saved:
                continue
            excess -= session.file.bytes
            self._folder.evict(session)
            if session.cache is None:
                self._list.remove(session)


class NoSessions(SessionStore):
    """A store that keeps no sessions: every prompt is read whole."""

    def __init__(self) -> None:
        super().__init__(cast(Any, SimpleNamespace(merge_size=1, own_pack_key="")), SessionOptions())

    def put(self, cache: Any, **facts: Any) -> Any:
        """Returns None: the cache is dropped."""

    def load(self, file: Path) -> NoReturn:
        """Raises `EngineError`."""
        raise EngineError(f"{file}: this engine keeps no sessions")

    def _session_named(self, name: str) -> NoReturn:
        raise UnknownSessionError(f"there is no session {name!r}: this engine keeps none")
