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

    def best_source(self, at_once: bool) -> tuple[Source | None, float]:
        """Returns the source with the highest acceptance share, and this share; None and 0 if no source has ids.

        at_once: whether only sources that take no time to propose count.
        """
        best, highest = None, 0.0
        for source in self._sources:
            share = source.acceptance_share()
            if share > highest and not (at_once and source.seconds_per_id()):
                best, highest = source, share
        return best, highest

    def propose(self, source: Source, last: int, book: Codebook | None, most: int) -> Draft | None:
        """Returns up to `most` ids of a source that may come after the id `last`, which was emitted but not yet read.

        None if the source has no such ids. book: the request's codebook, None for a plain model. A copy of `book`
        compresses the source's base ids, so the draft may include hypertokens whose entries earlier ids of the draft
        install.
        """
        found = source.propose(most if book is None or source is self._head else most * book.params.merge_size)
        if book is None:
            ids = list(map(int, found))
            base_tokens = len(ids)
        else:
            book = book.copy()
            book.push(last)
            before = book.base_length
            if source is self._head:
                ids = _push_readable(book, list(found))
            else:
                ids = _compress_first_ids(book, found, most)
                book.push(ids)
            base_tokens = book.base_length - before
        return Draft(self, source, ids, base_tokens) if ids else None


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
    """Ids that a source proposed, which a pass of the model reads after a request's last id; at least one.

    taken: how many of the ids were chosen so far. drafter: the request's drafter, which counts the ids as proposed.
    base_tokens: base tokens of all ids.
    """

    def __init__(self, drafter: Drafter, source: Source, ids: list[int], base_tokens: int) -> None:
        self._drafter, self._source, self.ids, self.taken = drafter, source, ids, 0
        drafter.proposed += len(ids)
        drafter.proposed_tokens += base_tokens

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
        """Tells the source how many ids were accepted. Called when all were, or the next one was refused."""
        proposed, drafter = len(self.ids), self._drafter
        self._source.note_draft(proposed, self.taken)
        if self._source.width is None:
            whole = self.taken == proposed
            drafter.own_width = min(MOST_PROPOSED, 2 * drafter.own_width) if whole else self.taken + 1


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
    costs = shared_pass_costs(drafters)
    if not have_ids_to_weigh(drafters) or not (found := _offers_to_weigh(drafters, limits)):
        return nothing
    offers, width = (found[0], None) if costs is None else _choose_offers(costs, found, held)
    if costs is not None and width == 0:
        _stop_weighing(drafters, costs, held)
        return nothing
    chosen = list[tuple[Source | None, int]]()
    for drafter, source, limit in zip(drafters, offers.sources, limits, strict=True):
        if drafter is None or source is None:
            chosen.append((None, 0))
        else:
            chosen.append((source, min(limit, source.most, width or source.width or drafter.own_width)))
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
    costs, found = shared_pass_costs(drafters), _offers_to_weigh(drafters, [MOST_PROPOSED] * len(drafters))
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
    """Sources for the rows of a pass. sources: per row a source or None. shares: acceptance share per row, 0 for None.

    seconds: time to propose one id to every row, one row after the other. most: maximum number of ids of any row.
    """

    sources: list[Source | None]
    shares: list[float]
    seconds: float
    most: int


def _offers_to_weigh(drafters: Sequence[Drafter | None], limits: Sequence[int]) -> list[_Offers]:
    """Returns the rows' sources with the highest shares, if any; if these take time, also the best that take none."""
    found = [_best_offers(drafters, limits)]
    if found[0].seconds:
        found.append(_best_offers(drafters, limits, at_once=True))
    return [offers for offers in found if offers.most]


def _best_offers(drafters: Sequence[Drafter | None], limits: Sequence[int], at_once: bool = False) -> _Offers:
    """Returns each row's best source. at_once: see `Drafter.best_source`."""
    sources, shares, seconds, most = list[Source | None](), list[float](), 0.0, 0
    for drafter, limit in zip(drafters, limits, strict=True):
        source, share = (None, 0.0) if drafter is None or limit < 1 else drafter.best_source(at_once)
        if source is not None:
            seconds, most = seconds + source.seconds_per_id(), max(most, min(limit, source.most))
        sources.append(source)
        shares.append(share)
    return _Offers(sources, shares, seconds, most)


def shared_pass_costs(drafters: Sequence[Drafter | None]) -> PassCosts | None:
    """Returns the pass costs, which all drafters of an engine share; None if the drafters have none."""
    for drafter in drafters:
        if drafter is not None:
            return drafter.costs
    return None
