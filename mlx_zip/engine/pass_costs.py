"""`PassCosts`: what passes of a model over several ids cost, and how many proposed ids are worth their pass.

On one machine a pass over eight ids costs hardly more than a pass over one, on another six times as much. So nothing is
assumed: the passes that happen are timed, and now and then, when the next ids are almost sure, some are proposed to
learn what that costs.
"""

from __future__ import annotations

import math
from collections import deque

WIDTHS = (1, 2, 4, 8, 16)  # ids of a pass: the last one, and those that are proposed
LEAST_GAIN = 1.02  # of base tokens per second over a pass of one id, below which nothing is proposed
TRIED = (2, 4, 8)  # widths of trials
SURE = 0.8  # share of accepted ids from which on a pass may be tried to learn its cost
TRY_EVERY, TRY_AGAIN_EVERY = 64, 512  # passes between two trials while the cost is unknown, and once it is known
KEPT = 15  # times per width
SHORTEST = 8  # contexts below 2 ** 8 ids have one curve


class PassCosts:
    """Seconds of passes by their width and by the length of the context, in powers of two.

    Of the last times the lower quartile counts: whoever reads the answer may pause, and other work may come between,
    but nothing makes a pass shorter.
    """

    def __init__(self) -> None:
        self._times: dict[int, dict[int, deque[float]]] = {}  # by length and width
        self._passes, self._tried = 0, -TRY_AGAIN_EVERY

    def note(self, ids: int, held: int, seconds: float) -> None:
        """Notes a pass over `ids` ids on a cache of `held` ids. Other widths than those of `WIDTHS` are not noted."""
        self._passes += 1
        if ids in WIDTHS:
            times = self._times.setdefault(_bucket(held), {})
            times.setdefault(ids, deque(maxlen=KEPT)).append(seconds)

    def ratios(self, held: int) -> dict[int, float]:
        """Returns what passes of known widths cost in relation to a pass over one id, on a cache of `held` ids.

        Widths that were not timed with such a cache have the ratio of the nearest length at which they were.
        """
        found: dict[int, float] = {}
        for times in self._nearest(held):
            for width in times:
                found.setdefault(width, _quartile(times[width]) / _quartile(times[1]))
        return found

    def _nearest(self, held: int) -> list[dict[int, deque[float]]]:
        """Returns the times by width of each length at which passes over one id were timed, the nearest one first."""
        lengths = sorted(self._times, key=lambda length: abs(length - _bucket(held)))
        return [self._times[length] for length in lengths if 1 in self._times[length]]

    def _ratios_with_proposing(self, held: int, seconds: float) -> dict[int, float]:
        """Returns `ratios` of passes and what it takes to propose their ids. seconds: per proposed id."""
        ratios = self.ratios(held)
        if not seconds or not ratios:
            return ratios
        each = seconds / _quartile(self._nearest(held)[0][1])
        return {width: ratio + (width - 1) * each for width, ratio in ratios.items()}

    def choose_width(self, share: float, held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many ids to propose, 0 for none: what makes the most base tokens per second.

        share: of proposed ids that are accepted, each if those before it were. most: ids that may be proposed.
        seconds: how long an id takes to be proposed.
        """
        ratios = self._ratios_with_proposing(held, seconds)
        if most < 1 or 1 not in ratios:
            return 0
        best = _best_width(share, ratios, most)
        if best == 1:
            return self._try(share, ratios, most)
        unknown = (width for width in WIDTHS if width not in ratios and width <= best)
        return next(unknown, best) - 1  # a width that was never timed is reached step by step

    def pays(self, share: float, held: int, most: int, seconds: float = 0.0) -> bool:
        """Returns whether proposed ids are expected to be worth their pass, or it is time to try what they cost."""
        ratios = self._ratios_with_proposing(held, seconds)
        return 1 in ratios and (self._is_trial_due(share, ratios, most) or _best_width(share, ratios, most) > 1)

    def _is_trial_due(self, share: float, ratios: dict[int, float], most: int) -> bool:
        every = TRY_EVERY if _untimed(ratios, most) else TRY_AGAIN_EVERY
        return share >= SURE and self._passes - self._tried >= every

    def _try(self, share: float, ratios: dict[int, float], most: int) -> int:
        """Returns how many ids to propose to learn what their pass costs, 0 as long as it is not the time for it.

        The narrowest width of `TRIED` that was never timed is next, and then the one that costs least.
        """
        if not self._is_trial_due(share, ratios, most):
            return 0
        self._tried = self._passes
        unknown = _untimed(ratios, most)
        known = [width for width in TRIED if width <= most + 1]
        return (unknown or [max(known, key=lambda width: expected_ids(share, width - 1) / ratios[width])])[0] - 1


def _untimed(ratios: dict[int, float], most: int) -> list[int]:
    return [width for width in TRIED if width not in ratios and width <= most + 1]


def expected_ids(share: float, proposed: int) -> float:
    """Returns how many ids a pass emits on average if each proposed id is accepted with this probability."""
    return sum(share**n for n in range(proposed + 1))


def _best_width(share: float, ratios: dict[int, float], most: int) -> int:
    """Returns the width with the most ids per second, 1 if no other gains enough or nothing is known of two ids."""
    best, gain = 1, LEAST_GAIN
    for width in (width for width in WIDTHS[1:] if width <= most + 1 and 2 in ratios):
        if (found := expected_ids(share, width - 1) / _ratio_at(ratios, width)) > gain:
            best, gain = width, found
    return best


def _ratio_at(ratios: dict[int, float], width: int) -> float:
    """Returns the ratio of a width; one that is not known lies on the line through the two widest that are known."""
    if width in ratios:
        return ratios[width]
    narrow, wide = sorted(ratios)[-2:]
    slope = (ratios[wide] - ratios[narrow]) / (wide - narrow)
    return ratios[wide] + max(0.0, slope) * (width - wide)


def _bucket(held: int) -> int:
    return max(SHORTEST, math.ceil(math.log2(max(1, held))))


def _quartile(times: deque[float]) -> float:
    return sorted(times)[len(times) // 4]
