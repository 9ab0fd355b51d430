"""The tables in which a request keeps its hyper rows.

Tables are written in place, but MLX copies an array that is written to while anything else holds it, for example a body
in flight. So bodies never hold the table of output rows (`ColumnTable`), and that of input rows has two copies
(`TwoCopyTable`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Self

import mlx.core as mx
import numpy as np

CAPACITY_STEP = 256  # tables grow to multiples of this many places, so that shapes seldom change


class RowTable:
    """Rows of one side: the row at place p is `rows[0, p]`.

    For a single request, a place is a slot. Sequences of a batch share one table, in which each distinct entry has a
    place (`mlx_zip.models.rows.sequence_rows`). limit: maximum number of places, None for no limit. rows: [1, capacity,
    D], or None before the first row.
    """

    PLACE_AXIS = 1  # the axis of `array` that counts places

    def __init__(self, limit: int | None = None) -> None:
        self.array: mx.array | None = None
        self.limit = limit

    @property
    def rows(self) -> mx.array | None:
        """All rows as [1, capacity, D], or None before the first row."""
        return self.array

    @property
    def capacity(self) -> int:
        """The number of places that the table has room for now."""
        return 0 if self.array is None else self.array.shape[self.PLACE_AXIS]

    def put_run(self, first: int, rows: mx.array) -> None:
        """Writes rows [N, D] at places `first` to first + N - 1; faster than `put_rows`, because it writes a slice.

        The table grows when needed.
        """
        self.array = self._write_run(self._array_with_room(first + len(rows), rows), first, rows)

    def put_rows(self, places: np.ndarray, rows: mx.array) -> None:
        """Writes rows [N, D] at places [N]. The table grows when needed."""
        array = self._array_with_room(int(places.max()) + 1, rows)
        self.array = self._write_at(array, (mx.array(np.zeros_like(places)), mx.array(places)), rows)

    def _write_run(self, array: mx.array, first: int, rows: mx.array) -> mx.array:
        """Returns `array` with rows [N, D] at places `first` to first + N - 1."""
        array[:, first : first + len(rows)] = rows
        return array

    def _write_at(self, array: mx.array, where: tuple[mx.array, mx.array], rows: mx.array) -> mx.array:
        """Returns `array` with rows [N, D] at the places where[1] [N]. where[0]: zeros [N]."""
        array[where] = rows
        return array

    def _array_shape(self, places: int, width: int) -> tuple[int, int, int]:
        return 1, places, width

    def _array_with_room(self, places: int, like: mx.array) -> mx.array:
        """Returns the array, enlarged to `places` places if it has fewer. like: gives the rows' width and dtype."""
        have = self.capacity
        if self.array is not None and places <= have:
            return self.array
        more = mx.zeros(self._array_shape(_rounded_capacity(places, self.limit) - have, like.shape[-1]), like.dtype)
        return more if self.array is None else mx.concatenate([self.array, more], axis=self.PLACE_AXIS)

    def take_rows(self, places: mx.array) -> mx.array:
        """Returns the rows [..., D] at places [...]."""
        assert self.rows is not None
        return self.rows.squeeze(0)[places]  # `rows[0]` would copy all rows

    def rows_at(self, places: np.ndarray) -> mx.array:
        """Returns the rows [N, D] at places [N]."""
        return self.take_rows(mx.array(places))

    def select(self, places: np.ndarray, limit: int | None = None) -> Self:
        """Returns a new table with the rows at places [N], in this order, and room for more, up to `limit` places.

        For a place beyond this table's capacity, the row is arbitrary.
        """
        made = type(self)(limit)
        if self.array is not None and len(places):
            chosen = np.pad(
                np.minimum(places, self.capacity - 1), (0, _rounded_capacity(len(places), limit) - len(places))
            )
            made.array = mx.take(self.array, mx.array(chosen), axis=self.PLACE_AXIS)
        return made

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {None if self.rows is None else self.rows.shape}>"

    def copy(self) -> RowTable:
        """Returns an independent copy. (MLX shares the memory until one of the two tables is written to.)"""
        twin = copy(self)
        twin.array = None if self.array is None else mx.array(self.array)
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the table's rows."""
        return 0 if self.array is None else self.array.nbytes


