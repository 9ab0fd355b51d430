"""`Answers`: the noted answers of all sessions, as one map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Noted = dict[str, tuple[int, ...]]  # key of an answer, its text for example -> base ids


class Answers(Mapping[str, Sequence[int]]):
    """A map from each answer's key to its base ids. If sessions differ in an answer, the last one noted counts.

    One thread changes it; others may look up keys meanwhile, because each key's value is replaced as a whole.
    """

    def __init__(self) -> None:
        self._noted: dict[
            str, tuple[tuple[str, tuple[int, ...]], ...]
        ] = {}  # key -> (session, base ids), last noted last

    def add(self, session: str, answers: Noted) -> None:
        """Notes a session's answers."""
        for key, base_ids in answers.items():
            self._noted[key] = (*self._of_others(session, key), (session, base_ids))

    def remove(self, session: str, answers: Noted) -> None:
        """Forgets a session's answers."""
        for key in answers:
            self._noted[key] = self._of_others(session, key)
            if not self._noted[key]:
                del self._noted[key]

    def _of_others(self, session: str, key: str) -> tuple[Any, ...]:
        """Returns what other sessions noted for a key."""
        return tuple(one for one in self._noted.get(key, ()) if one[0] != session)

    def __getitem__(self, key: str) -> Sequence[int]:
        noted = self._noted.get(key)
        if not noted:
            raise KeyError(key)
        return noted[-1][1]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._noted))

    def __len__(self) -> int:
        return len(self._noted)


def answers_within(answers: Noted, base_ids: NDArray[np.uint32]) -> Noted:
    """Returns those answers whose base ids occur in a sequence."""
    held = base_ids.tobytes()
    return {key: ids for key, ids in answers.items() if np.array(ids, np.uint32).tobytes() in held}
