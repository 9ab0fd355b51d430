"""Drafts: base ids that may come next, proposed so that one pass of the model can check several of them.

A draft never changes what is emitted. The model reads proposed ids behind the last one, and each emitted id is chosen
from the model's own logits, with the request's own penalties, constraint and random numbers, as if it had been read
alone. A proposed id that is not the one chosen ends the draft.
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


def check_draft(draft: str, num_draft_tokens: int = DRAFT_TOKENS) -> None:
    """Raises `GenerationError` for a draft that is not in `DRAFTS`, and for too few or too many ids per draft."""
    if draft not in DRAFTS:
        raise GenerationError(f"draft (--draft) must be one of {', '.join(DRAFTS)}, got {draft!r:.80}")
    if type(num_draft_tokens) is not int or not 1 <= num_draft_tokens <= MOST_PROPOSED:
        raise GenerationError(
            f"num_draft_tokens (--num-draft-tokens) must be an integer from 1 to {MOST_PROPOSED}, "
            f"got {num_draft_tokens!r:.80}"
        )


class Offer(NamedTuple):
    """A source that has ids to propose. share, seconds: what its methods of these names return now."""

    source: Source
    share: float
    seconds: float


class Drafter:
    """Proposes ids for one request, and counts what became of them.

    costs: the pass costs that decide how many ids are proposed. If None, the source's `width` decides or, without one,
    `own_width`, which doubles after a draft that was accepted whole, and shrinks after a refusal, because the model has
    then left the text that is looked up. head: one more source, the model's draft head. proposed: number of proposed
    ids, a hypertoken counts as one. proposed_tokens: their base tokens.
    """

    def __init__(self, sources: Sequence[Source], costs: PassCosts | None = None, head: Head | None = None) -> None:
        self._sources, self._head = [*sources, *([] if head is None else [head])], head
        self.costs, self.own_width = costs, MOST_PROPOSED // 2
        self._asked: Source | None = None  # the source of the last draft
        self._asked_tokens = 0  # base tokens of the last draft
        self._left, self._left_until = 0.0, 0  # a share that was not worth a pass, and when to weigh it again
        self.proposed = self.proposed_tokens = 0

    def append(self, base_ids: Sequence[int]) -> None:
        """Tells the sources of base ids that were emitted."""
        for source in self._sources:
            source.append(base_ids)

    def see(self, h: Any, last: int | None, cache: Any) -> None:
        """Gives the draft head the output of the last pass; arguments as in `Head.see`."""
        if self._head is not None:
            self._head.see(h, last, cache)

    def has_news(self) -> bool:
        """Returns whether something can be proposed that was not just found not to be worth its pass.

        This saves weighing it again: between two passes of a small model even that takes time that counts.
        """
        share = max(source.share() for source in self._sources) if self._sources else 0.0
        return share > self._left or (share > 0 and (self.costs is None or self.costs.passes >= self._left_until))

    def leave(self, share: float, until: int) -> None:
        """Notes that ids of this share are not worth a pass. until: value of `PassCosts.passes` to weigh them again."""
        self._left, self._left_until = share, until

    def offers(self) -> tuple[Offer | None, Offer | None]:
        """Returns the offer most likely to be accepted, and the most likely one that takes no time; None for none."""
        surest = at_once = None
        for source in self._sources:
            share = source.share()
            if share > (0.0 if at_once is None else at_once.share):
                offer = Offer(source, share, source.seconds())
                if surest is None or share > surest.share:
                    surest = offer
                if not offer.seconds:
                    at_once = offer
        return surest, at_once

    def propose(self, source: Source, last: int, book: Codebook | None, most: int) -> list[int]:
        """Returns up to `most` ids of a source that may come after the id `last`, which was emitted but not yet read.

        book: the request's codebook, which compresses the source's base ids like any text; None for a plain model.
        Hypertokens that the draft itself would install may be among the ids.
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
            ids = _compress(book, found, most)
            book.push(ids)
        self._asked_tokens = book.base_length - before
        return ids

    def note_pass(self, proposed: int) -> None:
        """Counts the ids of the last draft, which a pass reads."""
        self.proposed += proposed
        self.proposed_tokens += self._asked_tokens

    def note_end(self, proposed: int, accepted: int) -> None:
        """Learns from a draft that was accepted whole or ended with a refused id."""
        if self._asked is None:
            return
        self._asked.note(proposed, accepted)
        if self._asked.width is None:
            self.own_width = min(MOST_PROPOSED, 2 * self.own_width) if accepted == proposed else max(1, accepted + 1)


def _push_readable(book: Codebook, ids: list[int]) -> list[int]:
    """Pushes and returns the ids before the first one that the codebook cannot read.

    An id cannot be read if one before it evicts its entry.
    """
    for n, one in enumerate(ids):
        try:
            book.push(one)
        except CodecError:
            return ids[:n]
    return ids


def _compress(book: Codebook, base_ids: Sequence[int] | Uint32s | Iterator[int], width: int) -> list[int]:
    """Compresses base ids and returns the first `width` ids. Takes no more base ids from an iterator than needed."""
    if not isinstance(base_ids, Iterator):
        return book.compress(base_ids)[:width].tolist()
    taken, ids = list[int](), list[int]()
    for base_id in base_ids:
        taken.append(base_id)
        ids = book.compress(taken).tolist()
        if len(ids) > width:  # the last of the wanted ids cannot grow any more
            break
    return ids[:width]


