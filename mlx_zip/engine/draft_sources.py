"""Where drafts come from: what a request has read and emitted (`Lookup`), or what its caller predicts.

`Source` is the interface of all sources. Codebook entries are no source: a model with hypertokens writes an entry whole
where it can. In a trial that proposed the rest of a begun entry where lookup found nothing, 2 to 8 in 100 ids were
accepted (docs/decisions.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.codec.lookup import Lookup
from mlx_zip.engine.pass_costs import WIDTHS, Share

MOST_PROPOSED = WIDTHS[-1] - 1  # ids per pass
LEAST_MATCH = 3  # minimum number of a text's last base ids that must match an earlier place
FIRST_SHARES = {LEAST_MATCH: 0.5, 5: 0.65, 9: 0.8, 17: 0.9}  # share of accepted ids by match length, before any draft
MOST_COMPARED = 32  # maximum number of an answer's last base ids that are searched for in a prediction


class Source(Protocol):
    """Proposes base ids for one request. `append` tells it all base ids that the request emits, proposed or not.

    width: ids per draft if pass costs do not decide, None for a number that follows what was accepted. most: maximum
    number of ids per draft.
    """

    width: int | None
    most: int

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        """Appends base ids to the text."""
        ...

    def share(self) -> float:
        """Returns how likely an id proposed now is accepted if all before it are; 0 if there is nothing to propose."""
        ...

    def seconds(self) -> float:
        """Returns the seconds to propose one id; 0 for hardly any time, infinite if unknown."""
        ...

    def propose(self, most: int) -> Sequence[int] | Uint32s | Iterator[int]:
        """Returns up to `most` base ids that may come next; an iterator if it saves time to take fewer of them."""
        ...

    def note(self, proposed: int, accepted: int) -> None:
        """Learns from the last draft: how many ids were proposed, and how many of these were accepted."""
        ...


class Head(Source, Protocol):
    """A source that uses the output of the model's passes, and proposes ids, hypertokens included, not base ids."""

    def see(self, h: Any, last: int | None, cache: Any) -> None:
        """Keeps the body's output h [1, 1, D] that the id `last` is chosen from. h: None if unknown.

        last: None while the id is still being computed. cache: the request's, which has not read `last`.
        """
        ...


class LookupSource:
    """Prompt lookup as a source. base_ids: what the request has so far."""

    width: int | None = None
    most = MOST_PROPOSED

    def __init__(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text, self._acceptance, self._match = Lookup(base_ids), Acceptance(), 0
        self._match_now: int | None = None  # length of the match at the text's present end, None until computed

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text.append(base_ids)
        self._match_now = None

    def share(self) -> float:
        if self._match_now is None:
            self._match_now = self._text.match()
        return 0.0 if self._match_now < LEAST_MATCH else self._acceptance.share(self._match_now)

    def seconds(self) -> float:
        return 0.0

    def propose(self, most: int) -> Uint32s:
        base_ids, self._match = self._text.propose(most)
        return base_ids

    def note(self, proposed: int, accepted: int) -> None:
        self._acceptance.note(self._match, proposed, accepted)


class PredictionSource:
    """Proposes the caller's prediction of the answer. base_ids: of the predicted text.

    Where the answer differs, the source goes on behind the longest match of the answer's last ids in the prediction; of
    several such places it takes the next one, because an edited text goes on behind what was changed.
    """

    width: int | None = None
    most = MOST_PROPOSED

    def __init__(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._ids, self._acceptance = as_ids(base_ids), Acceptance()
        self._place = 0  # index in the prediction of the answer's next id
        self._match = self._asked_match = LEAST_MATCH  # number of matching ids before the place, 0 if it is unknown
        self._last: deque[int] = deque(maxlen=MOST_COMPARED)  # the answer's last ids, the latest first

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        for one in base_ids:
            self._last.appendleft(int(one))
            follows = self._match > 0 and self._place < len(self._ids) and self._ids[self._place] == one
            self._place, self._match = (self._place + 1, self._match + 1) if follows else (self._place, 0)
        if not self._match and self._last:
            self._find_place()

    def _find_place(self) -> None:
        """Finds the place behind the longest match of the answer's last ids, if at least `LEAST_MATCH` ids match."""
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

    def share(self) -> float:
        known = self._match > 0 and self._place < len(self._ids)
        return self._acceptance.share(self._match) if known else 0.0

    def seconds(self) -> float:
        return 0.0

    def propose(self, most: int) -> Uint32s:
        self._asked_match = self._match
        return self._ids[self._place : self._place + most] if self._match else self._ids[:0]

    def note(self, proposed: int, accepted: int) -> None:
        self._acceptance.note(self._asked_match, proposed, accepted)


def text_sources(base_ids: Sequence[int] | Uint32s, prediction: Sequence[int] | Uint32s = ()) -> list[Source]:
    """Returns the sources that need no model. base_ids: the request's text; prediction: empty for none."""
    predicted = [PredictionSource(prediction)] if len(prediction) else []
    return [*predicted, LookupSource(base_ids)]


class Acceptance:
    """The share of proposed ids that are accepted, by the length of the match that the draft follows."""

    def __init__(self) -> None:
        shares = {length: Share(first) for length, first in FIRST_SHARES.items()}
        classes = [max(known for known in shares if known <= max(n, LEAST_MATCH)) for n in range(max(shares) + 1)]
        self._by_match = [shares[known] for known in classes]

    def share(self, match: int) -> float:
        """Returns the share of proposed ids that are accepted after a match of so many base ids."""
        return self._share_after(match).value

    def note(self, match: int, proposed: int, accepted: int) -> None:
        """Learns from a draft after a match of so many base ids."""
        self._share_after(match).note(proposed, accepted)

    def _share_after(self, match: int) -> Share:
        return self._by_match[min(match, len(self._by_match) - 1)]
