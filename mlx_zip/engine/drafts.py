"""Drafts: base ids that may come next, proposed so that one pass of the model can check several of them.

A draft never changes what is emitted. The model reads proposed ids behind the last one, and each emitted id is chosen
from the model's own logits, with the request's own penalties, constraint and random numbers, as if it had been read
alone. A proposed id that is not the one chosen ends the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from mlx_zip.codec import Codebook
from mlx_zip.codec.ids import Uint32s
from mlx_zip.engine.draft_sources import Head, Source
from mlx_zip.engine.pass_costs import WIDTHS, PassCosts
from mlx_zip.errors import CodecError, GenerationError

DRAFTS = ("off", "lookup", "head", "auto")
MOST_PROPOSED = WIDTHS[-1] - 1  # ids per pass
DRAFT_TOKENS = 3  # ids that a draft model proposes per pass, as in mlx-lm


def check_draft(draft: str, num_draft_tokens: int = DRAFT_TOKENS) -> None:
    """Raises `GenerationError` for a way to draft that there is not, and for too few or too many ids per draft."""
    if draft not in DRAFTS:
        raise GenerationError(f"draft (--draft) must be one of {', '.join(DRAFTS)}, got {draft!r:.80}")
    if type(num_draft_tokens) is not int or not 1 <= num_draft_tokens <= MOST_PROPOSED:
        raise GenerationError(
            f"num_draft_tokens (--num-draft-tokens) must be an integer from 1 to {MOST_PROPOSED}, "
            f"got {num_draft_tokens!r:.80}"
        )


class Drafter:
    """Decides what is proposed for one request, and counts what became of it.

    sources: of which the surest proposes. costs: what passes cost, by which the number of ids is chosen. None: the
    number is the source's own, or it follows what was accepted; after a refusal fewer ids are proposed, because the
    model has left the text that is looked up, after a draft that was accepted whole, more. proposed: ids, hypertokens
    counted once. head: one more source, the model's draft head.
    """

    def __init__(self, sources: Sequence[Source], costs: PassCosts | None = None, head: Head | None = None) -> None:
        self._head = head
        sources = [*sources, *([] if head is None else [head])]
        self._sources, self._costs, self._width = sources, costs, MOST_PROPOSED // 2
        self._asked: Source | None = None  # the source of the last draft
        self.proposed = 0

    def append(self, base_ids: Sequence[int]) -> None:
        """Tells the sources of base ids that were emitted."""
        for source in self._sources:
            source.append(base_ids)

    def see(self, h: Any, last: int, cache: Any) -> None:
        """Tells the head of the pass from which the id `last` was chosen; arguments as in `Head.see`."""
        if self._head is not None:
            self._head.see(h, last, cache)

    def propose(self, last: int, book: Codebook | None, held: int, room: int) -> list[int]:
        """Returns up to `room` ids that may come after the id `last`, which has been emitted and not read.

        book: the request's codebook, which compresses what is proposed as it would compress a text; None for a plain
        model. Hypertokens that the draft itself would install may be among the ids. held: ids of the cache.
        """
        source, width = self._choose(held, min(room, MOST_PROPOSED))
        if source is None:
            return []
        self._asked = source
        found = source.propose(width if book is None or source is self._head else width * book.params.merge_size)
        if book is None:
            return list(map(int, found))
        book = book.copy()
        book.push(last)
        return _keep_readable(book, list(found)) if source is self._head else _compress(book, found, width)

    def expects_to_propose(self, held: int) -> bool:
        """Returns whether ids will probably be proposed after the next one, because they would be now."""
        costs, surest = self._costs, self._surest_first()
        if costs is None:
            return bool(surest)
        return any(costs.pays(share, held, MOST_PROPOSED, source.seconds()) for source, share in surest)

    def _choose(self, held: int, most: int) -> tuple[Source | None, int]:
        """Returns the surest source whose ids are worth their pass, and how many to take; None and 0 for none."""
        for source, share in self._surest_first():
            if width := self._choose_width(source, share, held, most):
                return source, width
        return None, 0

    def _surest_first(self) -> list[tuple[Source, float]]:
        """Returns the sources that have ids, with how likely these are to be accepted, the likeliest first."""
        shares = [(source, source.share()) for source in self._sources]
        return sorted(filter(itemgetter(1), shares), key=itemgetter(1), reverse=True)

    def _choose_width(self, source: Source, share: float, held: int, most: int) -> int:
        """Returns how many ids to propose."""
        if self._costs is not None:
            return self._costs.choose_width(share, held, most, source.seconds())
        return max(0, min(source.width or self._width, most))

    def note_pass(self, proposed: int) -> None:
        """Counts ids that a pass reads."""
        self.proposed += proposed

    def note_end(self, proposed: int, accepted: int) -> None:
        """Learns from a draft that was accepted whole or ended with a refused id."""
        if self._asked is not None:
            self._asked.note(proposed, accepted)
            if self._asked.width is not None:
                return
        self._width = min(MOST_PROPOSED, 2 * self._width) if accepted == proposed else max(1, accepted + 1)


def _keep_readable(book: Codebook, ids: list[int]) -> list[int]:
    """Returns the ids before the first one that the codebook cannot read, because an id before it evicts an entry."""
    for n, one in enumerate(ids):
        try:
            book.push(one)
        except CodecError:
            return ids[:n]
    return ids


def _compress(book: Codebook, base_ids: Sequence[int] | Uint32s | Iterator[int], width: int) -> list[int]:
    """Returns up to `width` ids of base ids, of which an iterator is asked for no more than that needs."""
    if not isinstance(base_ids, Iterator):
        return book.compress(base_ids)[:width].tolist()
    taken, ids = list[int](), list[int]()
    for base_id in base_ids:
        taken.append(base_id)
        ids = book.compress(taken).tolist()
        if len(ids) > width:  # the last of those that are wanted cannot grow any more
            break
    return ids[:width]
