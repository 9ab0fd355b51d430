"""`PassCosts`: what passes of a model over several ids cost, and how many proposed ids are worth their pass.

On one machine a pass over eight ids costs hardly more than a pass over one, on another six times as much. So nothing is
assumed: all passes are timed, and now and then, when drafts are likely to be accepted, ids are proposed in a trial, to
measure what such a pass costs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTHS = (1, 2, 4, 8, 16)  # ids per row of a pass: the last emitted id, and the proposed ones
LEAST_GAIN = 1.02  # minimum ids per second relative to passes over one id; with less, nothing is proposed
TRIED = (2, 4, 8)  # widths of trials; a wider one is tried only after a pass of it was timed once
SURE = 0.8  # minimum share of accepted ids for a trial
TRY_EVERY = 64  # minimum passes between two trials, and passes per half pass that a trial is expected to lose
TRY_AGAIN_EVERY = 512  # passes between two trials once the costs are known
COMPARE_EVERY = 256  # passes after which one over one id, to which the others are compared, is timed again
WEIGH_EVERY = 8  # passes after which a draft that was not worth its pass is weighed again
KEPT = 15  # last times kept per width
KNOWN_AFTER = 2  # timed passes of a width, from which on its cost is known
SHORTEST = 8  # all contexts up to 2 ** 8 ids share their times
PRIOR, MEMORY = 4, 64  # ids that an initial share counts as, and ids after which all counts are halved
FADES = 0.9  # share of what was learned of a draft head that each new request keeps
HEAD_SHARE = 0.85  # assumed share of accepted ids of a draft head before any draft, high enough for a trial


class Share:
    """Estimates the share of accepted ids: how likely a proposed id is accepted if all ids before it in the draft were.

    first: the estimate before any draft.
    """

    def __init__(self, first: float) -> None:
        self._first = first * PRIOR, (1 - first) * PRIOR  # counts as much as four drafts of one id
        self._accepted, self._refused = self._first

    @property
    def value(self) -> float:
        return self._accepted / (self._accepted + self._refused)

    def note(self, proposed: int, accepted: int) -> None:
        """Learns from a draft. Ids after its first refused one say nothing."""
        self._accepted += accepted
        self._refused += accepted < proposed
        if self._accepted + self._refused > MEMORY:
            self._accepted, self._refused = self._accepted / 2, self._refused / 2

    def fade(self) -> None:
        """Moves the estimate towards that before any draft, so that a source once given up is tried again some day."""
        accepted, refused = self._first
        self._accepted = accepted + FADES * (self._accepted - accepted)
        self._refused = refused + FADES * (self._refused - refused)


class HeadRecord:
    """Figures of a model's draft head over all requests. times: of the last drafts, seconds per proposed id.

    accepted: the share of its ids that are accepted; fades with each new request.
    """

    def __init__(self) -> None:
        self.times, self.accepted = deque[float](maxlen=KEPT), Share(HEAD_SHARE)


class Figure(NamedTuple):
    """The kind of passes that were timed: `ids` ids in each of up to `rows` rows, on caches of up to `held` ids."""

    ids: int
    held: int
    rows: int


class PassCosts:
    """The cost of passes by width (ids per row), and in powers of two by number of rows and by length of the context.

    All rows of a pass have the same width; each row is one request. In all methods, shares has per row the probability
    that a proposed id is accepted if all before it were, 0 for a row with nothing to propose.

    The cost of a pass over several ids is kept relative to recent passes over one id, so a machine whose speed varies
    changes nothing; where all passes are over several ids, one over one id is run now and then. The lower median of the
    last times counts, because a slow reader of the answer and other work can delay single passes. The first pass of a
    width may include an allocation or the compilation of a kernel, so a width that was timed once is tried again; until
    then, a known cost at another length takes precedence.

    passes: number of passes noted in this process.
    """

    def __init__(self) -> None:
        # by (rows, length), then width: seconds of passes over one id, and multiples of these for all other widths
        self._times: dict[tuple[int, int], dict[int, _Times]] = {}
        self._known: dict[tuple[int, int], _Known] = {}  # results of `_find_known`, until costs change
        self._weighed: tuple[Any, int] = None, 0  # last input and result of `best_ids`, until costs change
        self.passes, self._tried = 0, -TRY_AGAIN_EVERY  # so a first trial that is cheap comes at once
        self.head = HeadRecord()
        self._trial, self._in_vain = 0, 0  # the width of the last trial, and trials since one was timed

    def note(self, ids: int, held: int, seconds: float, rows: int = 1, known: bool = False) -> None:
        """Notes the seconds of a pass over `ids` ids per row on a cache of `held` ids per row, for widths in `WIDTHS`.

        A pass over several ids is not noted until one over one id, with as many rows and about that length, was. known:
        True for a figure of an earlier run, which alone makes the cost known and does not count in `passes`.
        """
        self.passes += not known
        if ids not in WIDTHS:
            return
        widths = self._times.setdefault(_kind(rows, held), {})
        if ids > 1:
            if 1 not in widths:
                return
            seconds /= widths[1].lately
        elif 1 in widths and self._is_old(widths[1]):
            widths[1].forget()
        if ids not in widths:
            widths[ids] = _Times()
        times, was_known = widths[ids], widths[ids].known
        changed = times.note(seconds, -COMPARE_EVERY if known else self.passes, known)
        if changed and (ids > 1 or not was_known):
            self._known.clear()
            self._weighed = None, 0
        if ids == self._trial:
            self._in_vain = 0

    def _is_old(self, one: _Times) -> bool:
        """Returns whether passes over one id were timed too long ago to compare others with them."""
        return self.passes - one.at >= COMPARE_EVERY

    def _needs_comparison(self, rows: int, held: int) -> bool:
        """Returns whether a pass over one id has to come before one over several."""
        one = self._times.get(_kind(rows, held), {}).get(1)
        return one is None or self._is_old(one)

    def weigh_again_at(self, held: int, rows: int) -> int:
        """Returns the value of `passes` from which on a draft that is not worth its pass now is to be weighed again."""
        return self.passes + (1 if self._needs_comparison(rows, held) else WEIGH_EVERY)

    def figures(self) -> dict[Figure, float]:
        """Returns the seconds of passes, for all widths whose cost is known."""
        return {
            Figure(width, 1 << length, 1 << rows): times.median * (1.0 if width == 1 else widths[1].median)
            for (rows, length), widths in list(self._times.items())  # another thread may note a pass meanwhile
            for width, times in list(widths.items())
            if times.known
        }

    def note_figure(self, figure: Figure, seconds: float) -> None:
        """Notes a figure of an earlier run. It counts as one pass, so newer times soon take its place."""
        self.note(figure.ids, figure.held, seconds, figure.rows, known=True)

    def ratios(self, held: int, rows: int = 1) -> dict[int, float]:
        """Returns the cost of a pass of each timed width, relative to a pass over one id, on a cache of `held` ids.

        A width whose cost is unknown at this length has the cost at the nearest length where it is known or, if there
        is none, where it was timed.
        """
        return self._find_known(held, rows).ratios

    def _find_known(self, held: int, rows: int) -> _Known:
        key = _kind(rows, held)
        if (found := self._known.get(key)) is not None:
            return found
        timed, known, nearest = dict[int, float](), dict[int, float](), self._nearest(*key)
        for times in nearest:
            for width in list(times):
                ratio = 1.0 if width == 1 else times[width].median
                timed.setdefault(width, ratio)
                if times[width].known:
                    known.setdefault(width, ratio)
        unknown = [width for width in WIDTHS[1:] if width not in known and (width in TRIED or width in timed)]
        unknown.sort(key=lambda width: width in timed)
        found = self._known[key] = _Known({**timed, **known}, unknown, nearest[0][1] if nearest else None)
        return found

    def _nearest(self, rows: int, length: int) -> list[dict[int, _Times]]:
        """Returns the times by width for each length at which passes over one id were timed, nearest length first."""
        found = [
            (abs(key[1] - length), widths)
            for key, widths in list(self._times.items())
            if key[0] == rows and 1 in widths
        ]
        return [widths for _, widths in sorted(found, key=lambda one: one[0])]

    def _ratios_with_proposing(self, held: int, rows: int, seconds: float) -> dict[int, float]:
        """Returns `ratios`, with the time to propose the ids included. seconds: to propose one id to each row."""
        ratios = self.ratios(held, rows)
        if not seconds or not ratios:
            return ratios
        each = self._find_known(held, rows).share_of_pass(seconds)
        return {width: ratio + (width - 1) * each for width, ratio in ratios.items()}

    def choose_ids(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many ids to propose per row: those of a trial that is due, else the result of `best_ids`.

        most: maximum number of ids. seconds: how long it takes to propose one id to each row.
        """
        return self.take_trial(shares, held, most, seconds) or self.best_ids(shares, held, most, seconds)

    def take_trial(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many ids to propose in a trial, 0 if none is due. The trial counts as done.

        Arguments as in `choose_ids`.
        """
        width = self._find_trial(shares, held, most, seconds)
        if width is None:
            return 0
        self._tried, self._trial, self._in_vain = self.passes, width, self._in_vain + 1
        return width - 1

    def best_ids(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many proposed ids give the most emitted ids per second, as far as costs are known.

        0 if no number gains enough, or a pass over one id is due. Arguments as in `choose_ids`.
        """
        if self._needs_comparison(len(shares), held):
            return 0
        ratios = self._ratios_with_proposing(held, len(shares), seconds)
        weighed = shares, ratios, most
        if weighed != self._weighed[0]:
            best = _best_width(shares, ratios, most)
            untimed = (width for width in WIDTHS if width not in ratios and width <= best)
            self._weighed = weighed, next(untimed, best) - 1  # the narrowest width that was never timed comes first
        return self._weighed[1]

    def gain(self, shares: Sequence[float], held: int, ids: int, seconds: float = 0.0) -> float:
        """Returns the emitted ids per second with `ids` proposed ids, relative to passes over one id."""
        ratios = self._ratios_with_proposing(held, len(shares), seconds)
        return 1.0 if len(ratios) < 2 else expected_ids(shares, ids) / _ratio_at(ratios, ids + 1)

    def pays(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> bool:
        """Returns whether proposed ids are expected to be worth their pass, or a trial is due."""
        ids = self.best_ids(shares, held, most, seconds)
        return ids > 0 or self._find_trial(shares, held, most, seconds) is not None

    def _find_trial(self, shares: Sequence[float], held: int, most: int, seconds: float) -> int | None:
        """Returns the width of the trial that is due now, None if none is.

        It is a width whose cost is unknown; if all are known and nothing gains, the one of `TRIED` that loses least;
        for a source whose `seconds` are infinite, 2. After a trial that was not timed, because the source proposed
        fewer ids than asked for, the wait for the next one doubles. The first trial comes at once unless it may lose
        more than half a pass; that one, and all later ones, must wait for passes in proportion to the expected loss.
        """
        waited = self.passes - self._tried
        if waited < TRY_EVERY or most < 1 or sum(shares) < SURE * len(shares):
            return None
        if self._needs_comparison(len(shares), held):
            return None
        known, every = self._find_known(held, len(shares)), min(TRY_EVERY << self._in_vain, TRY_AGAIN_EVERY)
        if math.isinf(seconds):
            width = TRIED[0]
        elif unknown := [width for width in known.unknown if width <= most + 1]:
            width = unknown[0]
        elif waited < TRY_AGAIN_EVERY or self.best_ids(shares, held, most, seconds):
            return None
        else:
            ratios, every = self._ratios_with_proposing(held, len(shares), seconds), TRY_AGAIN_EVERY
            tried = (width for width in TRIED if width <= most + 1)
            width = max(tried, key=lambda width: expected_ids(shares, width - 1) / ratios[width])
        cost = width if width in known.unknown else min(width, known.ratios[width])  # at most `width` single passes
        loss = cost - expected_ids(shares, width - 1) + (width - 1) * known.share_of_pass(seconds)
        if 2 * loss > 1:
            waited = self.passes - max(self._tried, 0)
        return width if waited >= max(every, 2 * TRY_EVERY * loss) else None


class _Known(NamedTuple):
    """Costs of passes with one number of rows and one length of caches, both as powers of two.

    ratios: as in `PassCosts.ratios`. unknown: the widths that are to be tried, those that were never timed first.
    one: the times of passes over one id, None if none was timed.
    """

    ratios: dict[int, float]
    unknown: list[int]
    one: _Times | None

    def share_of_pass(self, seconds: float) -> float:
        """Returns a time relative to a pass over one id, at most 1: proposing an id that takes as long never gains."""
        return min(1.0, seconds / self.one.median)


class PassClock:
    """Times the passes of one group of requests. ids, rows: of the pass that runs; ids 0: it is not to be timed."""

    def __init__(self) -> None:
        self.ids = self.rows = 0
        self._read_s = 0.0  # when the previous ids were read, which is the start of the running pass
        self._ahead = False  # whether the running pass had already begun by then

    def leave_out(self, seconds: float) -> None:
        """Excludes time spent on something else, such as proposing ids, from the running pass."""
        self._read_s += seconds

    def note_read(self, costs: PassCosts | None, held: int, ahead: bool = False, goes_on: bool = False) -> None:
        """Notes the time of the pass that gave the ids just read. costs: gets the time, None to note nothing.

        held: ids per row that the cache holds. ahead: whether the next pass has already begun. If this differs from the
        last call, the time is not noted: on a CPU the ids arrive hardly before the pass begun ahead is over. goes_on:
        whether more ids will be chosen from this pass, which takes the host some time: the last of them notes it.
        """
        if goes_on:
            return
        now = time.perf_counter()
        if costs is not None and self.ids and self._read_s and ahead == self._ahead:
            costs.note(self.ids, held, now - self._read_s, self.rows)
        self.ids, self._read_s, self._ahead = 0, now, ahead


class _Times:
    """Costs of the last passes of one width, number of rows and length. median: their lower median.

    known: whether enough passes were timed. lately: the lower median of the last five. at: number of the last one among
    `PassCosts.passes`.
    """

    def __init__(self) -> None:
        self._last, self.median, self.known = deque[float](maxlen=KEPT), 0.0, False
        self.at = 0

    @property
    def lately(self) -> float:
        last = sorted(list(self._last)[-5:])
        return last[(len(last) - 1) // 2]

    def forget(self) -> None:
        """Forgets the costs, but not `known`."""
        self._last.clear()

    def note(self, cost: float, at: int, known: bool) -> bool:
        """Notes the cost of a pass; returns whether `median` or `known` changed. known: whether this one is enough."""
        before, self.at = (self.median, self.known), at
        self._last.append(cost)
        self.median = sorted(self._last)[(len(self._last) - 1) // 2]
        self.known = self.known or known or len(self._last) >= KNOWN_AFTER
        return (self.median, self.known) != before


def expected_ids(shares: Sequence[float], proposed: int) -> float:
    """Returns how many ids a pass emits per row on average if proposed ids are accepted with these probabilities."""
    ids = 0.0
    for share in shares:
        ids += proposed + 1.0 if share >= 1 else (1 - share ** (proposed + 1)) / (1 - share)
    return ids / len(shares)


def _best_width(shares: Sequence[float], ratios: dict[int, float], most: int) -> int:
    """Returns the width with the most ids per second, 1 if no other gains enough or width 2 was never timed."""
    best, gain = 1, LEAST_GAIN
    if 2 not in ratios:
        return best
    for width in WIDTHS[1:]:
        if width <= most + 1 and (found := expected_ids(shares, width - 1) / _ratio_at(ratios, width)) > gain:
            best, gain = width, found
    return best


def _ratio_at(ratios: dict[int, float], width: int) -> float:
    """Returns the ratio of a width; one that is not known lies on the line through the two widest that are known."""
    if width in ratios:
        return ratios[width]
    narrow, wide = sorted(ratios)[-2:]
    slope = (ratios[wide] - ratios[narrow]) / (wide - narrow)
    return ratios[wide] + max(0.0, slope) * (width - wide)


def _kind(rows: int, held: int) -> tuple[int, int]:
    """Returns the exponents of the least powers of two not below `rows` and `held`; for `held` at least `SHORTEST`."""
    return (rows - 1).bit_length(), max(SHORTEST, (held - 1).bit_length())
