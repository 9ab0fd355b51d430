"""`Session`: what a `SessionStore` knows of one session. `SessionCaches`: how the store handles a model's caches.

MLX and PyTorch each implement `SessionCaches`. A request's cache is what `mlx_zip.engine.parts.Served.new_cache`
returns. The kept cache of a session may be of another type. Only implementations of `SessionCaches` look inside either.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlx_zip.engine.interface import SessionInfo
from mlx_zip.engine.sessions.file_format import FileContents, ModelIdentity

Ids = NDArray[np.uint32]
AnswerIds = dict[str, tuple[int, ...]]  # key of an answer, its text for example -> base ids
FileStamp = tuple[int, int, int]  # a file's inode, bytes, and time of its last change


@dataclass(eq=False)
class SessionFile:
    """The file of a session. A longer session that continues it overwrites the file.

    stamp: of the file as this process knows it, None before there is one. The thread that writes the file sets the
    fields, so use them in one thread at a time.
    """

    path: Path
    stamp: FileStamp | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the file, 0 before there is one."""
        return 0 if self.stamp is None else self.stamp[1]

    def is_unchanged(self) -> bool:
        """Returns whether the file is the one that this process knows; False if another process has replaced it."""
        return file_stamp(self.path) == self.stamp

    def delete_if_unchanged(self) -> None:
        """Deletes the file if it is the one that this process knows. Raises `OSError`."""
        if self.stamp is not None and self.is_unchanged():
            self.path.unlink(missing_ok=True)
        self.stamp = None


@dataclass(eq=False)
class Session:
    """What is kept of a request that has ended, so that a later one can go on from it.

    base_ids: those of prompt and answer. ends: for each id, how many base tokens it and the ids before it have.
    cache: None if the session is on disk only. is_trimmable: whether the cache can be trimmed. bytes: of the cache.
    used: seconds since 1970. answers_version: how often answers were noted. file: the session's file. saved: whether
    that file holds the session as it is now, not an older state. is_dropped: whether the session was dropped, so that
    no file may stay.
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
        """Returns how many of the session's ids depend on nothing but its first `base_tokens` base tokens.

        merge_size: maximum base tokens of an id. An id depends on the `merge_size` base tokens from its beginning on.
        """
        if base_tokens < merge_size:
            return 0
        starts = self.ends[:-1]  # of all ids but the first, which begins at 0
        return min(1 + int(np.searchsorted(starts, base_tokens - merge_size, side="right")), len(self.ends))

    @property
    def can_be_read(self) -> bool:
        """Whether the session is in memory or on disk: while it is written it may be in neither."""
        return self.cache is not None or self.saved

    def is_prefix_of(self, other: Session) -> bool:
        """Returns whether another session has the same pack and begins with all base ids of this one."""
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
    """Returns a name that no other session has, in this process or another."""
    return secrets.token_hex(8)


def answers_within(answers: AnswerIds, base_ids: NDArray[np.uint32]) -> AnswerIds:
    """Returns those answers whose base ids occur in a sequence."""
    held = base_ids.tobytes()
    return {key: ids for key, ids in answers.items() if np.array(ids, np.uint32).tobytes() in held}


@dataclass(frozen=True)
class FileParts:
    """A session as a file holds it. tensors: by name, the type as safetensors calls it and a view of the values.

    The first two are the base ids and the ends of ids, uint32. metadata: what the file says beside the session's facts.
    """

    tensors: Mapping[str, tuple[str, np.ndarray]]
    metadata: Mapping[str, str]


class SessionCaches(Protocol):
    """How a session store handles the caches of one model. merge_size: maximum base tokens of an id."""

    @property
    def merge_size(self) -> int: ...

    @cached_property
    def identity(self) -> ModelIdentity:
        """The fingerprints that this model's session files carry."""
        ...

    @cached_property
    def own_pack_key(self) -> str:
        """The key of sessions that begin with the model's own pack, which may be a different pack after a restart."""
        ...

    def held_ids(self, cache: Any, base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        """Returns the base ids that a request's cache holds, and for each id how many base tokens end with it.

        base_ids: of a plain model's cache, which does not store them. Raises `EngineError` if their number is wrong.
        """
        ...

    def prepare_to_keep(self, cache: Any) -> Any:
        """Returns the cache that a session keeps; the request's cache given must not be used any more."""
        ...

    def measure(self, kept: Any) -> tuple[int, bool]:
        """Returns the bytes of a kept cache, and whether it can be trimmed to any number of its ids."""
        ...

    def count_fitting_ids(self, ids: int) -> int:
        """Returns how many of a session's `ids` ids a request's cache has room for."""
        ...

    def cache_for_request(self, session: Session, ids: int, move: bool, start: Any) -> Any:
        """Returns a request's cache with the first `ids` ids of a session.

        move: whether the request gets the session's own cache; else it gets a copy, and the session's does not change.
        start: pack that the request's codebook begins with, None for the model's own.
        """
        ...

    def to_file_parts(self, session: Session) -> FileParts:
        """Returns the tensors and metadata of a session's file; they do not change when the session is continued."""
        ...

    def cache_from_file(self, contents: FileContents, session: Session) -> tuple[Any, Any]:
        """Returns the cache in a session's file, and the sampler's random state, None for none.

        Raises `BadFileError` and other errors for a cache that this model cannot have written.
        """
        ...
