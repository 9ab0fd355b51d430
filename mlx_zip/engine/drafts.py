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
    """Decides what is proposed for one request, and counts what became of it.

    sources: of which the surest proposes. costs: what passes cost, by which the number of ids is chosen. None: the
    number follows what was accepted; after a refusal fewer ids are proposed, because the model has left the text that
    is looked up, after a draft that was accepted whole, more. proposed: ids, hypertokens counted once.
    """

    def __init__(self, sources: Sequence[Source], costs: PassCosts | None = None) -> None:
        self._sources, self._costs, self._width = sources, costs, MOST_PROPOSED // 2
        self._asked: Source | None = None  # the source of the last draft
        self.proposed = 0

    def append(self, base_ids: Sequence[int]) -> None:
        """Tells the sources of base ids that were emitted."""
        for source in self._sources:
            source.append(base_ids)

    def propose(self, last: int, book: Codebook | None, held: int, room: int) -> list[int]:
        """Returns up to `room` ids that may come after the id `last`, which has been emitted and not read.

        book: the request's codebook, which compresses what is proposed as it would compress a text; None for a plain
        model. Hypertokens that the draft itself would install may be among the ids. held: ids of the cache.
        """
        source, share = self._surest()
        width = self._choose_width(share, held, min(room, MOST_PROPOSED))
        if source is None or width < 1:
            return []
        self._asked = source
        base_ids = source.propose(width if book is None else width * book.params.merge_size)
        if book is None:
            return list(map(int, base_ids))
        book = book.copy()
        book.push(last)
        return book.compress(base_ids)[:width].tolist()

    def expects_to_propose(self, held: int) -> bool:
        """Returns whether ids will probably be proposed after the next one, because they would be now."""
        _, share = self._surest()
        if self._costs is None or not share:
            return share > 0
        return self._costs.pays(share, held, MOST_PROPOSED)

    def _surest(self) -> tuple[Source | None, float]:
        """Returns the source whose ids are likeliest to be accepted, and how likely they are; None and 0 for none."""
        best, most = None, 0.0
        for source in self._sources:
            if (share := source.share()) > most:
                best, most = source, share
        return best, most

    def _choose_width(self, share: float, held: int, most: int) -> int:
        """Returns how many ids to propose."""
        if not share or most < 1:
            return 0
        return min(self._width, most) if self._costs is None else self._costs.choose_width(share, held, most)

    def note_pass(self, proposed: int) -> None:
        """Counts ids that a pass reads."""
        self.proposed += proposed

    def note_end(self, proposed: int, accepted: int) -> None:
        """Learns from a draft that was accepted whole or ended with a refused id."""
        if self._asked is not None:
            self._asked.note(proposed, accepted)
        self._width = min(MOST_PROPOSED, 2 * self._width) if accepted == proposed else max(1, accepted + 1)


class Draft:
    """Proposed ids that a pass of the model reads behind a request's last id. taken: how many were chosen since.

    drafter: of the request; it hears how many ids the pass reads, and at the end how many were accepted.
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
