"""Drafts: ids that may come next, proposed so that one pass of the model can check several of them.

A draft never changes what is emitted. One pass reads the last emitted id and the proposed ids. Each next id is chosen
from the model's logits with the request's penalties, constraint and random numbers, as without a draft. The first
proposed id that differs from the chosen id ends the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mlx_zip.codec import Codebook
from mlx_zip.codec.ids import Uint32s
from mlx_zip.engine.draft_sources import MOST_PROPOSED, Head, Source
from mlx_zip.engine.options import DRAFT_TOKENS
from mlx_zip.engine.pass_costs import PassCosts
from mlx_zip.errors import CodecError, GenerationError

DRAFTS = ("off", "lookup", "head", "auto")


def check_draft_options(draft: str, num_draft_tokens: int = DRAFT_TOKENS) -> None:
    """Raises `GenerationError` unless `draft` is in `DRAFTS` and `num_draft_tokens` is from 1 to `MOST_PROPOSED`."""
    if draft not in DRAFTS:
        raise GenerationError(f"draft (--draft) must be one of {', '.join(DRAFTS)}, got {draft!r:.80}")
    if type(num_draft_tokens) is not int or not 1 <= num_draft_tokens <= MOST_PROPOSED:
        raise GenerationError(
            f"num_draft_tokens (--num-draft-tokens) must be an integer from 1 to {MOST_PROPOSED}, "
            f"got {num_draft_tokens!r:.80}"
        )


class Offer(NamedTuple):
    """A source that has ids to propose.

    share, seconds: what the source's methods `acceptance_share` and `seconds_per_id` return.
    """

    source: Source
    share: float
    seconds: float


class Drafter:
    """Proposes ids for one request, and counts them.

    costs: the pass costs that decide how many ids are proposed. If None, the source's `width` decides or, if that is
    None, `own_width`: it doubles after a draft that was accepted whole, and shrinks after a refusal, because the answer
    then no longer follows the proposed text. head: one more source, the model's draft head. proposed: number of
    proposed ids, a hypertoken counts as one. proposed_tokens: base tokens of the proposed ids.
    """

    def __init__(self, sources: Sequence[Source], costs: PassCosts | None = None, head: Head | None = None) -> None:
        self._sources, self._head = [*sources, *([] if head is None else [head])], head
        self.costs, self.own_width = costs, MOST_PROPOSED // 2
        self._asked: Source | None = None  # the source of the last draft
        self._asked_tokens = 0  # base tokens of the last draft
        # each source's share when ids last did not pay; until that pass only a higher share is weighed
        self._left, self._left_until = [0.0] * len(self._sources), 0
        self.proposed = self.proposed_tokens = 0

    def append(self, base_ids: Sequence[int]) -> None:
        """Gives emitted base ids to all sources."""
        for source in self._sources:
            source.append(base_ids)

    def note_body_output(self, h: Any, last: int | None, cache: Any) -> None:
        """Gives the draft head the output of the last pass; arguments as in `Head.note_body_output`."""
        if self._head is not None:
            self._head.note_body_output(h, last, cache)

    def has_ids_to_weigh(self) -> bool:
        """Returns whether a source has ids to propose that are to be weighed: `stop_weighing_until` did not put it off.

        Weighing takes noticeable time between two passes of a small model.
        """
        again = self.costs is None or self.costs.passes >= self._left_until
        for source, left in zip(self._sources, self._left, strict=True):
            if source.acceptance_share() > (0.0 if again else left):
                return True
        return False

    def stop_weighing_until(self, pass_number: int) -> None:
        """Notes that no ids pay: before the pass `pass_number`, a source is weighed only if its share has risen."""
        self._left, self._left_until = [source.acceptance_share() for source in self._sources], pass_number

    def best_offers(self) -> tuple[Offer | None, Offer | None]:
        """Returns the offer with the highest share, and the best offer that takes no time; None where there is none."""
        surest = at_once = None
        for source in self._sources:
            share = source.acceptance_share()
            if share > (0.0 if at_once is None else at_once.share):
                offer = Offer(source, share, source.seconds_per_id())
                if surest is None or share > surest.share:
                    surest = offer
                if not offer.seconds:
                    at_once = offer
        return surest, at_once

    def propose(self, source: Source, last: int, book: Codebook | None, most: int) -> list[int]:
        """Returns up to `most` ids of a source that may come after the id `last`, which was emitted but not yet read.

        book: the request's codebook, None for a plain model. A copy of `book` compresses the source's base ids, so the
        result may include hypertokens whose entries earlier ids of the draft install.
        """
        self._asked = source
        found = source.propose(most if book is None or source is self._head else most * book.params.merge_size)
        if book is None:
            ids = list(map(int, found))
            self._asked_tokens = len(ids)
            return ids
        book = book.copy()
        book.push(last)
        before = book.base_length
        if source is self._head:
            ids = _push_readable(book, list(found))
        else:
            ids = _compress_first_ids(book, found, most)
            book.push(ids)
        self._asked_tokens = book.base_length - before
        return ids

    def count_proposed(self, proposed: int) -> None:
        """Counts the ids of the last draft as proposed. Called when a pass reads them."""
        self.proposed += proposed
        self.proposed_tokens += self._asked_tokens

    def note_draft_end(self, proposed: int, accepted: int) -> None:
        """Notes that the last draft is over: how many ids were proposed, and how many of these were accepted."""
        if self._asked is None:
            return
        self._asked.note_draft(proposed, accepted)
        if self._asked.width is None:
            self.own_width = min(MOST_PROPOSED, 2 * self.own_width) if accepted == proposed else max(1, accepted + 1)


def _push_readable(book: Codebook, ids: list[int]) -> list[int]:
    """Pushes ids up to the first one that the codebook cannot read, and returns the pushed ids.

    A hypertoken cannot be read if an earlier id in `ids` has evicted the hypertoken's entry.
    """
    for n, one in enumerate(ids):
        try:
            book.push(one)
        except CodecError:
            return ids[:n]
    return ids


def _compress_first_ids(book: Codebook, base_ids: Sequence[int] | Uint32s | Iterator[int], width: int) -> list[int]:
    """Compresses base ids and returns the first `width` ids. Takes no more base ids from an iterator than needed."""
    if not isinstance(base_ids, Iterator):
        return book.compress(base_ids)[:width].tolist()
    taken, ids = list[int](), list[int]()
    for base_id in base_ids:
        taken.append(base_id)
        ids = book.compress(taken).tolist()
        if len(ids) > width:  # further base ids cannot change the first `width` ids
            break
    return ids[:width]


class Draft:
    """Proposed ids that a pass of the model reads after a request's last id. taken: how many were chosen so far.

    drafter: the request's drafter; it gets the number of proposed ids at once, that of accepted ids from `end`.
    """

    def __init__(self, drafter: Drafter, ids: Sequence[int]) -> None:
        self._drafter, self.ids, self.taken = drafter, list(ids), 0
        drafter.count_proposed(len(self.ids))

    def proposes(self, chosen: int) -> bool:
        """Returns whether the id `chosen` is the next proposed id."""
        return self.taken < len(self.ids) and self.ids[self.taken] == chosen

    def take_if_proposed(self, chosen: int) -> bool:
        """If the id `chosen` is the next proposed id, counts it as taken. Returns whether it is."""
        if not self.proposes(chosen):
            return False
        self.taken += 1
        return True

    def end(self) -> None:
        """Reports to the drafter how many ids were accepted. Called when all were, or the next one was refused."""
        self._drafter.note_draft_end(len(self.ids), self.taken)


# ---- the rows of a pass


def choose_drafts(
    drafters: Sequence[Drafter | None], limits: Sequence[int], held: int
) -> list[tuple[Source | None, int]]:
    """Returns for each row of a pass the source that proposes, and the number of ids; None and 0 for no draft.

    Each row takes its source with the highest share. But if the pass emits more ids per second when each row takes its
    best source among those that take no time, these are taken.

    drafters: one per row, None for a request without a drafter. limits: maximum number of proposed ids per row. held:
    ids per row that the cache holds.
    """
    nothing: list[tuple[Source | None, int]] = [(None, 0)] * len(drafters)
    costs = _shared_pass_costs(drafters)
    if not have_ids_to_weigh(drafters) or not (found := _offers_to_weigh(drafters, limits)):
        return nothing
    offers, width = (found[0], None) if costs is None else _choose_offers(costs, found, held)
    if costs is not None and width == 0:
        _stop_weighing(drafters, costs, held)
        return nothing
    chosen = list[tuple[Source | None, int]]()
    for drafter, offer, limit in zip(drafters, offers.rows, limits, strict=True):
        if drafter is None or offer is None:
            chosen.append((None, 0))
        else:
            ids = width or offer.source.width or drafter.own_width
            chosen.append((offer.source, min(limit, offer.source.most, ids)))
    return chosen


def _choose_offers(costs: PassCosts, candidates: Sequence[_Offers], held: int) -> tuple[_Offers, int]:
    """Returns the offers to take and the number of ids per row: of a trial if one is due, else of the highest gain."""
    if len(candidates) == 1:
        return candidates[0], costs.choose_draft_length(
            candidates[0].shares, held, candidates[0].most, candidates[0].seconds
        )
    for offers in candidates:
        if ids := costs.take_trial(offers.shares, held, offers.most, offers.seconds):
            return offers, ids
    weighed = [
        (offers, costs.best_draft_length(offers.shares, held, offers.most, offers.seconds)) for offers in candidates
    ]
    return max(weighed, key=lambda one: costs.speedup(one[0].shares, held, one[1], one[0].seconds))


def expects_draft(drafters: Sequence[Drafter | None], held: int) -> bool:
    """Predicts whether ids will be proposed after the next step: yes if ids would be proposed now.

    drafters, held: as in `choose_drafts`.
    """
    if not have_ids_to_weigh(drafters):
        return False
    costs, found = _shared_pass_costs(drafters), _offers_to_weigh(drafters, [MOST_PROPOSED] * len(drafters))
    if costs is None:
        return bool(found)
    if any(costs.draft_pays(offers.shares, held, offers.most, offers.seconds) for offers in found):
        return True
    _stop_weighing(drafters, costs, held)
    return False


def have_ids_to_weigh(drafters: Sequence[Drafter | None]) -> bool:
    """Returns whether any row of a pass has ids to weigh. If not, `choose_drafts` proposes nothing."""
    return any(drafter is not None and drafter.has_ids_to_weigh() for drafter in drafters)


def _stop_weighing(drafters: Sequence[Drafter | None], costs: PassCosts, held: int) -> None:
    """Calls `Drafter.stop_weighing_until` for all rows of a pass, because no ids pay."""
    until = costs.next_weighing_pass(held, len(drafters))
    for drafter in drafters:
        if drafter is not None:
            drafter.stop_weighing_until(until)


class _Offers(NamedTuple):
    """Offers for the rows of a pass. rows: per row an offer or None. shares: share of each row's offer, 0 for None.

    seconds: time to propose one id to every row, one row after the other. most: maximum number of ids of any row.
    """

    rows: list[Offer | None]
    shares: list[float]
    seconds: float
    most: int


def _offers_to_weigh(drafters: Sequence[Drafter | None], limits: Sequence[int]) -> list[_Offers]:
    """Returns the rows' offers with the highest shares, if any; if these take time, also the best that take no time."""
    found = [
        drafter.best_offers() if drafter is not None and limit > 0 else (None, None)
        for drafter, limit in zip(drafters, limits, strict=True)
    ]
    surest = _combine_offers([one for one, _ in found], limits)
    if surest is None or not surest.seconds:
        return [] if surest is None else [surest]
    at_once = _combine_offers([one for _, one in found], limits)
    return [surest] if at_once is None else [surest, at_once]


def _combine_offers(rows: list[Offer | None], limits: Sequence[int]) -> _Offers | None:
    """Combines the offers of a pass's rows, None for a row without; returns None if no row has an offer."""
    shares, seconds, most = list[float](), 0.0, 0
    for offer, limit in zip(rows, limits, strict=True):
        shares.append(0.0 if offer is None else offer.share)
        if offer is not None:
            seconds, most = seconds + offer.seconds, max(most, min(limit, offer.source.most))
    return _Offers(rows, shares, seconds, most) if most else None


def _shared_pass_costs(drafters: Sequence[Drafter | None]) -> PassCosts | None:
    """Returns the pass costs, which all drafters of an engine share; None if the drafters have none."""
    for drafter in drafters:
        if drafter is not None:
            return drafter.costs
    return None
