"""`SessionRoom`: keeps the sessions of a store within their bounds in memory and on disk, and reads them back."""

from __future__ import annotations

import logging

from mlx_zip.engine.caches import Caches
from mlx_zip.engine.session_options import SessionOptions
from mlx_zip.engine.sessions.files import read_session
from mlx_zip.engine.sessions.folder import SessionFolder
from mlx_zip.engine.sessions.kept import Kept, Slot, stamp_of
from mlx_zip.engine.sessions.list import SessionList
from mlx_zip.errors import EngineError

log = logging.getLogger("mlx_zip")


class SessionRoom:
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