class ColumnTable(RowTable):
    """Output rows, held as the columns of a matrix: `array` is [1, D, capacity].

    A step multiplies the body's output [B, 1, D] with the whole table. On the CPU that takes half as long with columns
    as with rows.
    """

    PLACE_AXIS = 2

    @property
    def rows(self) -> mx.array | None:
        """All rows as [1, capacity, D], or None before the first row."""
        return None if self.array is None else self.array.swapaxes(1, 2)

    def times_rows(self, h: mx.array) -> mx.array:
        """Returns the products [B, L, capacity] of h [B, L, D] with all rows, as one product of two matrices."""
        assert self.array is not None
        return h @ self.array if len(h) == 1 else h @ self.array.squeeze(0)

    def _write_run(self, array: mx.array, first: int, rows: mx.array) -> mx.array:
        array[:, :, first : first + len(rows)] = rows[..., None] if len(rows) == 1 else rows.swapaxes(0, 1)
        return array

    def _write_at(self, array: mx.array, where: tuple[mx.array, mx.array], rows: mx.array) -> mx.array:
        turned = array.swapaxes(1, 2)
        turned[where] = rows
        return mx.contiguous(turned.swapaxes(1, 2))

    def _array_shape(self, places: int, width: int) -> tuple[int, int, int]:
        return 1, width, places


class TwoCopyTable(RowTable):
    """Input rows that can be written while a step on the device reads them: two copies are written in turn.

    A body in flight holds the copy that it reads, so a new row is written to the other copy, which the next body reads.
    Before that, the other copy gets the rows that it lacks.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self._idle: mx.array | None = None  # the other copy, without the rows of `_missed`
        self._missed: Callable[[], None] | None = None  # writes the rows that the other copy lacks

    @classmethod
    def from_table(cls, table: RowTable) -> Self:
        """Returns a `TwoCopyTable` with the rows of another table."""
        made = cls(table.limit)
        made.array = table.array
        made._idle = None if table.array is None else mx.array(table.array)
        return made

    def put_run(self, first: int, rows: mx.array) -> None:
        """Writes rows as `RowTable.put_run` does, to the copy that the last body did not read."""
        self._write_to_other_copy(partial(super().put_run, first, rows))

    def put_rows(self, places: np.ndarray, rows: mx.array) -> None:
        """Writes rows as `RowTable.put_rows` does, to the copy that the last body did not read."""
        self._write_to_other_copy(partial(super().put_rows, places, rows))

    def select(self, places: np.ndarray, limit: int | None = None) -> Self:
        """Returns a new table with these rows, as `RowTable.select` does; its two copies are equal."""
        return self.from_table(super().select(places, limit))

    def _write_to_other_copy(self, write: Callable[[], None]) -> None:
        """Makes the other copy the current one, writes the rows that this copy lacks, and calls `write`.

        If this raises, also on an interrupt, the former copy is the current one again, because the other lacks rows.
        """
        current, self.array = self.array, self._idle
        try:
            if self._missed is not None:
                self._missed()
            write()
        except BaseException:
            self.array, self._idle = current, self.array
            raise
        self._idle, self._missed = current, write

    def copy(self) -> RowTable:
        """Returns an independent copy, which is a plain `RowTable`."""
        twin = RowTable(self.limit)
        twin.array = None if self.array is None else mx.array(self.array)
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the current copy and of the other one."""
        return super().nbytes + (0 if self._idle is None else self._idle.nbytes)


def _rounded_capacity(places: int, limit: int | None) -> int:
    """Returns the capacity of a table that needs `places` places. limit: maximum capacity, None for no limit."""
    capacity = -(-places // CAPACITY_STEP) * CAPACITY_STEP
    return capacity if limit is None else min(capacity, limit)
