"""What a store of sessions needs to know of one model's caches; MLX and PyTorch each have theirs.

A request's cache is what `mlx_zip.engine.parts.Served.new_cache` returns. A session holds what is kept of it, which may
be of another type. Only the classes behind this protocol look inside of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from mlx_zip.engine.session_marks import Marks
from mlx_zip.engine.sessions.format import Contents
from mlx_zip.engine.sessions.kept import Ids, Kept


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
