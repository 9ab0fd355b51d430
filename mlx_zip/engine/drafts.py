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
from mlx_zip.errors import GenerationError

DRAFTS = ("off", "lookup")
DRAFT_IDS = 8  # proposed ids per pass, unless told otherwise
MOST_DRAFT_IDS = 64
LEAST_MATCH = 3  # base ids that a text must have in common with an earlier place


def draft_ids_of(draft: str, most: int) -> int:
    """Returns how many ids are proposed per pass: `most`, or 0 if drafts are off. Raises `GenerationError`."""
    if draft not in DRAFTS:
        raise GenerationError(f"draft (--draft) must be one of {', '.join(DRAFTS)}, got {draft!r:.80}")
    if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= MOST_DRAFT_IDS:
        raise GenerationError(
            f"num_draft_tokens (--num-draft-tokens) must be an integer from 1 to {MOST_DRAFT_IDS}, got {most!r:.80}"
        )
    return 0 if draft == "off" else most


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

    most: ids per pass. proposed, accepted: ids, hypertokens counted once.

    After a refusal fewer ids are proposed, because the model has left the text that is looked up; after a draft that
    was accepted whole, more.
    """

    def __init__(self, most: int, base_ids: Sequence[int] | Uint32s) -> None:
        self.most, self._width = most, max(1, most // 2)
        self.proposed = self.accepted = 0
        self._text = Lookup(base_ids)

    def append(self, base_ids: Sequence[int]) -> None:
        """Appends base ids that were emitted to the text."""
        self._text.append(base_ids)

    def propose(self, last: int, book: Codebook | None, room: int) -> list[int]:
        """Returns up to `room` ids that may come after the id `last`, which has been emitted and not read.

        book: the request's codebook, which compresses what is proposed as it would compress a text; None for a plain
        model. Hypertokens that the draft itself would install may be among the ids.
        """
        width = min(self._width, room)
        if width < 1:
            return []
        base_ids, match = self._text.propose(width if book is None else width * book.params.merge_size)
        if match < LEAST_MATCH:
            return []
        if book is None:
            return base_ids.tolist()
        book = book.copy()
        book.push(last)
        return book.compress(base_ids)[:width].tolist()

    @property
    def expects_to_propose(self) -> bool:
        """Whether the text ends as it did before, so that the id after the next one can probably be proposed too."""
        return self._text.propose(0)[1] >= LEAST_MATCH

    def note_end(self, proposed: int, accepted: int) -> None:
        """Counts a draft that is over, and learns from it."""
        self.proposed += proposed
        self.accepted += accepted
        self._width = min(self.most, 2 * self._width) if accepted == proposed else max(1, accepted + 1)