class Draft:
    """Proposed ids that a pass of the model reads behind a request's last id. taken: how many were chosen so far.

    drafter: the request's; it is told how many ids the pass reads and, at the end, how many were accepted.
    """

    def __init__(self, drafter: Drafter, ids: Sequence[int]) -> None:
        self._drafter, self.ids, self.taken = drafter, list(ids), 0
        drafter.note_pass(len(self.ids))

    def proposes(self, chosen: int) -> bool:
        """Returns whether an id is the next one that was proposed."""
        return self.taken < len(self.ids) and self.ids[self.taken] == chosen

    def take(self, chosen: int) -> bool:
        """Moves on by the id that was chosen, if it is the next proposed one; returns whether it is."""
        if not self.proposes(chosen):
            return False
        self.taken += 1
        return True

    def end(self) -> None:
        """Tells the drafter that the draft is over: all ids were accepted, or the next one was refused."""
        self._drafter.note_end(len(self.ids), self.taken)


# ---- the rows of a pass


def choose_drafts(
    drafters: Sequence[Drafter | None], limits: Sequence[int], held: int
) -> list[tuple[Source | None, int]]:
    """Returns for each row of a pass which source proposes, and how many ids; None and 0 for no draft.

    In each row the source most likely to be accepted proposes or, if this gives more ids per second in all, the most
    likely one that takes no time.

    drafters: per row, None for a request without. limits: maximum number of proposed ids per row. held: ids per row
    that the cache holds.
    """
    costs, found = _costs_of(drafters), _offers_to_weigh(drafters, limits)
    offers, width = (None, 0) if not found else (found[0], None) if costs is None else _weigh(costs, found, held)
    if offers is None or width == 0:
        if offers is not None and costs is not None:
            until = costs.weigh_again_at(held, len(drafters))
            for drafter, share in zip(drafters, found[0].shares, strict=True):
                if drafter is not None:
                    drafter.leave(share, until)
        return [(None, 0)] * len(drafters)
    chosen = list[tuple[Source | None, int]]()
    for drafter, offer, limit in zip(drafters, offers.rows, limits, strict=True):
        if drafter is None or offer is None:
            chosen.append((None, 0))
        else:
            ids = width or offer.source.width or drafter.own_width
            chosen.append((offer.source, min(limit, offer.source.most, ids)))
    return chosen


def _weigh(costs: PassCosts, found: Sequence[_Offers], held: int) -> tuple[_Offers, int]:
    """Returns the offers to take, and the ids per row: those of a trial that is due, else those that gain most."""
    if len(found) == 1:
        return found[0], costs.choose_ids(found[0].shares, held, found[0].most, found[0].seconds)
    for offers in found:
        if ids := costs.take_trial(offers.shares, held, offers.most, offers.seconds):
            return offers, ids
    weighed = [(offers, costs.best_ids(offers.shares, held, offers.most, offers.seconds)) for offers in found]
    return max(weighed, key=lambda one: costs.gain(one[0].shares, held, one[1], one[0].seconds))


def have_news(drafters: Sequence[Drafter | None]) -> bool:
    """Returns whether any row of a pass has something to propose that is to be weighed, see `Drafter.has_news`."""
    return any(drafter is not None and drafter.has_news() for drafter in drafters)


def expects_draft(drafters: Sequence[Drafter | None], held: int) -> bool:
    """Predicts whether ids will be proposed after the next step: yes if they would be now."""
    costs = _costs_of(drafters)
    return any(
        costs is None or costs.pays(offers.shares, held, offers.most, offers.seconds)
        for offers in _offers_to_weigh(drafters, [MOST_PROPOSED] * len(drafters))
    )


class _Offers(NamedTuple):
    """What may be proposed to the rows of a pass. rows: per row an offer or None. shares: of the offers, 0 for None.

    seconds: how long it takes to propose one id to each row, one row after the other. most: maximum ids of any row.
    """

    rows: list[Offer | None]
    shares: list[float]
    seconds: float
    most: int


def _offers_to_weigh(drafters: Sequence[Drafter | None], limits: Sequence[int]) -> list[_Offers]:
    """Returns the rows' most likely offers, if any, and, if those take time, also the most likely that take none."""
    found = [
        drafter.offers() if drafter is not None and limit > 0 else (None, None)
        for drafter, limit in zip(drafters, limits, strict=True)
    ]
    surest = _gather_offers([one for one, _ in found], limits)
    if surest is None or not surest.seconds:
        return [] if surest is None else [surest]
    at_once = _gather_offers([one for _, one in found], limits)
    return [surest] if at_once is None else [surest, at_once]


def _gather_offers(rows: list[Offer | None], limits: Sequence[int]) -> _Offers | None:
    """Combines the offers of a pass's rows, None for a row without; returns None if no row has an offer."""
    shares, seconds, most = list[float](), 0.0, 0
    for offer, limit in zip(rows, limits, strict=True):
        shares.append(0.0 if offer is None else offer.share)
        if offer is not None:
            seconds, most = seconds + offer.seconds, max(most, min(limit, offer.source.most))
    return _Offers(rows, shares, seconds, most) if most else None


def _costs_of(drafters: Sequence[Drafter | None]) -> PassCosts | None:
    """Returns the pass costs, which all drafters of an engine share; None if the drafters have none."""
    for drafter in drafters:
        if drafter is not None:
            return drafter.costs
    return None
