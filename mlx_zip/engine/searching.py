"""Chooses ids that constraints accept, hypertokens included.

A constraint's mask forbids ("closes") base ids, and all hypertokens that begin with a closed base id. All other ids are
open. The device computes a score per id for each row, and the host goes through the scores from the highest down. The
constraint must accept a hypertoken as a whole; otherwise the id with the next highest score is tried. So a step waits
for the device once, however many hypertokens are refused. If temperature is the only sampling option, each accepted id
is drawn in proportion to its probability. Top-p, top-k, min-p and XTC are applied before any id is refused. After
`REFUSALS` refusals in one step only base ids are open.
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
    """The search for one row's next id. Subclasses compute the scores on the device.

    logits [1, W]: logits that the id is chosen from; after the search, closed and refused ids are at -inf. token: the
    id that was found, None before. scores [1, W]: the scores that `look_for_id` goes through. Raises what the
    constraint raises.
    """

    scores: Any

    def __init__(self, request: Request, logits: Any) -> None:
        assert request.submission.constraint is not None
        self.request, self.logits = request, logits
        self.token: int | None = None
        self._constraint, self._excluded, self._refused = request.submission.constraint, request.excluded_ids(), 0
        mask, first_ids = np.asarray(self._constraint.mask(), bool), request.first_base_ids_of_entries
        self._entries = slice(request.vocab_size, request.vocab_size + len(first_ids))
        self._open = _open_columns(mask, request.vocab_size, first_ids, logits.shape[1])

    @abstractmethod
    def score_open_ids(self, open_: np.ndarray, excluded: list[int]) -> tuple[Any, Any]:
        """Returns logits [1, W] with closed and excluded ids at -inf, and scores [1, W] float32, not yet evaluated.

        The id with the highest score is the one drawn. open_ [W] bool: False for closed ids.
        """

    @abstractmethod
    def mask_closed_ids(self, logits: Any, open_: np.ndarray) -> Any:
        """Returns logits [1, W] with -inf where `open_` [W] bool is False."""

    @abstractmethod
    def copy_to_host(self, scores: Any) -> np.ndarray:
        """Waits until scores [1, W] are computed and returns them as an array [W] that the caller may write to."""

    def build_scores(self) -> bool:
        """Builds the scores for `look_for_id` without evaluating them, and returns True.

        Raises `GenerationError` if no id is open.
        """
        if not self._open.any():
            raise GenerationError(NOTHING)
        self._chosen_from, self.scores = self.score_open_ids(self._open, self._excluded)
        return True

    def look_for_id(self) -> bool:
        """Goes through the scores from the highest down. Returns whether `build_scores` must run again to find an id.

        Raises `GenerationError` if the constraint allows no id.
        """
        scores, before = self.copy_to_host(self.scores), self._refused
        while scores[token := int(scores.argmax())] > -math.inf:
            if self._is_accepted(token):
                self._end_with_id(token)
                return False
            self._refuse_id(token, scores)
        if self._refused == before:
            if not self._excluded:
                raise GenerationError(NOTHING)
            self._excluded = []  # the constraint allows only ids that canonical decoding excludes
        return True

    def _is_accepted(self, token: int) -> bool:
        """Returns whether the constraint accepts an open id: always for a base id, which the mask allows."""
        expansion = self.request.expand(token)
        return len(expansion) == 1 or self._constraint.accepts(self.request.cut_at_end(expansion)[0])

    def _refuse_id(self, token: int, scores: np.ndarray) -> None:
        """Closes (forbids) a hypertoken that the constraint did not accept, so that the search goes on without it.

        The refusal number `REFUSALS` of the step closes all hypertokens. scores [W]: those of closed ids become -inf.
        """
        self._refused += 1
        closed = token if self._refused < REFUSALS else self._entries
        self._open[closed] = False
        scores[closed] = -math.inf

    def _end_with_id(self, token: int) -> None:
        self.token = token
        self.logits = self.mask_closed_ids(self._chosen_from, self._open) if self._refused else self._chosen_from


def search_next_ids(searches: Sequence[Search], compute: Callable[[list[Any]], Any] = lambda scores: None) -> None:
    """Finds the next ids of several rows. If a row's search raises, the exception becomes its request's `error`.

    compute: evaluates the scores of all rows whose search is not over, together.
    """
    left = list(searches)
    while left:
        left = [one for one in left if _run_or_set_error(one, one.build_scores)]
        compute([one.scores for one in left])
        left = [one for one in left if _run_or_set_error(one, one.look_for_id)]


def _run_or_set_error(one: Search, part: Callable[[], bool]) -> bool:
    """Runs a part of a search and returns its result. If it raises, sets the request's `error` and returns False."""
    try:
        return part()
    except Exception as error:
        one.request.error = error
        return False


def _open_columns(mask: np.ndarray, vocab_size: int, first_ids: np.ndarray, width: int) -> np.ndarray:
    """Returns which columns [W] bool are open.

    mask: which base ids may come next; base ids beyond the end of `mask` may not. first_ids [N]: each entry's first
    base id.
    """
    found = np.zeros(width, bool)
    found[: min(len(mask), vocab_size)] = mask[:vocab_size]
    found[vocab_size : vocab_size + len(first_ids)] = found[first_ids]
    return found
