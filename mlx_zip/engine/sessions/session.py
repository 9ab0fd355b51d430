"""`Kept`: what a `SessionStore` knows of one session. `Caches`: what the store asks a model of the cache in it.

MLX and PyTorch have their own `Caches`. A request's cache is what `mlx_zip.engine.parts.Served.new_cache` returns. A
session holds what is kept of it, which may be of another type. Only the classes behind the protocol look inside of
either.
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
from mlx_zip.engine.sessions.file_format import Contents, Marks

Ids = NDArray[np.uint32]
Noted = dict[str, tuple[int, ...]]  # key of an answer, its text for example -> base ids
Stamp = tuple[int, int, int]  # a file's inode, bytes, and time of its last change


@dataclass(eq=False)
class Slot:
    """A session's place on disk; its longer successors overwrite the file. stamp: of the file as this process knows it,
    None before there is one. Whoever writes the file sets the fields, so ask in one thread at a time.
    """

    path: Path
    stamp: Stamp | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the file, 0 before there is one."""
        return 0 if self.stamp is None else self.stamp[1]

    def is_ours(self) -> bool:
        """Returns whether the file is the one that this process knows: another process may have replaced it."""
        return stamp_of(self.path) == self.stamp

    def delete(self) -> None:
        """Deletes the file if it is the one that this process knows. Raises `OSError`."""
        if self.stamp is not None and self.is_ours():
            self.path.unlink(missing_ok=True)
        self.stamp = None


@dataclass(eq=False)
class Kept:
    """A session. base_ids: all that it holds. ends: for each of its ids, how many base tokens it and those before it
    have. cache: None if it is on disk only. trims: whether the cache can be trimmed. bytes: of the cache. used: seconds
    since 1970. notes: how often answers were noted. slot: its place on disk; saved: whether the file there holds this
    session as it is, and not an older state of it. gone: whether it was dropped, so that no file may stay.
    """

    name: str
    pack_key: str
    base_ids: Ids
    ends: Ids
    cache: Any
    trims: bool
    bytes: int
    answers: Noted = field(default_factory=dict)
    random_state: Any = None
    used: float = field(default_factory=time.time)
    notes: int = 0
    slot: Slot | None = None
    saved: bool = False
    gone: bool = False

    def border(self, base_tokens: int, reach: int) -> int:
        """Returns how many of the session's ids depend on nothing but its first `base_tokens` base tokens.

        reach: how many base tokens an id can have. Which id stands at a place is chosen by the `reach` tokens that
        follow, so an id that begins later might be another one in another text.
        """
        if base_tokens < reach:
            return 0
        starts = self.ends[:-1]  # of all ids but the first, which begins at 0
        return min(1 + int(np.searchsorted(starts, base_tokens - reach, side="right")), len(self.ends))

    @property
    def can_be_read(self) -> bool:
        """Whether the session is in memory or on disk: while it is written it may be in neither."""
        return self.cache is not None or self.saved

    def begins(self, other: Kept) -> bool:
        """Returns whether another session has the same pack and begins with all base ids of this one."""
        n = len(self.base_ids)
        return self.pack_key == other.pack_key and np.array_equal(self.base_ids, other.base_ids[:n])

    def info(self) -> SessionInfo:
        """Returns what a front may know of the session."""
        return SessionInfo(self.name, len(self.base_ids), len(self.ends), self.bytes, self.saved, self.used)


def stamp_of(path: Path) -> Stamp | None:
    """Returns a file's stamp, None if there is no file. Raises `OSError`."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def new_name() -> str:
    """Returns a name that no other session has, in this process or another."""
    return secrets.token_hex(8)


def answers_within(answers: Noted, base_ids: NDArray[np.uint32]) -> Noted:
    """Returns those answers whose base ids occur in a sequence."""
    held = base_ids.tobytes()
    return {key: ids for key, ids in answers.items() if np.array(ids, np.uint32).tobytes() in held}


@dataclass(frozen=True)
class Parts:
    """A session as a file holds it. tensors: by name, the type as safetensors calls it and a view of the values.

    The first two are the base ids and the ends of ids, uint32. metadata: what the file says beside the session's facts.
    """

    tensors: Mapping[str, tuple[str, np.ndarray]]
    metadata: Mapping[str, str]


class Caches(Protocol):
    """The caches of one model. reach: how many base tokens an id can have."""

    @property
    def reach(self) -> int: ...

    @cached_property
    def marks(self) -> Marks:
        """What files of this model's sessions say of it."""
        ...

    @cached_property
    def own_pack(self) -> str:
        """The key of sessions that began with the model's own pack, which may be another after a restart."""
        ...

    def held(self, cache: Any, base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        """Returns a request's base ids, and how many base tokens each of its ids and those before it have.

        base_ids: for a cache that does not say it. Raises `EngineError` if they do not cover what the cache holds.
        """
        ...

    def kept(self, cache: Any) -> Any:
        """Returns what a session keeps of a request's cache, which must not be used any more."""
        ...

    def size(self, kept: Any) -> tuple[int, bool]:
        """Returns how many bytes a kept cache takes, and whether it can be cut to any of its ids."""
        ...

    def room(self, ids: int) -> int:
        """Returns how many of a session's `ids` ids a request's cache has room for."""
        ...

    def lent(self, kept: Kept, ids: int, alone: bool, start: Any) -> Any:
        """Returns a request's cache with the first `ids` ids of a session.

        alone: whether the session lets go of its own; else that does not change, whatever is read later. start: what
        the request's codebook begins with, None for the model's own.
        """
        ...

    def parts(self, kept: Kept) -> Parts:
        """Returns a session as a file holds it; the views do not change when the session goes on."""
        ...

    def made(self, contents: Contents, kept: Kept) -> tuple[Any, Any]:
        """Returns the cache and the sampler's random state, None for none, that a session's file holds.

        Raises `BadFileError` and other errors for one that this model cannot have written.
        """
        ...
