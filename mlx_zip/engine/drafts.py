"""Drafts: base ids that may come next, proposed so that one pass of the model can check several of them.

A draft never changes what is emitted. The model reads proposed ids behind the last one, and each emitted id is chosen
from the model's own logits, with the request's own penalties, constraint and random numbers, as if it had been read
alone. A proposed id that is not the one chosen ends the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_zip.codec import Codebook
from mlx_zip.engine.draft_sources import Source
from mlx_zip.engine.pass_costs import WIDTHS, PassCosts
from mlx_zip.errors import GenerationError

DRAFTS = ("off", "lookup", "auto")
MOST_PROPOSED = WIDTHS[-1] - 1  # ids per pass


def check_draft(draft: str) -> None:
    """Raises `GenerationError` for a way to draft that there is not."""
    if draft not in DRAFTS:
        raise GenerationError(f"draft (--draft) must be one of {', '.join(DRAFTS)}, got {draft!r:.80}")


class Drafter:
    """Proposes ids for one request, and counts what became of them.

    sources: of which the surest proposes. costs: what passes cost, by which the number of ids is chosen. None: the
    number is `own_width`, which follows what was accepted; after a refusal fewer ids are proposed, because the model
    has left the text that is looked up, after a draft that was accepted whole, more. proposed: ids, hypertokens counted
    once.
    """

    def __init__(self, sources: Sequence[Source], costs: PassCosts | None = None) -> None:
        self._sources, self.costs, self.own_width = sources, costs, MOST_PROPOSED // 2
        self._asked: Source | None = None  # the source of the last draft
        self.proposed = 0

    def append(self, base_ids: Sequence[int]) -> None:
        """Tells the sources of base ids that were emitted."""
        for source in self._sources:
            source.append(base_ids)

    @property
    def share(self) -> float:
        """The share of ids proposed now that would be accepted, each if those before it were; 0 for no ids."""
        return max((source.share() for source in self._sources), default=0.0)

    def propose(self, last: int, book: Codebook | None, most: int) -> list[int]:
        """Returns up to `most` ids that may come after the id `last`, which has been emitted and not read.

        book: the request's codebook, which compresses what is proposed as it would compress a text; None for a plain
        model. Hypertokens that the draft itself would install may be among the ids.
        """
        self._asked = source = max(self._sources, key=lambda one: one.share())
        base_ids = source.propose(most if book is None else most * book.params.merge_size)
        if book is None:
            return list(map(int, base_ids))
        book = book.copy()
        book.push(last)
        return book.compress(base_ids)[:most].tolist()

    def note_pass(self, proposed: int) -> None:
        """Counts ids that a pass reads."""
        self.proposed += proposed

    def note_end(self, proposed: int, accepted: int) -> None:
        """Learns from a draft that was accepted whole or ended with a refused id."""
        if self._asked is not None:
            self._asked.note(proposed, accepted)
        self.own_width = min(MOST_PROPOSED, 2 * self.own_width) if accepted == proposed else max(1, accepted + 1)


def choose_widths(drafters: Sequence[Drafter | None], limits: Sequence[int], held: int) -> list[int]:
    """Returns how many ids to propose for each row of a pass.

    drafters: per row, None for a request without. limits: per row, the most that may be proposed. held: ids per row
    that the cache holds.
    """
    rows = zip(drafters, limits, strict=True)
    shares = [0.0 if drafter is None or limit < 1 else drafter.share for drafter, limit in rows]
    first = next((drafter for drafter, share in zip(drafters, shares, strict=True) if share), None)
    if first is None:
        return [0] * len(shares)
    chosen = None if first.costs is None else first.costs.choose_width(shares, held, max(limits))
    return [
        min(limit, drafter.own_width if chosen is None else chosen) if drafter is not None and share else 0
        for drafter, limit, share in zip(drafters, limits, shares, strict=True)
    ]


def expects_draft(drafters: Sequence[Drafter | None], held: int) -> bool:
    """Returns whether ids will probably be proposed after the next ones, because they would be now."""
    shares = [0.0 if drafter is None else drafter.share for drafter in drafters]
    first = next((drafter for drafter, share in zip(drafters, shares, strict=True) if share), None)
    return first is not None and (first.costs is None or first.costs.pays(shares, held, MOST_PROPOSED))
