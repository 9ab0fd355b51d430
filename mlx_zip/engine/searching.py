"""Chooses ids that constraints accept, hypertokens included.

A constraint's mask closes base ids, and every entry that begins with a closed base id. Each row gets a score per id,
and the host looks through the scores from the highest down. A hypertoken is shown to the constraint whole. If the
constraint refuses it, the next highest score counts. So a step waits for the device once, however many hypertokens are
refused. With a temperature alone, each accepted id is drawn with its share of the accepted ids' probability. Top-p,
top-k, min-p and XTC still count refused ids where they cut. After `REFUSALS` refusals only base ids are open.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlx_zip.engine.request import Request
from mlx_zip.errors import GenerationError

REFUSALS = 64  # hypertokens refused in one step before only base ids may be chosen
NOTHING = "the constraint allows no token that the model could emit here"


class Search(ABC):
    """The search for one row's next id; subclasses compute its scores on the device.

    logits [1, W]: what the id is chosen from; after the search, closed and refused ids are at -inf. excluded: ids that
    canonical decoding excludes. token: the id that was found, None before. scores [1, W]: what `look` looks through.
    Raises what the constraint raises.
    """

    scores: Any

    def __init__(self, request: Request, logits: Any, excluded: list[int]) -> None:
        assert request.submission.constraint is not None
        self.request, self.logits = request, logits
        self.token: int | None = None
        self._constraint, self._excluded, self._refused = request.submission.constraint, excluded, 0
        mask, first_ids = np.asarray(self._constraint.mask(), bool), request.entry_first_ids
        self._entries = slice(request.vocab_size, request.vocab_size + len(first_ids))
        self._open = _open_columns(mask, request.vocab_size, first_ids, logits.shape[1])

    @abstractmethod
    def score(self, open_: np.ndarray, excluded: list[int]) -> tuple[Any, Any]:
        """Returns logits [1, W], closed and excluded ids at -inf, and scores [1, W] float32, whose highest is the draw.

        open_ [W] bool: False for closed ids. Both results may still be unevaluated.
        """

    @abstractmethod
    def close(self, logits: Any, open_: np.ndarray) -> Any:
        """Returns logits [1, W] with -inf where `open_` [W] bool is False."""

    @abstractmethod
    def on_host(self, scores: Any) -> np.ndarray:
        """Returns scores [1, W] as an array [W] that the caller may write to; waits until they are computed."""

    def begin(self) -> bool:
        """Builds the scores to look through, which are not yet computed, and returns True.

        Raises `GenerationError` if nothing is open.
        """
        if not self._open.any():
            raise GenerationError(NOTHING)
        self._chosen_from, self.scores = self.score(self._open, self._excluded)
        return True

    def look(self) -> bool:
        """Looks through the scores; returns whether no id was found, so that the search must begin again.

        Raises `GenerationError` if the constraint allows nothing.
        """
        scores, before = self.on_host(self.scores), self._refused
        while scores[token := int(scores.argmax())] > -math.inf:
            if self._is_accepted(token):
                self._end_with(token)
                return False
            self._refuse_id(token, scores)
        if self._refused == before:
            if not self._excluded:
                raise GenerationError(NOTHING)
            self._excluded = []  # what is left is what canonical decoding excludes
        return True

    def _is_accepted(self, token: int) -> bool:
        """Returns whether the constraint accepts an open id. An open base id always is: the mask allows it."""
        expansion = self.request.expand(token)
        return len(expansion) == 1 or self._constraint.accepts(self.request.cut_at_end(expansion)[0])

    def _refuse_id(self, token: int, scores: np.ndarray) -> None:
        """Closes a hypertoken; after `REFUSALS` of them, closes all."""
        self._refused += 1
        closed = token if self._refused < REFUSALS else self._entries
        self._open[closed] = False
        scores[closed] = -math.inf

    def _end_with(self, token: int) -> None:
        self.token = token
        self.logits = self.close(self._chosen_from, self._open) if self._refused else self._chosen_from


def search(searches: Sequence[Search], compute: Callable[[list[Any]], Any] = lambda scores: None) -> None:
    """Finds the ids of several rows. A row whose own work raises gets the exception as its request's `error`.

    compute: called with the scores of all rows that are still searched, to evaluate them together.
    """
    left = list(searches)
    while left:
        left = [one for one in left if _run_part(one, one.begin)]
        compute([one.scores for one in left])
        left = [one for one in left if _run_part(one, one.look)]


def _run_part(one: Search, part: Callable[[], bool]) -> bool:
    """Runs a part of a search and returns its result. If it raises, sets the request's `error` and returns False."""
    try:
        return part()
    except Exception as error:
        one.request.error = error
        return False


def _open_columns(mask: np.ndarray, vocab_size: int, first_ids: np.ndarray, width: int) -> np.ndarray:
    """Returns which columns [W] bool are open.

    mask: which base ids may come next; ids beyond its end may not. first_ids [N]: each entry's first base id.
    """
    found = np.zeros(width, bool)
    found[: min(len(mask), vocab_size)] = mask[:vocab_size]
    found[vocab_size : vocab_size + len(first_ids)] = found[first_ids]
    return found
