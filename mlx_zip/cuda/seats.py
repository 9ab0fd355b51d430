"""Rows of a `Batch` that keep their identity while the batch moves them, and that may be given up at any time."""

from __future__ import annotations

from typing import Any

from mlx_zip.codec import Codebook
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.sequence import Snapshot


class Seat:
    """What one request owns: a row of a batch, and after `Seats.leave` at most a snapshot of that row.

    row: -1 after the seat was left. books: the request's codebook.
    """

    def __init__(self, row: int, book: Codebook) -> None:
        self.row, self.books = row, [book]
        self.snapshot: Snapshot | None = None

    @property
    def book(self) -> Codebook:
        """The request's codebook; without hypertokens one of no slots, which keeps the log only."""
        return self.books[0]


class Seats:
    """The seats of a batch. chosen: whether ids have been chosen and not followed, so that no row may be moved."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.chosen = batch, False
        self._seats: list[Seat] = []  # by row
        self._late: list[Seat] = []  # left while rows could not be moved

    def add(self, start: Any) -> Seat:
        """Returns a new seat. start: what its codebook begins with, None for the model's own."""
        return self._seated(self.batch.add(start))

    def restore(self, snapshot: Snapshot, ids: int) -> Seat:
        """Returns a new seat that holds the first `ids` ids of a snapshot; it chooses after it has read more."""
        return self._seated(self.batch.restore(snapshot.cut(ids)))

    def _seated(self, row: int) -> Seat:
        """Returns the seat of a row that was added."""
        assert row == len(self._seats)
        self._seats.append(Seat(row, self.batch.book(row)))
        return self._seats[-1]

    def keep(self, seat: Seat) -> Snapshot:
        """Returns the snapshot of a seat, taken now if the seat has not been left."""
        if seat.snapshot is None:
            seat.snapshot = self.batch.snapshot(seat.row)
        return seat.snapshot

    def leave(self, seat: Seat) -> None:
        """Gives up a seat's row; does nothing if it was left before."""
        if seat.row < 0 or seat in self._late:
            return
        if self.chosen:
            self._late.append(seat)
        else:
            self._remove(seat)

    def followed(self) -> None:
        """Notes that the chosen ids have been followed, and gives up the rows that were left meanwhile."""
        self.chosen = False
        for seat in self._late:
            self._remove(seat)
        self._late.clear()

    def _remove(self, seat: Seat) -> None:
        """Removes a row; the last one moves to its place."""
        self.batch.remove(seat.row)
        last = self._seats.pop()
        if last is not seat:
            self._seats[seat.row], last.row = last, seat.row
        seat.row = -1
