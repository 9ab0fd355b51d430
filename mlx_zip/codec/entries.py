"""Entries of a codebook, stored as arrays and read as (id, base ids) pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s
from mlx_zip.codec.params import CodecParams

Entry = tuple[int, tuple[int, ...]]


class Entries(Sequence[Entry]):
    """A snapshot of entries in id order, read as a sequence of (hyper id, tuple of base ids).

    For n entries and merge size M: base_ids uint32 [n, M], padded with the pad id, or with 0 if there is no pad id;
    lengths int32 [n]; slots uint32 [n].
    """

    def __init__(self, vocab_size: int, base_ids: Uint32s, lengths: NDArray[np.integer]) -> None:
        self.vocab_size, self.base_ids, self._lengths = vocab_size, base_ids, lengths

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Number of base ids of each entry, int32 [n]."""
        return self._lengths.astype(np.int32)

    @cached_property
    def slots(self) -> Uint32s:
        """Slots of the entries, uint32 [n]; a hyper id is vocab_size + slot."""
        return np.arange(len(self), dtype=np.uint32)

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        at = range(len(self))[index]
        if isinstance(at, range):
            return [self[i] for i in at]
        row = self.base_ids[at, : self._lengths[at]]
        return self.vocab_size + int(self.slots[at]), tuple(row.tolist())

    def __iter__(self) -> Iterator[Entry]:
        rows = zip(self.slots.tolist(), self.base_ids.tolist(), self._lengths.tolist(), strict=True)
        return ((self.vocab_size + slot, tuple(row[:length])) for slot, row, length in rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entries):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


class Installed(Entries):
    """The entries that one push installed, in the order of installation. Each pushed id installs at most one entry.

    Slots are consecutive until the table is full. After that, under lru and use-count, a new entry takes the slot of an
    evicted one, and an entry that was installed early in a long push may be evicted later in the same push. The arrays
    are made when they are read, because most steps of a generation never read them. `Codebook` sets the fields, because
    an `__init__` with arguments would take longer than reading the id.

    _n_ids: number of pushed ids. _packed: the entries as `mlxzip_installed` writes them: slots, base ids, lengths, then
    one byte per pushed id, 1 if that id installed an entry.
    """

    if TYPE_CHECKING:

        def __init__(self) -> None: ...
    else:
        __init__ = object.__init__

    _params: CodecParams
    _packed: bytes | NDArray[np.uint8]
    _n_ids = 1

    @cached_property
    def _n(self) -> int:
        return (len(self._packed) - self._n_ids) // (4 * (1 + self._params.merge_size) + 1)

    @cached_property
    def vocab_size(self) -> int:  # type: ignore[override]
        """The id of slot 0."""
        return self._params.vocab_size

    @cached_property
    def slots(self) -> Uint32s:  # type: ignore[override]
        """Slots of the entries, uint32 [n]."""
        return np.frombuffer(self._packed, np.uint32, self._n)

    @cached_property
    def base_ids(self) -> Uint32s:  # type: ignore[override]
        """Padded base ids of the entries, uint32 [n, M]."""
        width = self._params.merge_size
        return np.frombuffer(self._packed, np.uint32, self._n * width, 4 * self._n).reshape(self._n, width)

    @cached_property
    def _lengths(self) -> NDArray[np.integer]:  # type: ignore[override]
        return np.frombuffer(self._packed, np.uint8, self._n, 4 * self._n + self.base_ids.nbytes)

    @cached_property
    def at(self) -> NDArray[np.int64]:
        """For each entry, the index of the pushed id that installed it: int64 [n], rising."""
        installs = np.frombuffer(self._packed, np.uint8, self._n_ids, 5 * self._n + self.base_ids.nbytes)
        return np.flatnonzero(installs).astype(np.int64, copy=False)

    def __len__(self) -> int:
        return self._n
