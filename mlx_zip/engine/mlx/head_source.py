"""`HeadSource`: proposes ids that a model's draft head predicts (`mlx_zip.models.draft_head`)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, takewhile
from operator import mul
from statistics import median_low
from typing import Any

import mlx.core as mx

from mlx_zip.codec.ids import Uint32s
from mlx_zip.engine.pass_costs import HeadRecord
from mlx_zip.models.draft_head import DEPTH, Proposer

LEAST_LIKELY = 0.1  # minimum joint probability of the ids of a draft; a draft is cut where it falls below


class HeadSource:
    """Proposes ids with a model's draft head. The ids may be hypertokens, unlike those of other sources.

    Call `see` with the model's last output before each draft. record: figures of the head over all requests.
    """

    width: int | None = DEPTH + 1
    most = DEPTH + 1

    def __init__(self, head: Proposer, record: HeadRecord) -> None:
        self._head, self._times, self._accepted = head, record.times, record.accepted
        self._accepted.fade()
        self._seen: tuple[mx.array, Sequence[Any]] | None = None
        self._last: int | None = None

    def see(self, h: mx.array | None, last: int | None, cache: Sequence[Any]) -> None:
        """Stores the output of the model's last pass, see `Head.see`."""
        self._seen, self._last = None if h is None else (h, cache), last

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        """Does nothing: the head reads the body's output, not the text."""

    def share(self) -> float:
        return 0.0 if self._seen is None else self._accepted.value

    def seconds(self) -> float:
        return median_low(self._times) if self._times else math.inf

    def propose(self, most: int) -> list[int]:
        """Returns up to `most` ids that may come after the id last passed to `see`."""
        assert self._seen is not None
        assert self._last is not None
        ask = partial(self._head.propose, self._seen[0], self._last, self._seen[1])
        if not self._times:
            ask(1)  # the first call may have to compile kernels, so it is not timed
        began = time.perf_counter()
        guesses, shares = ask(min(most, self.most))
        likely = takewhile(lambda share: share >= LEAST_LIKELY, accumulate(shares, mul))
        ids = [one for one, _ in zip(guesses, likely, strict=False)]
        if ids:
            self._times.append((time.perf_counter() - began) / len(ids))
        else:
            self._accepted.note(1, 0)  # an empty draft counts as a refused id
        return ids

    def note(self, proposed: int, accepted: int) -> None:
        self._accepted.note(proposed, accepted)
