"""What an engine uses in place of a store of sessions when nothing is to be kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mlx_zip.engine.interface import SessionInfo
from mlx_zip.errors import EngineError, UnknownSessionError


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
