"""What passes of a model over several ids cost (`PassCosts`, kept in a `CostFile`), and how many ids save time.

On one machine a pass over eight ids costs hardly more than a pass over one id, on another six times as much. So passes
are timed. From time to time, when a draft is likely to be accepted, ids are proposed in a trial, only to measure what a
pass over that many ids costs.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from mlx_zip.errors import DataError, failure_reason
from mlx_zip.files import cache_folder, make_private, read_json_object, write_json

WIDTHS = (1, 2, 4, 8, 16)  # ids per row of a pass: the last emitted id, and the proposed ones
LEAST_GAIN = 1.02  # minimum gain: ids per second with proposed ids, divided by ids per second of passes over one id
TRIED = (2, 4, 8)  # widths of trials; a wider one is tried only after a pass of that width was timed once
SURE = 0.8  # minimum share of accepted ids for a trial
TRY_EVERY = 64  # minimum passes between two trials; also passes to wait per half pass that a trial may lose
TRY_AGAIN_EVERY = 512  # passes between two trials once the costs are known
COMPARE_EVERY = 256  # passes after which a pass over one id, to which others are compared, is timed again
WEIGH_EVERY = 8  # passes after which a draft that did not pay is weighed again
KEPT = 15  # number of latest times kept per width
KNOWN_AFTER = 2  # number of timed passes after which the cost of a width is known
SHORTEST = 8  # all contexts up to 2 ** 8 ids share their times
PRIOR, MEMORY = 4, 64  # number of ids that an initial share counts as, and at which all counts are halved
FADES = 0.9  # share of what was learned about a draft head that each new request keeps
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

    def note_draft(self, proposed: int, accepted: int) -> None:
        """Updates the estimate after a draft. Ids after the first refused id do not count."""
        self._accepted += accepted
        self._refused += accepted < proposed
        if self._accepted + self._refused > MEMORY:
            self._accepted, self._refused = self._accepted / 2, self._refused / 2

    def fade(self) -> None:
        """Moves the estimate towards the initial one, so that a source that did not pay is tried again later."""
        accepted, refused = self._first
        self._accepted = accepted + FADES * (self._accepted - accepted)
        self._refused = refused + FADES * (self._refused - refused)


class Figure(NamedTuple):
    """The kind of passes that were timed: `ids` ids in each of up to `rows` rows, on caches of up to `held` ids."""

    ids: int
    held: int
    rows: int


class PassCosts:
    """The cost of passes by width (ids per row), number of rows and length of the context.

    Rows and lengths are rounded up to powers of two. All rows of a pass have the same width; each row is one request.
    In all methods, `shares` has per row the probability that a proposed id is accepted if all proposed before it were,
    0 for a row with nothing to propose.

    The cost of a pass over several ids is stored relative to recent passes over one id, so that changes of the
    machine's speed do not matter. For this, a pass over one id is run from time to time. The lower median of the latest
    times counts, because a slow reader of the answer or other work can delay single passes. The first pass of a width
    may include an allocation or the compilation of a kernel, so a width that was timed once is tried again; until then,
    a known cost at another length takes precedence.

    passes: number of passes noted in this process. head_times: seconds per proposed id in the latest drafts of the
    model's draft head. head_share: the share of the head's ids that are accepted; fades with each new request. Two
    engines in different threads that serve one model object may lose an update of these two.
    """

    def __init__(self) -> None:
        # by (rows, length), then width: seconds of passes over one id, and multiples of these for all other widths
        self._times: dict[tuple[int, int], dict[int, _Times]] = {}
        self._known: dict[tuple[int, int], _Known] = {}  # results of `_find_known_costs`, until costs change
        self._weighed: tuple[Any, int] = None, 0  # last input and result of `best_draft_length`, until costs change
        self.passes, self._tried = 0, -TRY_AGAIN_EVERY  # so that a cheap first trial is due at once
        self.head_times, self.head_share = deque[float](maxlen=KEPT), Share(HEAD_SHARE)
        self._trial, self._in_vain = 0, 0  # the width of the last trial, and trials since one was timed

    def note_pass(self, ids: int, held: int, seconds: float, rows: int = 1, known: bool = False) -> None:
        """Notes the seconds of a pass over `ids` ids per row on a cache of `held` ids per row.

        Ignores widths that are not in `WIDTHS`. Also ignores a pass over several ids unless a pass over one id, with as
        many rows and about that length, was noted before. known: True for a figure of an earlier run, which alone makes
        the cost known and does not count in `passes`. It counts as one timed pass, so newer times soon outweigh it.
        """
        self.passes += not known
        if ids not in WIDTHS:
            return
        widths = self._times.setdefault(_power_of_two_exponents(rows, held), {})
        if ids > 1:
            if 1 not in widths:
                return
            seconds /= widths[1].lately
        elif 1 in widths and self._is_old(widths[1]):
            widths[1].forget()
        if ids not in widths:
            widths[ids] = _Times()
        times, was_known = widths[ids], widths[ids].known
        changed = times.note_cost(seconds, -COMPARE_EVERY if known else self.passes, known)
        if changed and (ids > 1 or not was_known):
            self._known.clear()
            self._weighed = None, 0
        if ids == self._trial:
            self._in_vain = 0

    def _is_old(self, one: _Times) -> bool:
        """Returns whether passes over one id were timed too long ago to compare others with them."""
        return self.passes - one.at >= COMPARE_EVERY

    def _needs_comparison(self, rows: int, held: int) -> bool:
        """Returns whether a pass over one id must be timed before a pass over several ids."""
        one = self._times.get(_power_of_two_exponents(rows, held), {}).get(1)
        return one is None or self._is_old(one)

    def next_weighing_pass(self, held: int, rows: int) -> int:
        """Returns the value of `passes` at which a draft that does not pay now is to be weighed again."""
        return self.passes + (1 if self._needs_comparison(rows, held) else WEIGH_EVERY)

    def figures(self) -> dict[Figure, float]:
        """Returns the seconds per pass for all widths whose cost is known."""
        return {
            Figure(width, 1 << length, 1 << rows): times.median * (1.0 if width == 1 else widths[1].median)
            for (rows, length), widths in list(self._times.items())  # another thread may note a pass meanwhile
            for width, times in list(widths.items())
            if times.known
        }

    def ratios(self, held: int, rows: int = 1) -> dict[int, float]:
        """Returns the cost of a pass by width, divided by that of a pass over one id, on a cache of `held` ids per row.

        If a width's cost is unknown at this length, the result has the cost at the nearest length at which it is known
        or, if there is none, at which the width was timed. Widths that were never timed are missing.
        """
        return self._find_known_costs(held, rows).ratios

    def _find_known_costs(self, held: int, rows: int) -> _Known:
        key = _power_of_two_exponents(rows, held)
        if (found := self._known.get(key)) is not None:
            return found
        timed, known, nearest = dict[int, float](), dict[int, float](), self._times_by_nearest_length(*key)
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

    def _times_by_nearest_length(self, rows: int, length: int) -> list[dict[int, _Times]]:
        """Returns the times by width for each length at which passes over one id were timed, nearest length first."""
        found = [
            (abs(key[1] - length), widths)
            for key, widths in list(self._times.items())
            if key[0] == rows and 1 in widths
        ]
        return [widths for _, widths in sorted(found, key=lambda one: one[0])]

    def _ratios_with_proposing(self, held: int, rows: int, seconds: float) -> dict[int, float]:
        """Returns `ratios` including the time to propose ids. seconds: time to propose one id to every row."""
        ratios = self.ratios(held, rows)
        if not seconds or not ratios:
            return ratios
        each = self._find_known_costs(held, rows).fraction_of_pass(seconds)
        return {width: ratio + (width - 1) * each for width, ratio in ratios.items()}

    def choose_draft_length(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many ids to propose per row: for a trial if one is due, else the result of `best_draft_length`.

        most: maximum number of ids per row. seconds: time to propose one id to every row.
        """
        return self.take_trial(shares, held, most, seconds) or self.best_draft_length(shares, held, most, seconds)

    def take_trial(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many ids to propose per row in a trial, 0 if no trial is due. Counts the trial as done.

        Arguments as in `choose_draft_length`.
        """
        width = self._find_trial(shares, held, most, seconds)
        if width is None:
            return 0
        self._tried, self._trial, self._in_vain = self.passes, width, self._in_vain + 1
        return width - 1

    def best_draft_length(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> int:
        """Returns how many proposed ids per row give the most emitted ids per second, as far as costs are known.

        Returns 0 if no number gains enough, or a pass over one id must be timed first. Arguments as in
        `choose_draft_length`.
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

    def speedup(self, shares: Sequence[float], held: int, ids: int, seconds: float = 0.0) -> float:
        """Returns ids per second emitted with `ids` proposed ids per row, divided by those of passes over one id."""
        ratios = self._ratios_with_proposing(held, len(shares), seconds)
        return 1.0 if len(ratios) < 2 else expected_ids(shares, ids) / _ratio_at(ratios, ids + 1)

    def draft_pays(self, shares: Sequence[float], held: int, most: int, seconds: float = 0.0) -> bool:
        """Returns whether proposed ids are expected to save time, or a trial is due.

        Arguments as in `choose_draft_length`.
        """
        ids = self.best_draft_length(shares, held, most, seconds)
        return ids > 0 or self._find_trial(shares, held, most, seconds) is not None

    def _find_trial(self, shares: Sequence[float], held: int, most: int, seconds: float) -> int | None:
        """Returns the width of the trial that is due now, None if no trial is due.

        The width is 2 if `seconds` is infinite, else one whose cost is unknown; if all costs are known and no width
        gains, the width in `TRIED` that loses least. After a trial that was not timed because the source proposed too
        few ids, the wait for the next trial doubles. The first trial is due at once if it is expected to lose at most
        half a pass. Before all other trials, the number of passes to wait is proportional to the expected loss.
        """
        waited = self.passes - self._tried
        if waited < TRY_EVERY or most < 1 or sum(shares) < SURE * len(shares):
            return None
        if self._needs_comparison(len(shares), held):
            return None
        known, every = self._find_known_costs(held, len(shares)), min(TRY_EVERY << self._in_vain, TRY_AGAIN_EVERY)
        if math.isinf(seconds):
            width = TRIED[0]
        elif unknown := [width for width in known.unknown if width <= most + 1]:
            width = unknown[0]
        elif waited < TRY_AGAIN_EVERY or self.best_draft_length(shares, held, most, seconds):
            return None
        else:
            ratios, every = self._ratios_with_proposing(held, len(shares), seconds), TRY_AGAIN_EVERY
            tried = (width for width in TRIED if width <= most + 1)
            width = max(tried, key=lambda width: expected_ids(shares, width - 1) / ratios[width])
        cost = width if width in known.unknown else min(width, known.ratios[width])  # at most `width` single passes
        loss = cost - expected_ids(shares, width - 1) + (width - 1) * known.fraction_of_pass(seconds)
        if 2 * loss > 1:
            waited = self.passes - max(self._tried, 0)
        return width if waited >= max(every, 2 * TRY_EVERY * loss) else None


class _Known(NamedTuple):
    """Costs of passes with one number of rows and one length of caches, both as powers of two.

    ratios: as in `PassCosts.ratios`. unknown: widths to be tried; widths that were never timed come first. one: the
    times of passes over one id, None if none was timed.
    """

    ratios: dict[int, float]
    unknown: list[int]
    one: _Times | None

    def fraction_of_pass(self, seconds: float) -> float:
        """Returns `seconds` divided by the time of a pass over one id, at most 1 (proposing an id then never gains)."""
        assert self.one is not None
        return min(1.0, seconds / self.one.median)


class PassClock:
    """Times the passes of a group. ids, rows: ids per row and rows of the running pass; ids is 0 to skip this pass."""

    def __init__(self) -> None:
        self.ids = self.rows = 0
        self._read_s = 0.0  # when the previous ids were read, which is the start of the running pass
        self._ahead = False  # whether the running pass had already begun at that time

    def exclude_seconds(self, seconds: float) -> None:
        """Excludes time spent on something else, such as proposing ids, from the running pass."""
        self._read_s += seconds

    def note_pass_end(self, costs: PassCosts | None, held: int, ahead: bool = False, goes_on: bool = False) -> None:
        """Notes the time of the pass that gave the ids just read. costs: gets the time, None to note nothing.

        held: ids per row that the cache holds. ahead: whether the next pass has already begun. The time is not noted if
        `ahead` differs from the previous call, because on a CPU ids may arrive only when the pass begun ahead is nearly
        over. goes_on: whether more ids will be chosen from this pass; if so, only the call after the last of them notes
        the time.
        """
        if goes_on:
            return
        now = time.perf_counter()
        if costs is not None and self.ids and self._read_s and ahead == self._ahead:
            costs.note_pass(self.ids, held, now - self._read_s, self.rows)
        self.ids, self._read_s, self._ahead = 0, now, ahead


class _Times:
    """Costs of the latest passes of one width, number of rows and length. median: lower median of these costs.

    known: whether enough passes were timed. lately: lower median of the last five costs. at: value of
    `PassCosts.passes` when the last cost was noted.
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

    def note_cost(self, cost: float, at: int, known: bool) -> bool:
        """Notes the cost of a pass. Returns whether `median` or `known` changed. known: True to set `known` at once."""
        before, self.at = (self.median, self.known), at
        self._last.append(cost)
        self.median = sorted(self._last)[(len(self._last) - 1) // 2]
        self.known = self.known or known or len(self._last) >= KNOWN_AFTER
        return (self.median, self.known) != before


def expected_ids(shares: Sequence[float], proposed: int) -> float:
    """Returns the mean number of ids that a pass emits per row. shares: per row, probability that an id is accepted."""
    ids = 0.0
    for share in shares:
        ids += proposed + 1.0 if share >= 1 else (1 - share ** (proposed + 1)) / (1 - share)
    return ids / len(shares)


def _best_width(shares: Sequence[float], ratios: dict[int, float], most: int) -> int:
    """Returns the width with the most ids per second; 1 if no other width gains enough, or width 2 was never timed."""
    best, gain = 1, LEAST_GAIN
    if 2 not in ratios:
        return best
    for width in WIDTHS[1:]:
        if width <= most + 1 and (found := expected_ids(shares, width - 1) / _ratio_at(ratios, width)) > gain:
            best, gain = width, found
    return best


def _ratio_at(ratios: dict[int, float], width: int) -> float:
    """Returns the ratio of a width, extrapolated linearly from the two widest known widths if it is unknown."""
    if width in ratios:
        return ratios[width]
    narrow, wide = sorted(ratios)[-2:]
    slope = (ratios[wide] - ratios[narrow]) / (wide - narrow)
    return ratios[wide] + max(0.0, slope) * (width - wide)


def _power_of_two_exponents(rows: int, held: int) -> tuple[int, int]:
    """Returns the exponents of the least powers of two not below `rows` and `held`; for `held` at least `SHORTEST`."""
    return (rows - 1).bit_length(), max(SHORTEST, (held - 1).bit_length())


# ---- costs kept from run to run

log = logging.getLogger(__name__)
SAVE_EVERY_S = 60.0  # minimum time between two writes of a file while requests arrive
_FILE_VERSION = 1
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6  # bounds on the time of a pass; a number beyond them in a file is damage
_LONGEST = 1 << 32  # upper bound on ids and rows; a larger number in a file is damage


class CostFile:
    """A file of pass times. `costs` begins with the times in the file; newer times replace them.

    key: everything that pass times depend on, by name; the file's name is a hash of the key. A file that is missing,
    damaged, of another version or of another key counts as empty. Processes may share a file: every write replaces the
    whole file.
    """

    def __init__(self, key: Mapping[str, str]) -> None:
        self._key = dict(key)
        digest = sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self.path = costs_folder() / f"{digest[:16]}.json"
        self.costs = PassCosts()
        for figure, seconds in self._read_figures().items():
            self.costs.note_pass(figure.ids, figure.held, seconds, figure.rows, known=True)
        self._saved, self._saved_s = self.costs.figures(), time.monotonic()

    def save(self, every_s: float = 0.0) -> None:
        """Writes the figures if they have changed and the last write was at least `every_s` seconds ago.

        Figures that only other processes have measured stay in the file. If the folder cannot be written to, the
        problem is logged; the next run then measures passes again.
        """
        found = self.costs.figures()
        if found == self._saved or time.monotonic() - self._saved_s < every_s:
            return
        self._saved, self._saved_s = found, time.monotonic()
        problem = make_private(self.path.parent)
        try:
            if problem is None:
                write_json(self.path, _figures_to_json(self._key, _merge_figures(self._read_figures(), found)))
        except OSError as error:
            problem = f"cannot be used: {failure_reason(error)}"
        if problem is not None:
            log.info("what passes cost is not kept: %s %s", self.path.parent, problem)

    def _read_figures(self) -> dict[Figure, float]:
        """Returns the figures in the file, none if the file cannot be used."""
        try:
            return _figures_from_json(self._key, read_json_object(self.path))
        except (DataError, ValueError, TypeError, KeyError) as error:
            log.debug("%s: what passes cost is timed anew: %s", self.path, error)
            return {}


def _merge_figures(others: Mapping[Figure, float], own: Mapping[Figure, float]) -> dict[Figure, float]:
    """Merges figures; a figure in `own` replaces the same figure in `others`.

    The seconds in `others` are multiplied by `own` / `others` for passes over one id with equal `held` and `rows`, so
    that all figures can be compared.
    """
    ones = {(one.held, one.rows): own[one] / others[one] for one in own if one.ids == 1 and one in others}
    return {one: seconds * ones.get((one.held, one.rows), 1.0) for one, seconds in others.items()} | dict(own)


def costs_folder() -> Path:
    """Returns the folder of the files; it may not exist yet."""
    return cache_folder() / "pass-costs"


def _figures_to_json(key: Mapping[str, str], figures: Mapping[Figure, float]) -> dict[str, Any]:
    passes = [{**figure._asdict(), "seconds": seconds} for figure, seconds in sorted(figures.items())]
    return {"version": _FILE_VERSION, "key": dict(key), "passes": passes}


def _figures_from_json(key: Mapping[str, str], data: Any) -> dict[Figure, float]:
    """Returns the figures in a file's data. Raises `ValueError`, `TypeError` or `KeyError` if the data is unusable."""
    if data["version"] != _FILE_VERSION or data["key"] != key:
        raise ValueError("the file is of another version or of another key")
    return {
        Figure(*(_checked_int(one[name]) for name in Figure._fields)): _checked_seconds(one["seconds"])
        for one in data["passes"]
    }


def _checked_int(number: Any) -> int:
    if type(number) is not int or not 0 < number < _LONGEST:
        raise ValueError(f"{number!r:.80} is not a number of ids or rows")
    return number


def _checked_seconds(number: Any) -> float:
    if type(number) not in (int, float) or not _LEAST_SECONDS < number < _MOST_SECONDS:
        raise ValueError(f"{number!r:.80} is not the time of a pass")
    return float(number)
