"""`PassCosts`: what passes of a model over several ids cost, and how many proposed ids are worth their pass.

On one machine a pass over eight ids costs hardly more than a pass over one, on another six times as much. So nothing is
assumed: the passes that happen are timed, and now and then, when the next ids are almost sure, some are proposed to
learn what that costs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTHS = (1, 2, 4, 8, 16)  # ids of a pass: the last one, and those that are proposed
LEAST_GAIN = 1.02  # of ids per second over a pass of one id, below which nothing is proposed
TRIED = (2, 4, 8)  # widths of trials; a wider one is tried only after a pass of it was timed once
SURE = 0.8  # share of accepted ids from which on a pass may be tried to learn its cost
TRY_EVERY = 64  # least passes between two trials, and passes for each half pass that a trial is expected to cost
TRY_AGAIN_EVERY = 512  # passes before a trial once the costs are known
COMPARE_EVERY = 256  # passes before one over one id, with which the others are compared
WEIGH_EVERY = 8  # passes after which ids that were not worth a pass are weighed again
KEPT = 15  # times per width
KNOWN_AFTER = 2  # timed passes of a width, from which on its cost is known
SHORTEST = 8  # contexts below 2 ** 8 ids have one curve
PRIOR, MEMORY = 4, 64  # drafted ids that a first share counts as much as, and ids after which older ones count half
FADES = 0.9  # what a request leaves of what earlier ones have learned of a draft head
HEAD_SHARE = 0.85  # of a draft head's ids that are accepted, before any draft: so much that one is tried


class Share:
    """The share of proposed ids that are accepted, each if those before it were. first: before any draft."""

    def __init__(self, first: float) -> None:
        self._first = first * PRIOR, (1 - first) * PRIOR  # counts as much as four drafts of one id
        self._accepted, self._refused = self._first

    @property
    def value(self) -> float:
        return self._accepted / (self._accepted + self._refused)

    def note(self, proposed: int, accepted: int) -> None:
        """Learns from a draft; what came after its first refused id was never asked."""
        self._accepted += accepted
        self._refused += accepted < proposed
        if self._accepted + self._refused > MEMORY:
            self._accepted, self._refused = self._accepted / 2, self._refused / 2

    def fade(self) -> None:
        """Goes a step back to what was before any draft, so that in the end one is tried again."""
        accepted, refused = self._first
        self._accepted = accepted + FADES * (self._accepted - accepted)
        self._refused = refused + FADES * (self._refused - refused)


class HeadRecord:
    """What the drafts of a model's head take and give, in all requests. times: the last ones, seconds per proposed id.

    accepted: the share of its ids that are accepted; it fades with each request.
    """

    def __init__(self) -> None:
        self.times, self.accepted = deque[float](maxlen=KEPT), Share(HEAD_SHARE)


class Figure(NamedTuple):
    """Which passes a figure is of: over so many ids in each of up to `rows` rows, on caches of up to `held` ids."""

    ids: int
    held: int
    rows: int


class PassCosts:
    """What passes cost by their width, and in powers of two by their rows and by the length of the context.

    A pass reads as many ids in each of its rows, one per request. shares: per row, of proposed ids that are accepted,
    each if those before it were; 0 for a row with nothing to propose.

    A pass over several ids is compared with those over one id shortly before, so a machine that is faster at one time
    and slower at another changes nothing; where all passes are over several ids, one over one id comes now and then.
    The lower median of the last times counts, because the reader of the answer may pause and other work may come
    between. The first pass of a width may also have waited for memory or for a kernel that was compiled, so a width
    that was timed once is tried again, and a time of another length counts more until then.

    passes: how many were noted in this process.
    """

    def __init__(self) -> None:
        # by rows and length, and by width: seconds of passes over one id, and how many such passes others cost
        self._times: dict[tuple[int, int], dict[int, _Times]] = {}
        self._known: dict[tuple[int, int], _Known] = {}  # by rows and length, if asked for since `note`
        self._weighed: tuple[Any, int] = None, 0  # what `best_ids` weighed last since then, and what it found
        self.passes, self._tried = 0, -TRY_AGAIN_EVERY  # so a first trial that is cheap comes at once
        self.head = HeadRecord()
        self._trial, self._in_vain = 0, 0  # the width of the last trial, and trials since one was timed

    def note(self, ids: int, held: int, seconds: float, rows: int = 1, known: bool = False) -> None:
        """Notes a pass over `ids` ids per row on a cache of `held` ids per row; only widths of `WIDTHS` are noted.

        One over several ids is left out until one over one id of its kind was noted. known: whether this time, of
        an earlier run, is enough to know what such passes cost.
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
        """Returns the number of the pass (of `passes`) before which ids that are not worth one now need no new look."""
        return self.passes + (1 if self._needs_comparison(rows, held) else WEIGH_EVERY)

    def figures(self) -> dict[Figure, float]:
        """Returns the seconds of passes whose width is known."""
        return {
            Figure(width, 1 << length, 1 << rows): times.median * (1.0 if width == 1 else widths[1].median)
            for (rows, length), widths in list(self._times.items())  # another thread may note a pass meanwhile
            for width, times in list(widths.items())
            if times.known
        }

    def note_figure(self, figure: Figure, seconds: float) -> None:
        """Notes what an earlier run has found: it counts as one pass, so newer times soon take its place."""
        self.note(figure.ids, figure.held, seconds, figure.rows, known=True)

    def ratios(self, held: int, rows: int = 1) -> dict[int, float]:
        """Returns what passes of timed widths cost in relation to a pass over one id, on a cache of `held` ids.

        Widths that are not known of such caches have the ratio of the nearest length at which they are; if there is
        none, at which they were timed.
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
        """Returns the times by width of each length at which passes over one id were timed, the nearest one first."""
        found = [
            (abs(key[1] - length), widths)
            for key, widths in list(self._times.items())
            if key[0] == rows and 1 in widths
        ]
        return [widths for _, widths in sorted(found, key=lambda one: one[0])]

    def _ratios_with_proposing(self, held: int, rows: int, seconds: float) -> dict[int, float]:
        """Returns `ratios` of passes and what it takes to propose their ids. seconds: per id of all rows."""
        ratios = self.ratios(held, rows)
        if not seconds or not ratios:
            return ratios
        each = self._find_known(held, rows).share_of_pass(seconds)
        return {width: ratio + (width - 1) * each for width, ratio in ratios.items()}

    def choose_ids(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many ids to propose per row, 0 for none: those of a trial, or what makes the most ids per second.

        most: ids that may be proposed. seconds: how long it takes to propose one id to each row.
        """
        return self.take_trial(shares, held, most, seconds) or self.best_ids(shares, held, most, seconds)

    def take_trial(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many ids to propose to learn what they cost, 0 if it is not the time for that.

        It counts as done then. Arguments as in `choose_ids`.
        """
        width = self._find_trial(shares, held, most, seconds)
        if width is None:
            return 0
        self._tried, self._trial, self._in_vain = self.passes, width, self._in_vain + 1
        return width - 1

    def best_ids(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many ids make the most ids per second, as far as is known; 0 if a pass over one id is due.

        Arguments as in `choose_ids`.
        """
        if self._needs_comparison(len(shares), held):
            return 0
        ratios = self._ratios_with_proposing(held, len(shares), seconds)
        weighed = shares, ratios, most
        if weighed != self._weighed[0]:
            best = _best_width(shares, ratios, most)
            untimed = (width for width in WIDTHS if width not in ratios and width <= best)
            self._weighed = weighed, next(untimed, best) - 1  # a width never timed is reached step by step
        return self._weighed[1]

    def gain(self, shares: Sequence[float], held: int, ids: int, seconds: float = 0.0) -> float:
        """Returns the ids per second with so many proposed ones; a pass over one id has 1."""
        ratios = self._ratios_with_proposing(held, len(shares), seconds)
        return 1.0 if len(ratios) < 2 else expected_ids(shares, ids) / _ratio_at(ratios, ids + 1)

    def pays(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> bool:
        """Returns whether proposed ids are expected to be worth their pass, or it is time to try what they cost."""
        ids = self.best_ids(shares, held, most, seconds)
        return ids > 0 or self._find_trial(shares, held, most, seconds) is not None

    def _find_trial(self, shares: Sequence[float], held: int, most: int, seconds: float) -> int | None:
        """Returns the width of a pass that is to be timed now, None as long as it is not the time for that.

        A width that is not known is next, and then, where nothing gains, the one of `TRIED` that costs least; of a
        source whose `seconds` are not known, two ids. After a trial that was not timed, because fewer ids came than
        were wanted, the next is waited for twice as long. A first one comes at once, unless it may cost more than half
        a pass: then the passes before it have to pay for it, as for all later ones.
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
        cost = width if width in known.unknown else min(width, known.ratios[width])  # at most that of as many passes
        loss = cost - expected_ids(shares, width - 1) + (width - 1) * known.share_of_pass(seconds)
        if 2 * loss > 1:
            waited = self.passes - max(self._tried, 0)
        return width if waited >= max(every, 2 * TRY_EVERY * loss) else None


class _Known(NamedTuple):
    """What is known of passes on as many rows and about as long caches.

    ratios: as in `PassCosts.ratios`. unknown: the widths that are to be tried, those that were never timed first.
    one: the times of passes over one id, None if none was timed.
    """

    ratios: dict[int, float]
    unknown: list[int]
    one: _Times | None

    def share_of_pass(self, seconds: float) -> float:
        """Returns a time in relation to a pass over one id: at most 1, from which on proposing an id never gains."""
        return min(1.0, seconds / self.one.median)


class PassClock:
    """Times the passes of one group of requests. ids, rows: of the pass that runs, 0 for none that is to be timed."""

    def __init__(self) -> None:
        self.ids = self.rows = 0
        self._read_s = 0.0  # when the ids before were read, from when on a pass counts
        self._ahead = False  # whether the next pass had begun by then

    def leave_out(self, seconds: float) -> None:
        """Leaves out time in which something else was done, such as proposing ids."""
        self._read_s += seconds

    def note_read(self, costs: PassCosts | None, held: int, ahead: bool = False, goes_on: bool = False) -> None:
        """Notes the pass from which the ids were chosen that have just been read. costs: None to note nothing.

        held: ids per row that the cache holds. ahead: whether the next pass has begun. A pass is not noted if that has
        changed: where the device is the CPU, ids come hardly before the pass that was begun is over. goes_on: whether
        more ids will be chosen from the pass, which takes the host some time: it is noted with the last one.
        """
        if goes_on:
            return
        now = time.perf_counter()
        if costs is not None and self.ids and self._read_s and ahead == self._ahead:
            costs.note(self.ids, held, now - self._read_s, self.rows)
        self.ids, self._read_s, self._ahead = 0, now, ahead


class _Times:
    """What the last passes of one kind and width cost, and the lower median. known: whether these are enough.

    lately: the lower median of the last five. at: how many passes had been noted when the last one was.
    """

    def __init__(self) -> None:
        self._last, self.median, self.known = deque[float](maxlen=KEPT), 0.0, False
        self.at = 0

    @property
    def lately(self) -> float:
        last = sorted(list(self._last)[-5:])
        return last[(len(last) - 1) // 2]

    def forget(self) -> None:
        """Forgets what passes cost, but not whether enough of them were timed."""
        self._last.clear()

    def note(self, cost: float, at: int, known: bool) -> bool:
        """Notes what a pass cost, with `known` all that is needed; returns whether what is known is different now."""
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
    """Returns the width with the most ids per second, 1 if no other gains enough or nothing is known of two ids."""
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
    """Returns the exponents of the lowest powers of two that are at least `rows` and `held`, but see `SHORTEST`."""
    return (rows - 1).bit_length(), max(SHORTEST, (held - 1).bit_length())
