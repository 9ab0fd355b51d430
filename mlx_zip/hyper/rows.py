"""Encoding entries to hyper rows, and the tables in which a request keeps the rows."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

ENTRIES_PER_PASS = 512  # limits the encoder's activations when a long prompt installs thousands of entries
CAPACITY_STEP = 256  # tables grow to multiples of this many slots, so that shapes seldom change


def matrix_rows(module: Any, ids: mx.array) -> mx.array:
    """Returns rows [..., D] of an embedding's or a linear layer's weights for ids [...].

    Of a quantized layer only these rows are dequantized. Source: zip2zip 0.2.0, which encodes output rows from rows of
    the head matrix, not of the embedding.
    """
    if "scales" not in module:
        return module["weight"][ids]
    biases = module.get("biases")
    return mx.dequantize(
        module["weight"][ids],
        scales=module["scales"][ids],
        biases=None if biases is None else biases[ids],
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def encode_entries(encoder: nn.Module, matrix: nn.Module, base_ids: np.ndarray, lengths: np.ndarray) -> mx.array:
    """Returns the hyper rows [N, D] of N entries, encoded `ENTRIES_PER_PASS` at a time.

    matrix: the embedding or head whose rows the encoder reads. base_ids [N, S] uint32: padded with the pad id. lengths
    [N]: how many of the S are real.
    """
    parts = []
    for begin in range(0, len(base_ids), ENTRIES_PER_PASS):
        block = slice(begin, begin + ENTRIES_PER_PASS)
        x = matrix_rows(matrix, mx.array(base_ids[block]))
        parts.append(encoder(x, mx.array(lengths[block].astype(np.int32))))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


class RowTable:
    """Rows of one side for B sequences: slot s of sequence b is `rows[b, s]`.

    rows: [B, capacity, D], or None before the first row.
    """

    SLOT_AXIS = 1  # of the array that holds the rows

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.array: mx.array | None = None

    @property
    def rows(self) -> mx.array | None:
        """All rows as [B, capacity, D], or None before the first row."""
        return self.array

    def put_one(self, slot: int, row: mx.array, limit: int) -> None:
        """Writes one row [1, D] at a slot of a single sequence; faster than `put`, because it writes a slice.

        limit: maximum number of slots of the table.
        """
        self.array = self._with_one(self._reserved(slot + 1, row, limit), slot, row)

    def put(self, sequence: np.ndarray, slots: np.ndarray, rows: mx.array, limit: int) -> None:
        """Writes rows [N, D] at (sequence [N], slots [N]). The table grows when needed, to `limit` slots at most."""
        array = self._reserved(int(slots.max()) + 1, rows, limit)
        self.array = self._with_many(array, mx.array(sequence), mx.array(slots), rows)

    def _with_one(self, array: mx.array, slot: int, row: mx.array) -> mx.array:
        """Returns `array` with row [1, D] at a slot of its only sequence."""
        array[:, slot : slot + 1] = row
        return array

    def _with_many(self, array: mx.array, sequence: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
        """Returns `array` with rows [N, D] at (sequence [N], slots [N])."""
        array[sequence, slots] = rows
        return array

    def _shape(self, slots: int, width: int) -> tuple[int, int, int]:
        """Returns the shape of an array for so many slots of rows of D = width values."""
        return self.batch, slots, width

    def _reserved(self, slots: int, like: mx.array, limit: int) -> mx.array:
        """Returns the array with room for so many slots, `limit` at most; like: a row of the rows' width and type."""
        have = 0 if self.array is None else self.array.shape[self.SLOT_AXIS]
        if self.array is not None and slots <= have:
            return self.array
        want = min(-(-slots // CAPACITY_STEP) * CAPACITY_STEP, limit)
        more = mx.zeros(self._shape(want - have, like.shape[-1]), like.dtype)
        return more if self.array is None else mx.concatenate([self.array, more], axis=self.SLOT_AXIS)

    def take(self, slots: mx.array) -> mx.array:
        """Returns the rows [B, L, D] of slots [B, L]."""
        assert self.rows is not None
        return self.rows[mx.arange(self.batch)[:, None], slots]

    def at(self, sequence: np.ndarray, slots: np.ndarray) -> mx.array:
        """Returns the rows [N, D] at (sequence [N], slots [N])."""
        assert self.rows is not None
        return self.rows[mx.array(sequence), mx.array(slots)]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.batch} sequence(s): {None if self.rows is None else self.rows.shape}>"

    def copy(self) -> RowTable:
        """Returns an independent copy. (MLX shares the memory until one of the two tables is written to.)"""
        twin = copy(self)
        twin.array = None if self.array is None else mx.array(self.array)
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the table's rows."""
        return 0 if self.array is None else self.array.nbytes


class HeadTable(RowTable):
    """Output rows, held as the columns of a matrix: `array` is [B, D, capacity].

    A step multiplies the body's output [B, 1, D] with the whole table. On the CPU that takes half as long with columns
    as with rows.
    """

    SLOT_AXIS = 2

    @property
    def rows(self) -> mx.array | None:
        """All rows as [B, capacity, D], or None before the first row."""
        return None if self.array is None else self.array.swapaxes(1, 2)

    def _with_one(self, array: mx.array, slot: int, row: mx.array) -> mx.array:
        """Returns `array` with row [1, D] at a slot of its only sequence."""
        array[:, :, slot : slot + 1] = row[..., None]
        return array

    def _with_many(self, array: mx.array, sequence: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
        """Returns `array` with rows [N, D] at (sequence [N], slots [N])."""
        turned = array.swapaxes(1, 2)
        turned[sequence, slots] = rows
        return mx.contiguous(turned.swapaxes(1, 2))

    def _shape(self, slots: int, width: int) -> tuple[int, int, int]:
        """Returns the shape of an array for so many slots of rows of D = width values."""
        return self.batch, width, slots


class TurningTable(RowTable):
    """Input rows in two copies that are written in turn, for bodies that begin before the host has read their id.

    MLX writes an array in place only if nothing else holds it. A body in flight holds the copy that it reads, so a row
    that is installed meanwhile is written to the other copy, which the next body reads. That copy first gets the row
    that it missed the time before. Without the second copy, MLX would copy the whole table for each new row.
    """

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self._idle: mx.array | None = None  # the other copy, without the rows of `_missed`
        self._missed: Callable[[], None] | None = None  # writes to `array` the rows that went to the other copy last

    @classmethod
    def of(cls, table: RowTable) -> TurningTable:
        """Returns a turning table with the rows of another one."""
        made = cls(table.batch)
        made.array = table.array
        made._idle = None if table.array is None else mx.array(table.array)
        return made

    def put_one(self, slot: int, row: mx.array, limit: int) -> None:
        """Writes one row as `RowTable.put_one` does, to the copy that the last body did not read."""
        self._turn(partial(super().put_one, slot, row, limit))

    def put(self, sequence: np.ndarray, slots: np.ndarray, rows: mx.array, limit: int) -> None:
        """Writes rows as `RowTable.put` does, to the copy that the last body did not read."""
        self._turn(partial(super().put, sequence, slots, rows, limit))

    def _turn(self, write: Callable[[], None]) -> None:
        """Makes the other copy the current one, and writes to it what it missed and what is new.

        If something raises, for example an interrupt, the copy that was current stays so: the other lacks rows.
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
        twin = RowTable(self.batch)
        twin.array = None if self.array is None else mx.array(self.array)
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the current copy and of the other one."""
        return super().nbytes + (0 if self._idle is None else self._idle.nbytes)
