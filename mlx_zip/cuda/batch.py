"""Several sequences that run together on one model, each with a codebook of its own.

A step has four parts, so that the device works while the host does: `choose` (the head; ids stay on the device),
`begin` (the body over these ids), `ids` (waits for the ids only) and `follow` (the codebooks learn, and the rows of new
entries are made). Body, head and the making of rows are pieces of work at fixed addresses (`mlx_zip.cuda.graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import Codebook
from mlx_zip.codec.entries import Installed
from mlx_zip.codec.ids import as_ids
from mlx_zip.cuda.filling import NewRows, Reader
from mlx_zip.cuda.graphs import Graphs
from mlx_zip.cuda.hyper_rows import Tables
from mlx_zip.cuda.kernels.head import Head
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.sequence import Begin, SequenceState, Snapshot
from mlx_zip.cuda.transfers import Download, Upload, ids_to_device
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.packs.pack import PackOrEntries

Chooser = Callable[[Head], torch.Tensor]


class Batch:
    """Up to `most` sequences of up to `capacity` ids each. Rows are numbered 0, 1, ... in the order they joined.

    Use it in one thread, and on one CUDA stream.
    """

    def __init__(self, model: CudaModel, most: int, capacity: int) -> None:
        """Lays out caches and tables. Raises `ModelError` if the device has too little free memory."""
        config, slots = model.config, model.layout.codebook_size
        self.model, self.most, self.capacity = model, most, capacity
        self.kv = model.decoder.make_kv_cache(most, capacity)
        self._by_base_ids = config is not None and config.position_mode == "base_token_end"
        before = model.layout.vocab_size if self._by_base_ids else 0
        self.tables = Tables(most, slots, model.sides, model.width, model.dtype, model.device, before)
        self._longest = config.merge_size if config is not None and self._by_base_ids else 1
        self._graphs = Graphs(model.device)
        self._new = None if config is None else NewRows(model, self.tables, self._graphs, config.merge_size, most)
        self._output = torch.zeros((most, model.width), dtype=model.dtype, device=model.device)  # of each last id
        self._ids = torch.zeros(most, dtype=torch.int64, device=model.device)  # chosen
        self._used = torch.zeros(most, dtype=torch.int64, device=model.device)  # positions, where base ids count
        self._reader = Reader(model, self.kv, self.tables, self._used, self._by_base_ids)
        self._steps, self._sent = Upload(most, model.device), [0] * most  # 1 for sequences that step, 0 for others
        self._download = Download(most, model.device)
        self._sequences: list[SequenceState] = []
        self._late = False  # whether the body has to wait for the ids, because LongRoPE may switch

    def __len__(self) -> int:
        return len(self._sequences)

    def __repr__(self) -> str:
        return f"<Batch: {len(self)} of {self.most} sequences, {self.capacity} ids each>"

    # ---- sequences

    def add(self, pack: PackOrEntries | None = None) -> int:
        """Adds a sequence that begins with a pack, None for the model's own; returns its row.

        Raises `ModelError` if there is no room, and what `CudaModel.begin_with` raises.
        """
        return self._add(self.model.begin_with(pack))

    def _add(self, begin: Begin) -> int:
        """Adds a sequence and returns its row. Raises `ModelError` if there is no room."""
        row = len(self._sequences)
        if row == self.most:
            raise ModelError(f"the batch has room for {self.most} sequence(s), and all are taken")
        one = SequenceState(begin, Codebook(begin.params), set(range(begin.tuned, begin.entries)))
        self.tables.keep(row, 0)
        if begin.rows is not None:
            spans = np.fromiter(map(len, begin.params.start or ()), np.int64)
            self.tables.put_run(row, begin.rows, ids_to_device(spans, self.model.device))
        self.kv.trim(row, 0)
        self.kv.which[row] = 0
        self._sequences.append(one)
        return row

    def remove(self, row: int) -> None:
        """Removes a sequence; the last row moves to its place. Call it after `follow` and before `choose`."""
        last = self._sequences.pop()
        end = len(self._sequences)
        if row != end:
            self._sequences[row] = last
            self.kv.copy_row(end, row)
            self.tables.copy(end, row)
            for part in (self._output, self._used):
                part[row].copy_(part[end])
        self.kv.trim(end, 0)

    def book(self, row: int) -> Codebook:
        """Returns a sequence's codebook; without hypertokens one of no slots, which keeps the log only."""
        return self._sequences[row].book

    def log(self, row: int) -> np.ndarray:
        """Returns the ids that a sequence has read, uint32."""
        return self._sequences[row].book.ids

    def room(self, row: int) -> int:
        """Returns how many more ids a sequence has room for."""
        return self.capacity - self._sequences[row].book.mark()

    # ---- reading, trimming, keeping

    def read(self, row: int, ids: Any, more: bool = False) -> None:
        """Reads ids, base ids and hypertokens, into a sequence, which can choose then.

        more: whether further ids follow, so that it cannot choose yet. If something raises, the sequence is as before
        but cannot choose until it has read again. Raises `CodecError` for an illegal id, `ModelError` for more ids than
        there is room for.
        """
        one, ids = self._sequences[row], as_ids(ids)
        mark = one.book.mark()
        if not len(ids) or len(ids) > self.room(row):
            raise ModelError(f"{len(ids)} ids cannot be read: a sequence has room for {self.room(row)} more")
        new = one.book.push(ids)
        try:
            one.missing.update(new.slots.tolist())
            self._reader.fill(row, one)
            self._reader.run(row, one, mark)
        except BaseException:
            self.trim(row, mark)
            raise
        one.ready, one.chosen = not more, False

    def trim(self, row: int, length: int) -> None:
        """Keeps the first `length` ids of a sequence, which cannot choose until it has read again.

        Raises `CodecError` for more ids than there are.
        """
        one = self._sequences[row]
        one.rewind(length)
        self.kv.trim(row, length)
        self._used[row] = one.used(self._by_base_ids)
        self.tables.keep(row, len(one.book))

    def snapshot(self, row: int) -> Snapshot:
        """Returns a copy of a sequence on the host. Call it after `read` or `follow`, before `choose`.

        Raises `ModelError` for a sequence that was not read again to its end, so that keys are missing.
        """
        one = self._sequences[row]
        if one.which is None:
            raise ModelError("some keys of the sequence are missing, because reading it again has failed")
        saved, which = self.kv.save(row, one.book.mark())
        output = self._output[row] if one.output is None else one.output
        return Snapshot(one.begin, one.book.ids, saved, which, output.to("cpu", copy=True) if one.ready else None)

    def restore(self, kept: Snapshot) -> int:
        """Adds the sequence of a snapshot; returns its row. Raises `ModelError` if there is no room for it."""
        if len(kept.log) > self.capacity:
            raise ModelError(f"the snapshot has {len(kept.log)} ids, a sequence has room for {self.capacity}")
        row = self._add(kept.begin)
        one = self._sequences[row]
        try:
            one.book.push(kept.log)
            one.missing = set(range(kept.begin.tuned, len(one.book)))
            self._reader.fill(row, one)
            self.kv.load(row, kept.keys_values, kept.which)
        except BaseException:
            self.remove(row)
            raise
        one.which, self._used[row] = kept.which, one.used(self._by_base_ids)
        if kept.output is not None:
            one.output, one.ready = kept.output, True
        return row

    # ---- a step

    def choose(self, chooser: Chooser | None = None, logits: bool = True) -> None:
        """Chooses the next id of every sequence that has one to choose; the ids stay on the device.

        chooser: called with the head's output of all rows, logits [B, W] included; returns ids [B] int64 on the device,
        of which those of sequences that cannot choose are not used. None takes the best ids. logits: False
        for a chooser that needs none. May be called again before `begin`.
        """
        if not self._sequences:
            return
        self._take_outputs()
        count, size = len(self), self._size(len(self))
        logits = logits and chooser is not None
        head = self._graphs.run(("head", size, logits), partial(self._head, size, logits))
        parts: list[Any] = [None if part is None else part[:count] for part in head[:3]]
        head = Head(*parts)
        ids = head.best if chooser is None else chooser(head)
        self._download.begin(ids)
        # `follow` refuses an illegal id, but the body reads it before: it must not read outside of the tables
        torch.clamp(ids, 0, self.model.layout.end - 1, out=self._ids[:count])
        for one in self._sequences:
            one.chosen = one.ready
        self._send_steps([int(one.chosen) for one in self._sequences] + [0] * (self.most - count))

    def _take_outputs(self) -> None:
        """Copies the outputs of sequences that were read or restored into those of the batch."""
        for row, one in enumerate(self._sequences):
            if one.output is not None:
                self._output[row].copy_(one.output)
                one.output = None

    def _head(self, size: int, logits: bool) -> Head:
        """Returns the head's output of the first `size` rows."""
        return self.model.head(self._output[:size], self.tables.outputs[:size], self.tables.installed[:size], logits)

    def _send_steps(self, steps: list[int]) -> None:
        """Sends the device which sequences step [most], if that has changed."""
        if steps != self._sent:
            self._steps.send(np.array(steps, np.int64))
            self._sent = steps

    def begin(self) -> None:
        """Starts the body over the ids that were chosen last. Raises `ModelError` if a sequence has no room for its id.

        Where an id may make LongRoPE switch, the body runs in `follow`.
        """
        for row, one in enumerate(self._sequences):
            if one.chosen and not self.room(row):
                raise ModelError(f"sequence {row} has read {self.capacity} ids and has no room for more")
        self._late = any(one.chosen and self._may_switch(one) for one in self._sequences)
        if not self._late:
            size = self._size(len(self))
            self._graphs.run(("body", size), partial(self._body, size), (self.kv.lengths, self._used))

    def _body(self, size: int) -> None:
        """Runs the body over the chosen ids of the first `size` rows. Sequences that do not step stay as they are.

        Such a sequence gets a key and a value behind the end of its cache, which its next id overwrites.
        """
        ids, steps, kv = self._ids[:size], self._steps.device[:size], self.kv.rows(0, size)
        positions = kv.lengths
        if self._by_base_ids:
            self._used[:size].addcmul_(self.tables.spans[:size].gather(1, ids[:, None])[:, 0], steps)
            positions = self._used[:size] - 1
        h = self.model.embed(ids[:, None], self.tables.inputs[:size])[:, 0]
        self.model.decoder.step(h, positions, kv, steps, self._output[:size])

    def ids(self) -> list[int]:
        """Returns the ids that were chosen last, as soon as they are known; anything for rows that do not step."""
        return self._download.wait(len(self))

    def follow(self, ids: Sequence[int]) -> dict[int, Exception]:
        """Reads the chosen ids into the codebooks and makes the rows of new entries. Returns errors by row.

        A sequence with an error has not read its id, and cannot choose until it has read again. The others go on.
        Errors are a `CodecError` for an illegal id, and PyTorch's, for example of too little memory.
        """
        errors: dict[int, Exception] = {}
        new: list[tuple[int, Installed]] = []
        again: list[int] = []
        for row, one in enumerate(self._sequences):
            if one.chosen:
                try:
                    known, entry = self._push(one, ids[row])
                except CodecError as error:
                    self._fail(row, one.book.mark(), error, errors)
                    continue
                new += [(row, entry)] * len(entry)
                again += [] if known and not self._late else [row]
        self._learn(new, errors)
        for row in again:
            if row not in errors:
                self._body_again(row, errors)
        return errors

    def _push(self, one: SequenceState, id_: int) -> tuple[bool, Installed]:
        """Reads an id; returns whether it had a row when the body ran, and the entry that it installs, if any.

        It had none if it is a hypertoken that is installed by being read (LZW's KwKwK). Raises `CodecError`.
        """
        known = id_ < self.model.layout.hyper_id(len(one.book))
        entry, one.chosen = one.book.push(id_), False
        return known, entry

    def _fail(self, row: int, length: int, error: Exception, errors: dict[int, Exception]) -> None:
        """Records a sequence's error and trims the sequence to the first `length` ids of its log."""
        errors[row] = error
        self.trim(row, length)

    def _learn(self, new: Sequence[tuple[int, Installed]], errors: dict[int, Exception]) -> None:
        """Makes the rows of entries that a step has installed, at most one in each sequence. errors: added to."""
        if not new or self._new is None:
            return
        try:
            self._new.make(new)
        except RuntimeError as error:
            for row, _ in new:
                self._fail(row, self.book(row).mark() - 1, error, errors)

    def _body_again(self, row: int, errors: dict[int, Exception]) -> None:
        """Runs the body over a sequence's last id, alone. errors: added to."""
        one = self._sequences[row]
        try:
            self._reader.run(row, one, one.book.mark() - 1)
        except RuntimeError as error:
            self._fail(row, one.book.mark() - 1, error, errors)

    def _may_switch(self, one: SequenceState) -> bool:
        """Returns whether a sequence's next id may need another set of rotary frequencies than it has."""
        furthest = one.used(self._by_base_ids) + self._longest - 1  # last position of the longest id
        return self.model.decoder.rope.which(furthest) != one.which

    def _size(self, count: int) -> int:
        """Returns the number of rows that a piece of work is done for: 1, 2, 4, 8, ... or all."""
        return min(self.most, 1 << max(0, count - 1).bit_length())


# ---- rows that keep their identity while the batch moves them, and that may be given up at any time


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
