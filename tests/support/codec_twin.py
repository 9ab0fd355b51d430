"""The codec in plain Python, slow and obvious, which the tests compare `mlx_zip.codec` with.

Names, rules and errors are those of `mlx_zip.codec`. Entries are dictionaries; rewinding reads the log anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_zip.codec.params import CodecParams
from mlx_zip.errors import CodecError

Run = tuple[int, ...]


def compress(params: CodecParams, ids: Iterable[int]) -> tuple[list[int], dict[int, Run]]:
    """Compresses base ids -> (ids, entries by hyper id).

    At each position the longest entry is emitted, and that match plus the next id becomes an entry. Under lru and
    use-count, the ids that remain when the table is full are compressed by `Codebook.compress`.
    """
    ids, out = list(ids), []
    codes = {run: params.vocab_size + slot for slot, run in enumerate(params.start or ())}
    at = 0
    evicts = params.policy != "freeze" and len(codes) < params.codebook_size
    while at < len(ids) and not (evicts and len(codes) == params.codebook_size):
        limit = _mergeable_length(params, ids, at)
        if limit == 0:
            if ids[at] >= params.vocab_size and ids[at] not in params.disabled_ids:
                raise CodecError(f"id {ids[at]} at index {at} is not a base id")
            out.append(ids[at])
            at += 1
            continue
        best = max([1] + [k for k in range(2, limit + 1) if tuple(ids[at : at + k]) in codes])
        code = codes[tuple(ids[at : at + best])] if best > 1 else ids[at]
        if best > 1 and code in params.disabled_ids:
            raise CodecError(f"hypertoken {code} is also a disabled id")
        if best < limit and len(codes) < params.codebook_size:
            codes[tuple(ids[at : at + best + 1])] = params.vocab_size + len(codes)
        out.append(code)
        at += best
    if at < len(ids):
        book = Codebook(params)
        book.push(out)
        book.push(more := book.compress(ids[at:]))
        return out + more, book.entries
    return out, {code: run for run, code in codes.items()}


def _mergeable_length(params: CodecParams, ids: list[int], at: int) -> int:
    """Returns how many ids from index `at` on can be in one entry: up to a disabled id, at most merge_size."""
    n = 0
    for x in ids[at : at + params.merge_size]:
        if x >= params.vocab_size or x in params.disabled_ids:
            break
        n += 1
    return n


class Codebook:
    """The decoder of zip2zip-compression 0.3.4 with start entries, policies, and errors for unknown ids.

    ids: the log of all ids read. runs: the base ids that each id in `ids` stood for. entries: hyper id -> base ids.
    uses: hyper id of each entry except start entries -> (number of uses, time of the last use). clock: time, in uses.
    prev: base ids at the end of the text that the next id extends to a new entry.
    """

    def __init__(self, params: CodecParams) -> None:
        self.params = params
        self.ids: list[int] = []
        self.runs: list[Run] = []
        self.uses: dict[int, tuple[int, int]] = {}
        self.clock = 0
        self.prev: Run = ()
        self.entries = {params.vocab_size + slot: run for slot, run in enumerate(params.start or ())}

    def push(self, ids: Iterable[int]) -> list[tuple[int, Run, int]]:
        """Reads ids, all or none; returns (hyper id, entry, index of the id that installed it) for each new entry."""
        mark, new = len(self.ids), []
        for index, x in enumerate(ids):
            try:
                new += [(*installed, index) for installed in self._read_id(x)]
            except CodecError:
                self.rewind(mark)
                raise
        return new

    def _read_id(self, x: int) -> list[tuple[int, Run]]:
        """Reads one id and returns the entries that it installed, as (hyper id, base ids)."""
        before = dict(self.entries)
        if x in self.params.disabled_ids:
            self.prev, run = (), (x,)
        elif x < self.params.vocab_size or x in self.entries:
            run = self._run_of(x)
            if x in self.uses:
                self._count_use(x)
            self._extend_run(run, x)
        else:
            self._install_next(x)
            run = self.prev
        self.ids.append(x)
        self.runs.append(run)
        return [(code, run) for code, run in self.entries.items() if before.get(code) != run]

    def _count_use(self, code: int) -> None:
        self.clock += 1
        self.uses[code] = self.uses.get(code, (0, 0))[0] + 1, self.clock

    def _extend_run(self, cur: Run, x: int) -> None:
        """Appends the base ids `cur` of id x to `prev` until `prev` is a new entry, which is installed, or is full."""
        code = self._next_code(x)
        if code is None:
            self.prev = ()
        elif len(self.prev) in (0, self.params.merge_size):
            self.prev = cur
        else:
            for moved, base in enumerate(cur):
                self.prev += (base,)
                if self.prev not in self.entries.values():
                    self._install(code, self.prev)
                    self.prev = cur[moved:]
                    return
                if len(self.prev) == self.params.merge_size:
                    self.prev = cur[moved + 1 :]
                    return

    def _install_next(self, x: int) -> None:
        """Installs the entry of the next free hypertoken x: `prev` plus the first id of `prev` (LZW's KwKwK).

        Raises `CodecError` if x is another hypertoken, or the entry cannot be installed.
        """
        entry = self.prev + self.prev[:1]
        if x != self.params.vocab_size + len(self.entries) or len(self.entries) == self.params.codebook_size:
            raise CodecError(f"id {x} is neither installed nor the next one")
        if not 2 <= len(entry) <= self.params.merge_size or entry in self.entries.values():
            raise CodecError(f"id {x} is next but cannot be installed")
        self._install(x, entry)
        self.prev = entry

    def _next_code(self, reading: int) -> int | None:
        """Returns the hyper id that a new entry would get, or None if no slot is free and no entry can be evicted.

        reading: the id that is being read, whose entry is not evicted.
        """
        if len(self.entries) < self.params.codebook_size:
            return self.params.vocab_size + len(self.entries)
        if self.params.policy == "freeze":
            return None
        by_count = self.params.policy == "use-count"
        worth = {code: (by_count * n, last) for code, (n, last) in self.uses.items() if code != reading}
        return min(worth, key=worth.__getitem__, default=None)

    def _install(self, code: int, run: Run) -> None:
        """Puts an entry under this hyper id, replacing an evicted entry if there is one, and counts its first use."""
        self.entries[code] = run
        self.uses.pop(code, None)
        self._count_use(code)

    def _run_of(self, x: int) -> Run:
        """Returns the base ids that id x stands for now. Raises `CodecError` for an entry that is not installed."""
        if x < self.params.vocab_size or x in self.params.disabled_ids:
            return (x,)
        if x not in self.entries:
            raise CodecError(f"id {x} is not installed")
        return self.entries[x]

    def expand(self, ids: Iterable[int]) -> list[int]:
        """Returns the base ids that ids stand for."""
        return [base for x in ids for base in self._run_of(x)]

    def rewind(self, mark: int) -> None:
        """Goes back to the state after the first `mark` ids."""
        fresh = Codebook(self.params)
        fresh.push(self.ids[:mark])
        self.__dict__.update(fresh.__dict__)

    def compress(self, base_ids: Iterable[int]) -> list[int]:
        """Compresses base ids as a continuation of this codebook, which is unchanged.

        Each emitted id is the longest entry that is installed after the ids before it have been pushed.
        """
        ids, out, at = list(base_ids), [], 0
        book = Codebook(self.params)
        book.push(self.ids)
        while at < len(ids):
            if ids[at] >= self.params.vocab_size and ids[at] not in self.params.disabled_ids:
                raise CodecError(f"id {ids[at]} at index {at} is not a base id")
            codes = {run: code for code, run in book.entries.items() if code not in self.params.disabled_ids}
            runs = [tuple(ids[at : at + k]) for k in range(2, _mergeable_length(self.params, ids, at) + 1)]
            run = max((run for run in runs if run in codes), key=len, default=(ids[at],))
            out.append(codes.get(run, ids[at]))
            book.push(out[-1:])
            at += len(run)
        return out
