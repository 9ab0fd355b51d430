"""`Session`: what a `SessionStore` knows of one session. `SessionCaches`: how the store handles a model's caches.

MLX and PyTorch each implement `SessionCaches`. A request's cache is what `mlx_zip.engine.parts.Served.new_cache`
returns. The cache kept in a session may be of another type. Only implementations of `SessionCaches` look inside caches.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook
from mlx_zip.engine.interface import SessionInfo
from mlx_zip.engine.sessions.file_format import FileContents, ModelIdentity

Ids = NDArray[np.uint32]
AnswerIds = dict[str, tuple[int, ...]]  # key of an answer (for example its text) -> base ids
FileStamp = tuple[int, int, int]  # a file's inode, bytes, and time of its last change


@dataclass(eq=False)
class SessionFile:
    """The file of a session. A longer session that continues the session overwrites the file.

    stamp: the file's stamp when this process last read or wrote the file, None before there is a file. The thread that
    writes the file sets the fields, so use them in one thread at a time.
    """

    path: Path
    stamp: FileStamp | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the file, 0 before there is one."""
        return 0 if self.stamp is None else self.stamp[1]

    def is_unchanged(self) -> bool:
        """Returns whether the file still has `stamp`: False if another process has replaced the file."""
        return file_stamp(self.path) == self.stamp

    def delete_if_unchanged(self) -> None:
        """Deletes the file unless another process has replaced it. Raises `OSError`."""
        if self.stamp is not None and self.is_unchanged():
            self.path.unlink(missing_ok=True)
        self.stamp = None


@dataclass(eq=False)
class Session:
    """What is kept of an ended request, so that a later request can continue from there.

    base_ids: base ids of prompt and answer. ends: for each id, the number of base tokens up to the end of the id.
    cache: None if the session is on disk only. is_trimmable: whether `cache` can be trimmed. bytes: memory of `cache`.
    used: time of the last use in seconds since 1970. answers_version: number of times that answers were noted. saved:
    whether `file` holds the session's present state, not an older one. is_dropped: whether the session was dropped, so
    that a file written after that must be deleted.
    """

    name: str
    pack_key: str
    base_ids: Ids
    ends: Ids
    cache: Any
    is_trimmable: bool
    bytes: int
    answers: AnswerIds = field(default_factory=dict)
    random_state: Any = None
    used: float = field(default_factory=time.time)
    answers_version: int = 0
    file: SessionFile | None = None
    saved: bool = False
    is_dropped: bool = False

    def count_reusable_ids(self, base_tokens: int, merge_size: int) -> int:
        """Returns how many of the session's ids depend only on its first `base_tokens` base tokens.

        merge_size: maximum base tokens of an id. The choice of an id depends on the `merge_size` base tokens from the
        id's beginning on.
        """
        if base_tokens < merge_size:
            return 0
        starts = self.ends[:-1]  # of all ids but the first, which begins at 0
        return min(1 + int(np.searchsorted(starts, base_tokens - merge_size, side="right")), len(self.ends))

    @property
    def can_be_read(self) -> bool:
        """Whether the session is in memory or on disk. While it is being written, it may be in neither."""
        return self.cache is not None or self.saved

    def is_prefix_of(self, other: Session) -> bool:
        """Returns whether `other` has this session's pack and begins with all base ids of this session."""
        n = len(self.base_ids)
        return self.pack_key == other.pack_key and np.array_equal(self.base_ids, other.base_ids[:n])

    def info(self) -> SessionInfo:
        """Returns the session's facts for fronts."""
        return SessionInfo(self.name, len(self.base_ids), len(self.ends), self.bytes, self.saved, self.used)


def file_stamp(path: Path) -> FileStamp | None:
    """Returns a file's stamp, None if there is no file. Raises `OSError`."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def new_session_name() -> str:
    """Returns a random name that no other session has, in this or any other process."""
    return secrets.token_hex(8)


def ids_in_book(book: Codebook) -> tuple[Ids, Ids]:
    """Returns the base ids that a codebook has read, and the ends of its ids, as `SessionCaches.held_ids` does."""
    return book.base_ids(), book.ends().astype(np.uint32)


def answers_within(answers: AnswerIds, base_ids: NDArray[np.uint32]) -> AnswerIds:
    """Returns the answers whose base ids occur, one after the other, in `base_ids`."""
    held = base_ids.tobytes()
    return {key: ids for key, ids in answers.items() if np.array(ids, np.uint32).tobytes() in held}


class SessionCaches(Protocol):
    """How a session store handles the caches of one model. merge_size: maximum base tokens of an id."""

    @property
    def merge_size(self) -> int: ...

    @cached_property
    def identity(self) -> ModelIdentity:
        """The fingerprints and settings that are stored in this model's session files."""
        ...

    @cached_property
    def own_pack_key(self) -> str:
        """The `pack_key` of sessions with the model's own pack, which may be another pack after a restart."""
        ...

    def held_ids(self, cache: Any, base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        """Returns the base ids in a request's cache, and for each id the number of base tokens up to the id's end.

        base_ids: the base ids that a plain model's cache holds, because such a cache does not store them. Raises
        `EngineError` if `base_ids` has the wrong length.
        """
        ...

    def prepare_to_keep(self, cache: Any) -> Any:
        """Converts a request's cache into one that a session keeps. `cache` must not be used after that."""
        ...

    def measure(self, kept: Any) -> tuple[int, bool]:
        """Returns the bytes of a kept cache, and whether it can be trimmed to any number of its ids."""
        ...

    def count_fitting_ids(self, ids: int) -> int:
        """Returns how many of the first `ids` ids of a session fit into a request's cache."""
        ...

    def cache_for_request(self, session: Session, ids: int, move: bool, start: Any) -> Any:
        """Returns a request's cache with the first `ids` ids of a session.

        move: True to return the session's own cache, False to return a copy and leave the session's cache unchanged.
        start: pack that the request's codebook begins with, None for the model's own.
        """
        ...

    def file_contents(self, session: Session) -> FileContents:
        """Returns the contents of a session's file, without the facts that `session_as_file` adds.

        The contents do not change when the session is continued.
        """
        ...

    def cache_from_file(self, contents: FileContents, session: Session) -> tuple[Any, Any]:
        """Returns the cache in a session file, and the sampler's random state, None if the file has none.

        Raises `BadFileError` or another error if this model cannot have made the cache.
        """
        ...
