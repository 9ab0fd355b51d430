"""Sources of drafts: the text that a request has read and emitted (`LookupSource`), and the caller's prediction.

`Source` is the interface of all sources. Codebook entries are not a source, because a model with hypertokens already
emits an entry as one id. In a trial, the rest of a partly emitted entry was proposed where lookup found nothing: 2 to 8
in 100 proposed ids were accepted (docs/decisions.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.engine.pass_costs import WIDTHS, Share

MOST_PROPOSED = WIDTHS[-1] - 1  # maximum number of proposed ids per row of a pass
LEAST_MATCH = 3  # minimum number of base ids at the text's end that must match an earlier place
FIRST_SHARES = {LEAST_MATCH: 0.5, 5: 0.65, 9: 0.8, 17: 0.9}  # assumed share of accepted ids by minimum match length
MOST_COMPARED = 32  # maximum number of an answer's last base ids that are searched for in a prediction


class Source(Protocol):
    """Proposes base ids for one request. `append` must be called with all base ids that the request emits.

    width: ids per draft if pass costs do not decide, None for `Drafter.own_width`. most: maximum number of ids per
    draft.
    """

    width: int | None
    most: int

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        """Appends base ids to the text."""
        ...

    def acceptance_share(self) -> float:
        """Returns the probability that a proposed id is accepted if all earlier ones are, 0 with nothing to propose."""
        ...

    def seconds_per_id(self) -> float:
        """Returns the seconds to propose one id: 0 for a negligible time, infinite if unknown."""
        ...

    def propose(self, most: int) -> Sequence[int] | Uint32s | Iterator[int]:
        """Returns up to `most` base ids that may come next, as an iterator if computing each id takes time."""
        ...

    def note_draft(self, proposed: int, accepted: int) -> None:
        """Notes how many ids of the last draft were proposed, and how many of these were accepted."""
        ...


class Head(Source, Protocol):
    """A source that reads the output of the model's passes. It proposes ids, which may be hypertokens, not base ids."""

    def note_body_output(self, h: Any, last: int | None, cache: Any) -> None:
        """Stores the body's output h [1, 1, D] from which the id `last` is chosen. h: None if unknown.

        last: None while the id is still being computed. cache: the request's cache, which has not read `last`.
        """
        ...


class Lookup:
    """Finds the base ids that followed the last earlier occurrence of a text's last ids (`native/lookup.h`).

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

    def match_length(self) -> int:
        """Returns how many of the text's last base ids also precede the proposed ids, at most 32; 0 if none do."""
        return int(lib.mlxzip_lookup_propose(self._index, ffi.NULL, 0))

    def propose(self, most: int) -> tuple[Uint32s, int]:
        """Returns `most` base ids that may come next, none if nothing matches, and the result of `match_length`."""
        out = np.empty(most, np.uint32)
        match = lib.mlxzip_lookup_propose(self._index, ffi.from_buffer("uint32_t[]", out), most)
        return (out if match else out[:0]), int(match)


class LookupSource:
    """Prompt lookup: proposes what followed an earlier place of the text that matches the text's end.

    base_ids: the request's text so far.
    """

    width: int | None = None
    most = MOST_PROPOSED

    def __init__(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text, self._acceptance, self._match = Lookup(base_ids), Acceptance(), 0
        self._match_now: int | None = None  # length of the match at the text's present end, None until computed

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text.append(base_ids)
        self._match_now = None

    def acceptance_share(self) -> float:
        if self._match_now is None:
            self._match_now = self._text.match_length()
        return 0.0 if self._match_now < LEAST_MATCH else self._acceptance.share_after_match(self._match_now)

    def seconds_per_id(self) -> float:
        return 0.0

    def propose(self, most: int) -> Uint32s:
        base_ids, self._match = self._text.propose(most)
        return base_ids

    def note_draft(self, proposed: int, accepted: int) -> None:
        self._acceptance.note_draft(self._match, proposed, accepted)


class PredictionSource:
    """Proposes the caller's prediction of the answer. base_ids: the predicted text.

    After a base id that differs from the prediction, the source looks for the answer's last ids in the prediction and
    goes on after the longest match. Of several such matches it takes the first after its current place, because an
    edited text usually goes on after the edit.
    """

    width: int | None = None
    most = MOST_PROPOSED

    def __init__(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._ids, self._acceptance = as_ids(base_ids), Acceptance()
        self._place = 0  # index in the prediction of the answer's next id
        self._match = self._asked_match = LEAST_MATCH  # number of matching ids before the place, 0: place unknown
        self._last: deque[int] = deque(maxlen=MOST_COMPARED)  # the answer's last ids, the latest first

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        for one in base_ids:
            self._last.appendleft(int(one))
            follows = self._match > 0 and self._place < len(self._ids) and self._ids[self._place] == one
            self._place, self._match = (self._place + 1, self._match + 1) if follows else (self._place, 0)
        if not self._match and self._last:
            self._move_after_longest_match()

    def _move_after_longest_match(self) -> None:
        """Moves to the place after the longest match of the answer's last ids, if at least `LEAST_MATCH` ids match."""
        ids, match = self._ids, 1
        places = np.flatnonzero(ids == self._last[0]) + 1
        for one in islice(self._last, 1, None):
            fitting = places[places > match]
            fitting = fitting[ids[fitting - match - 1] == one]
            if not len(fitting):
                break
            places, match = fitting, match + 1
        if match >= LEAST_MATCH:
            behind = places[places > self._place]
            self._place, self._match = int(behind[0] if len(behind) else places[-1]), match

    def acceptance_share(self) -> float:
        known = self._match > 0 and self._place < len(self._ids)
        return self._acceptance.share_after_match(self._match) if known else 0.0

    def seconds_per_id(self) -> float:
        return 0.0

    def propose(self, most: int) -> Uint32s:
        self._asked_match = self._match
        return self._ids[self._place : self._place + most] if self._match else self._ids[:0]

    def note_draft(self, proposed: int, accepted: int) -> None:
        self._acceptance.note_draft(self._asked_match, proposed, accepted)


def make_text_sources(base_ids: Sequence[int] | Uint32s, prediction: Sequence[int] | Uint32s = ()) -> list[Source]:
    """Returns the sources that need no model. base_ids: the request's text. prediction: base ids, empty for none."""
    predicted = [PredictionSource(prediction)] if len(prediction) else []
    return [*predicted, LookupSource(base_ids)]


class Acceptance:
    """Estimates the share of proposed ids that are accepted, by the length of the match before the draft."""

    def __init__(self) -> None:
        shares = {length: Share(first) for length, first in FIRST_SHARES.items()}
        classes = [max(known for known in shares if known <= max(n, LEAST_MATCH)) for n in range(max(shares) + 1)]
        self._by_match = [shares[known] for known in classes]

    def share_after_match(self, match: int) -> float:
        """Returns the share of proposed ids that are accepted after a match of `match` base ids."""
        return self._share_estimate(match).value

    def note_draft(self, match: int, proposed: int, accepted: int) -> None:
        """Notes the outcome of a draft after a match of `match` base ids: ids proposed, and ids accepted."""
        self._share_estimate(match).note_draft(proposed, accepted)

    def _share_estimate(self, match: int) -> Share:
        return self._by_match[min(match, len(self._by_match) - 1)]
