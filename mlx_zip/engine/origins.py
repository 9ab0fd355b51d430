"""Where the entries of a request's codebook were learned, and which ones each emitted id installs."""

from __future__ import annotations

from mlx_zip.codec import Codebook
from mlx_zip.engine.interface import Origin

Entry = tuple[int, ...]
FROM_PACK = -1
_PACK = Origin("pack", FROM_PACK)


class NewEntries:
    """Finds the entries that ids install, in a codebook that never evicts. book: before the first id."""

    def __init__(self, book: Codebook) -> None:
        self._n = len(book)

    def installed(self, book: Codebook) -> tuple[Entry, ...]:
        """Returns the entries that are new since the last call. book: the request's codebook now."""
        before, self._n = self._n, len(book)
        return tuple(book.entry(slot) for slot in range(before, self._n))


class Origins:
    """Follows the ids of one answer with a codebook of its own, and knows where each entry was learned.

    book: the request's codebook, which has read the prompt and nothing more. Its log of ids tells everything, so the
    origins are right after a session is resumed or rewound, and for slots that are used again.
    """

    def __init__(self, book: Codebook) -> None:
        self._book, self._first_id = Codebook(book.params), book.params.vocab_size
        new = self._book.push(book.ids)
        self._at = [FROM_PACK] * book.params.codebook_size  # per slot: base tokens read when its entry was installed
        ends = self._book.logged()[1].cumsum(dtype="int64")
        for slot, at in zip(new.slots.tolist(), ends[new.at].tolist(), strict=True):
            self._at[slot] = at
        self._prompt = self._book.base_length
        self._learned: list[Entry] = []  # installed since the last call of `installed`

    def of(self, book: Codebook, one: int, length: int) -> Origin | None:
        """Returns where the entry of the next id was learned, None for a base id.

        book: the request's codebook, which has not read that id. length: base ids of that id.
        """
        self._follow(book)
        slot = one - self._first_id
        if slot < 0:
            return None
        # an id beyond the installed entries installs its own entry
        at = self._at[slot] if slot < len(self._book) else self._book.base_length + length
        return _PACK if at == FROM_PACK else Origin("prompt" if at <= self._prompt else "answer", at)

    def installed(self, book: Codebook) -> tuple[Entry, ...]:
        """Returns the entries that ids have installed since the last call. book: the request's codebook now."""
        self._follow(book)
        learned, self._learned = self._learned, []
        return tuple(learned)

    def _follow(self, book: Codebook) -> None:
        """Reads the ids that the request's codebook has read since the last call; there may be none, or several."""
        more = book.mark() - self._book.mark()
        if more < 1:
            return
        for one in [book.last] if more == 1 else book.ids[-more:].tolist():
            for slot in self._book.push(one).slots.tolist():
                self._at[slot] = self._book.base_length
                self._learned.append(self._book.entry(slot))


def following(book: Codebook, origins: bool) -> NewEntries | Origins:
    """Returns what finds the entries that an answer's ids install. origins: whether to know where they were learned."""
    return Origins(book) if origins or book.params.policy != "freeze" else NewEntries(book)
