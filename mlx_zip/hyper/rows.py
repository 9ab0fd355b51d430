"""Encoding entries to hyper rows, and the tables in which a request keeps the rows."""

from __future__ import annotations

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

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.rows: mx.array | None = None

    def put_one(self, slot: int, row: mx.array, limit: int) -> None:
        """Writes one row [1, D] at a slot of a single sequence; faster than `put`, because it writes a slice.

        limit: maximum number of slots of the table.
        """
        self._reserve(slot + 1, row, limit)
        assert self.rows is not None
        self.rows[:, slot : slot + 1] = row

    def put(self, sequence: np.ndarray, slots: np.ndarray, rows: mx.array, limit: int) -> None:
        """Writes rows [N, D] at (sequence [N], slots [N]). The table grows when needed, to `limit` slots at most."""
        self._reserve(int(slots.max()) + 1, rows, limit)
        assert self.rows is not None
        self.rows[mx.array(sequence), mx.array(slots)] = rows

    def _reserve(self, slots: int, like: mx.array, limit: int) -> None:
        """Makes room for so many slots, `limit` at most; like: a row of the width and type that rows have."""
        have = 0 if self.rows is None else self.rows.shape[1]
        if slots <= have:
            return
        want = min(-(-slots // CAPACITY_STEP) * CAPACITY_STEP, limit)
        more = mx.zeros((self.batch, want - have, like.shape[-1]), like.dtype)
        self.rows = more if self.rows is None else mx.concatenate([self.rows, more], axis=1)

    def take(self, slots: mx.array) -> mx.array:
        """Returns the rows [B, L, D] of slots [B, L]."""
        assert self.rows is not None
        return self.rows[mx.arange(self.batch)[:, None], slots]

    def __repr__(self) -> str:
        return f"<RowTable of {self.batch} sequence(s): {None if self.rows is None else self.rows.shape}>"

    def copy(self) -> RowTable:
        """Returns an independent copy. (MLX shares the memory until one of the two tables is written to.)"""
        twin = RowTable(self.batch)
        twin.rows = None if self.rows is None else mx.array(self.rows)
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the table's rows."""
        return 0 if self.rows is None else self.rows.nbytes
