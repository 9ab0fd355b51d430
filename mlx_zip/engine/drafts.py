"""Drafts: base ids that may come next, proposed so that one pass of the model can check several of them.

A draft never changes what is emitted. The model reads proposed ids behind the last one, and each emitted id is chosen
from the model's own logits, with the request's own penalties, constraint and random numbers, as if it had been read
alone. A proposed id that is not the one chosen ends the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_zip.codec import Codebook
from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.engine.pass_costs import WIDTHS, PassCosts
from mlx_zip.errors import GenerationError

DRAFTS = ("off", "lookup", "auto")
MOST_PROPOSED = WIDTHS[-1] - 1  # ids per pass
LEAST_MATCH = 3  # base ids that a text must have in common with an earlier place
FIRST_SHARES = {LEAST_MATCH: 0.5, 5: 0.65, 9: 0.8, 17: 0.9}  # of accepted ids by length of the match, before any draft
PRIOR, MEMORY = 4, 64  # drafted ids that these shares count as much as, and ids after which older ones count half


def check_draft(draft: str) -> None:
    """Raises `GenerationError` for a way to draft that there is not."""
    if draft not in DRAFTS:
        raise GenerationError(f"draft (--draft) must be one of {', '.join(DRAFTS)}, got {draft!r:.80}")


class Lookup:
    """Proposes what followed the last time that the text ended as it does now (prompt lookup).

    The text is all that a request has read and emitted, in base ids: its prompt with the earlier turns, and its answer.
    """

    def __init__(self, base_ids: Sequence[int] | Uint32s = ()) -> None:
        made = lib.mlxzip_lookup_new()
        if made == ffi.NULL:
            raise MemoryError("no memory for an index of the text")
        self._index = ffi.gc(made, lib.mlxzip_lookup_free)
        self.append(base_ids)

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        """Appends base ids to the text. Raises `MemoryError`."""
        ids = as_ids(base_ids)
        if lib.mlxzip_lookup_append(self._index, ffi.from_buffer("uint32_t[]", ids), len(ids)):
            raise MemoryError("no memory for an index of the text")

    def propose(self, most: int) -> tuple[Uint32s, int]:
        """Returns base ids that may come next, `most` or none, and how many base ids the text has in common there."""
        out = np.empty(most, np.uint32)
        match = lib.mlxzip_lookup_propose(self._index, ffi.from_buffer("uint32_t[]", out), most)
        return (out if match else out[:0]), int(match)


class Drafter:
    """Decides what is proposed for one request, and counts what became of it.

    costs: what passes cost, by which the number of ids is chosen. None: the number follows what was accepted; after a
    refusal fewer ids are proposed, because the model has left the text that is looked up, after a draft that was
    accepted whole, more. proposed: ids, hypertokens counted once.
    """

    def __init__(self, base_ids: Sequence[int] | Uint32s, costs: PassCosts | None = None) -> None:
        self._costs, self._width = costs, MOST_PROPOSED // 2
        self.proposed = 0
        self._text, self._acceptance, self._match = Lookup(base_ids), Acceptance(), 0

    def append(self, base_ids: Sequence[int]) -> None:
        """Appends base ids that were emitted to the text."""
        self._text.append(base_ids)

    def propose(self, last: int, book: Codebook | None, held: int, room: int) -> list[int]:
        """Returns up to `room` ids that may come after the id `last`, which has been emitted and not read.

        book: the request's codebook, which compresses what is proposed as it would compress a text; None for a plain
        model. Hypertokens that the draft itself would install may be among the ids. held: ids of the cache.
        """
        self._match = self._text.propose(0)[1]
        width = self._choose_width(self._match, held, min(room, MOST_PROPOSED))
        if width < 1:
            return []
        base_ids, _ = self._text.propose(width if book is None else width * book.params.merge_size)
        if book is None:
            return base_ids.tolist()
        book = book.copy()
        book.push(last)
        return book.compress(base_ids)[:width].tolist()

    def expects_to_propose(self, held: int) -> bool:
        """Returns whether ids will probably be proposed after the next one, because the text ends as it did before."""
        match = self._text.propose(0)[1]
        if self._costs is None or match < LEAST_MATCH:
            return match >= LEAST_MATCH
        return self._costs.pays(self._acceptance.share(match), held, MOST_PROPOSED)

    def _choose_width(self, match: int, held: int, most: int) -> int:
        """Returns how many ids to propose. match: base ids that the text has in common with an earlier place."""
        if match < LEAST_MATCH or most < 1:
            return 0
        if self._costs is None:
            return min(self._width, most)
        return self._costs.choose_width(self._acceptance.share(match), held, most)

    def note_pass(self, proposed: int) -> None:
        """Counts ids that a pass reads."""
        self.proposed += proposed

    def note_end(self, proposed: int, accepted: int) -> None:
        """Learns from a draft that was accepted whole or ended with a refused id."""
        self._acceptance.note(self._match, proposed, accepted)
        self._width = min(MOST_PROPOSED, 2 * self._width) if accepted == proposed else max(1, accepted + 1)


class Acceptance:
    """How many of the proposed ids are accepted, by how much the text had in common with the earlier place."""

    def __init__(self) -> None:
        # accepted and refused ids per class of matches; the first numbers count as much as four drafts of one id
        self._counts = {length: [share * PRIOR, (1 - share) * PRIOR] for length, share in FIRST_SHARES.items()}

    def share(self, match: int) -> float:
        """Returns the share of proposed ids that are accepted after a match of so many base ids."""
        accepted, refused = self._counts[self._class_of(match)]
        return accepted / (accepted + refused)

    def note(self, match: int, proposed: int, accepted: int) -> None:
        """Notes a draft; what came after its first refused id was never asked."""
        counts = self._counts[self._class_of(match)]
        counts[0] += accepted
        counts[1] += accepted < proposed
        if sum(counts) > MEMORY:
            counts[:] = [count / 2 for count in counts]

    def _class_of(self, match: int) -> int:
        return max(length for length in FIRST_SHARES if length <= max(match, LEAST_MATCH))
