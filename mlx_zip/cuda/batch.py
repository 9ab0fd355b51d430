"""Several sequences that run together on one model, each with a codebook of its own.

A step has four parts, so that device and host work at the same time. `choose_ids` runs the head; the chosen ids stay on
the device. `start_body` starts the body (the decoder's layers) over these ids. `wait_for_ids` waits for the ids only.
`update_codebooks` reads the ids into the codebooks and makes the rows of new entries. Body, head and the making of rows
work on tensors at fixed addresses, so that CUDA graphs can replay them (`mlx_zip.cuda.graphs`).

`update_codebooks` reads a draft (`mlx_zip.engine.drafts`) and the id before the draft in one call of the body. While
the chosen ids agree with the draft, their outputs are known and the body does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import Codebook
from mlx_zip.codec.entries import Installed
from mlx_zip.codec.ids import as_ids
from mlx_zip.cuda.graphs import CudaGraphs, graph_batch_size
from mlx_zip.cuda.hyper_rows import HyperRowTables, NewEntryRows
from mlx_zip.cuda.kernels.head import HeadOutput
from mlx_zip.cuda.model import CudaModel, SequenceStart
from mlx_zip.cuda.sequence import ReadDraft, SequenceReader, SequenceState, Snapshot
from mlx_zip.cuda.transfers import Download, Upload
from mlx_zip.engine.drafts import Draft
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.packs.pack import PackOrEntries

ChooseIds = Callable[[HeadOutput], torch.Tensor]


class Batch:
    """Up to `max_sequences` sequences of up to `capacity` ids each, in rows 0, 1, ... without gaps.

    sequences: by row. When one is removed, another may move to its row. rows_locked: whether `release` must wait with
    this, because ids have been chosen that the codebooks have not read yet. Use a batch in one thread, and on one CUDA
    stream.
    """

    def __init__(self, model: CudaModel, max_sequences: int, capacity: int) -> None:
        """Allocates KV caches and tables of hyper rows. Raises `ModelError` if the device's memory is too small."""
        slots, device = model.layout.codebook_size, model.device
        self.model, self.max_sequences, self.capacity = model, max_sequences, capacity
        self.kv = model.decoder.make_kv_cache(max_sequences, capacity)
        before = model.layout.vocab_size if model.by_base else 0
        self.tables = HyperRowTables(max_sequences, slots, model.sides, model.width, model.dtype, device, before)
        self._most_positions_of_id = model.params.merge_size if model.by_base else 1
        self._graphs = CudaGraphs(device)
        self._new_rows: NewEntryRows | None = None
        if model.store is not None:
            width = model.params.merge_size
            self._new_rows = NewEntryRows(model.store, self.tables, self._graphs, width, max_sequences)
        # per sequence: the body's output for the last id, the chosen id, and positions used if positions count base ids
        self._outputs = torch.zeros((max_sequences, model.width), dtype=model.dtype, device=device)
        self._chosen_ids = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._positions_used = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._reader = SequenceReader(model, self.kv, self.tables, self._positions_used)
        self._steps = Upload(max_sequences, device)  # 1 for sequences that step, 0 for others
        self._steps_sent = [0] * max_sequences
        self._download = Download(max_sequences, device)
        self.sequences: list[SequenceState] = []
        self.rows_locked = False
        self._postponed = False  # whether the body runs in `update_codebooks`, when the ids are known

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        return f"<Batch: {len(self)} of {self.max_sequences} sequences, {self.capacity} ids each>"

    # ---- sequences

    def add(self, pack: PackOrEntries | None = None) -> int:
        """Adds a sequence that begins with `pack`, None for the model's default pack; returns the sequence's row.

        Raises `ModelError` if all rows are taken, and what `CudaModel.sequence_start` raises.
        """
        return self._add_sequence(self.model.sequence_start(pack))

    def _add_sequence(self, begin: SequenceStart) -> int:
        row = len(self.sequences)
        if row == self.max_sequences:
            raise ModelError(f"the batch has room for {self.max_sequences} sequence(s), and all are taken")
        missing = set(range(begin.tuned_count, begin.entry_count))
        sequence = SequenceState(row, begin, Codebook(begin.params), missing, by_base_ids=self.model.by_base)
        self.tables.clear_slots_from(row, 0)
        if begin.rows is not None:
            lengths = np.fromiter(map(len, begin.params.start or ()), np.int64)
            self._reader.install_rows(row, np.arange(len(lengths)), begin.rows, lengths)
        self.kv.trim_row(row, 0)
        self.kv.frequency_set[row] = 0
        self.sequences.append(sequence)
        return row

    def remove(self, row: int) -> None:
        """Removes a sequence; the last row's sequence moves to `row`. Call it between steps, before `choose_ids`."""
        gone, last = self.sequences[row], self.sequences.pop()
        end, gone.row = len(self.sequences), -1
        if row != end:
            self.sequences[row], last.row = last, row
            self.kv.copy_row(end, row)
            self.tables.copy_row(end, row)
            for part in (self._outputs, self._positions_used):
                part[row].copy_(part[end])
        self.kv.trim_row(end, 0)

    def release(self, sequence: SequenceState) -> None:
        """Removes a sequence now or, if rows are locked, in `unlock_rows`; may be called again for the sequence."""
        sequence.released = True
        if not self.rows_locked:
            self.unlock_rows()

    def unlock_rows(self) -> None:
        """Lets rows move again after a step, and removes the sequences that were released meanwhile."""
        self.rows_locked = False
        for sequence in [one for one in self.sequences if one.released]:
            self.remove(sequence.row)

    def book(self, row: int) -> Codebook:
        """Returns a sequence's codebook; without hypertokens the codebook has no slots and only logs ids."""
        return self.sequences[row].book

    def room_left(self, row: int) -> int:
        """Returns how many more ids a sequence has room for."""
        return self.capacity - self.sequences[row].book.mark()

    # ---- reading, trimming, keeping

    def read(self, row: int, ids: Any, more: bool = False) -> None:
        """Reads base ids and hypertokens into a sequence; after that `choose_ids` chooses the sequence's next id.

        more: True if another call follows, so that no id can be chosen yet. After an error the sequence is as before
        the call, but must read again before its next id can be chosen. Raises `CodecError` if an id is illegal,
        `ModelError` if `ids` is empty or longer than the room left.
        """
        sequence, ids = self.sequences[row], as_ids(ids)
        mark = sequence.book.mark()
        if not len(ids) or len(ids) > self.room_left(row):
            raise ModelError(f"{len(ids)} ids cannot be read: a sequence has room for {self.room_left(row)} more")
        self._drop_draft(row)
        new = sequence.book.push(ids)
        try:
            sequence.missing_slots.update(new.slots.tolist())
            self._reader.fill_missing_rows(row, sequence)
            self._reader.run_body(row, sequence, mark)
        except BaseException:
            self.trim_sequence(row, mark)
            raise
        sequence.can_choose, sequence.has_chosen = not more, False

    def trim_sequence(self, row: int, length: int) -> None:
        """Trims a sequence to its first `length` ids; the sequence must read again before its next id can be chosen.

        Raises `CodecError` if the sequence has fewer ids.
        """
        sequence = self.sequences[row]
        sequence.rewind(length)
        self.kv.trim_row(row, length)
        self._positions_used[row] = sequence.position_count
        self.tables.clear_slots_from(row, len(sequence.book))

    def snapshot(self, row: int) -> Snapshot:
        """Returns a copy of a sequence on the host. Call it after `read` or `update_codebooks`, before `choose_ids`.

        Raises `ModelError` if keys are missing because an attempt to compute them again has failed.
        """
        sequence = self.sequences[row]
        if sequence.frequency_set is None:
            raise ModelError("some keys of the sequence are missing, because reading it again has failed")
        saved, frequency_set = self.kv.save_row(row, sequence.book.mark())
        output = self._outputs[row] if sequence.output is None else sequence.output
        return Snapshot(
            sequence.start,
            sequence.book.ids,
            saved,
            frequency_set,
            output.to("cpu", copy=True) if sequence.can_choose else None,
        )

    def keep(self, sequence: SequenceState) -> Snapshot:
        """Returns the snapshot that is kept of a sequence, taken at the first call, before the sequence is removed."""
        if sequence.kept is None:
            sequence.kept = self.snapshot(sequence.row)
        return sequence.kept

    def restore(self, kept: Snapshot) -> int:
        """Adds the sequence of a snapshot; returns its row. Raises `ModelError` if the sequence does not fit."""
        if len(kept.log) > self.capacity:
            raise ModelError(f"the snapshot has {len(kept.log)} ids, a sequence has room for {self.capacity}")
        row = self._add_sequence(kept.start)
        sequence = self.sequences[row]
        try:
            sequence.book.push(kept.log)
            sequence.missing_slots = set(range(kept.start.tuned_count, len(sequence.book)))
            self._reader.fill_missing_rows(row, sequence)
            self.kv.load_row(row, kept.keys_values, kept.frequency_set)
        except BaseException:
            self.remove(row)
            raise
        sequence.frequency_set, self._positions_used[row] = (
            kept.frequency_set,
            sequence.position_count,
        )
        if kept.output is not None:
            sequence.output, sequence.can_choose = kept.output, True
        return row

    # ---- a step

    def choose_ids(self, chooser: ChooseIds | None = None, logits: bool = True) -> None:
        """Chooses the next id of every sequence whose last output is known; the ids stay on the device.

        chooser: called with the head's output of all rows; returns ids [B] int64 on the device, which are ignored for
        sequences whose last output is unknown. None takes the ids of the highest logits. logits: whether the chooser
        needs logits [B, W]. May be called again before `start_body`.
        """
        if not self.sequences:
            return
        self._collect_outputs()
        count, size = len(self), graph_batch_size(len(self), self.max_sequences)
        logits = logits and chooser is not None
        head = self._graphs.run(("head", size, logits), partial(self._run_head, size, logits))
        head = HeadOutput(head.best[:count], None if head.logits is None else head.logits[:count])
        ids = head.best if chooser is None else chooser(head)
        self._download.start(ids)
        # the body reads the ids before `update_codebooks` can refuse an illegal id: keep its look-up inside the tables
        torch.clamp(ids, 0, self.model.layout.end - 1, out=self._chosen_ids[:count])
        for sequence in self.sequences:
            sequence.has_chosen = sequence.can_choose
        self._send_step_flags(
            [int(sequence.has_chosen) for sequence in self.sequences] + [0] * (self.max_sequences - count)
        )

    def _collect_outputs(self) -> None:
        for row, sequence in enumerate(self.sequences):
            if sequence.output is not None:
                self._outputs[row].copy_(sequence.output)
                sequence.output = None

    def _run_head(self, size: int, logits: bool) -> HeadOutput:
        return self.model.head(self._outputs[:size], self.tables.outputs[:size], self.tables.installed[:size], logits)

    def _send_step_flags(self, steps: list[int]) -> None:
        """Sends `steps` to the device if they have changed: 1 for each sequence that steps, 0 for others."""
        if steps != self._steps_sent:
            self._steps.send(np.array(steps, np.int64))
            self._steps_sent = steps

    def start_body(self, wait: bool = False) -> None:
        """Starts the body over the chosen ids. Raises `ModelError` if a sequence has no room for its chosen id.

        wait: True postpones the body to `update_codebooks`, because drafts may follow the ids. The body is also
        postponed if an id may be part of a draft or may make LongRoPE switch its factors.
        """
        for row, sequence in enumerate(self.sequences):
            if sequence.has_chosen and not self.room_left(row):
                raise ModelError(f"sequence {row} has read {self.capacity} ids and has no room for more")
        self._postponed = wait or any(
            sequence.has_chosen and (sequence.ahead is not None or self._may_switch_frequencies(sequence))
            for sequence in self.sequences
        )
        if not self._postponed:
            self._run_body_of_stepping()

    def _run_body_of_stepping(self) -> None:
        size = graph_batch_size(len(self), self.max_sequences)
        self._graphs.run(("body", size), partial(self._run_body, size), (self.kv.lengths, self._positions_used))

    def _run_body(self, size: int) -> None:
        """Runs the body over the chosen ids of the first `size` rows. A sequence that does not step keeps its length.

        For such a sequence the body writes a key and a value behind the end of its cache, which its next id overwrites.
        """
        ids, steps, kv = self._chosen_ids[:size], self._steps.device[:size], self.kv.slice_rows(0, size)
        positions = kv.lengths
        if self.model.by_base:
            self._positions_used[:size].addcmul_(self.tables.spans[:size].gather(1, ids[:, None])[:, 0], steps)
            positions = self._positions_used[:size] - 1
        h = self.model.embed(ids[:, None], self.tables.inputs[:size])[:, 0]
        self.model.decoder.step(h, positions, kv, steps, self._outputs[:size])

    def wait_for_ids(self) -> list[int]:
        """Waits for the chosen ids and returns them by row; values of rows that do not step are arbitrary."""
        return self._download.wait(len(self))

    def update_codebooks(self, ids: Sequence[int], drafts: Mapping[int, Draft] | None = None) -> dict[int, Exception]:
        """Reads the chosen ids into the codebooks and makes the rows of new entries. Returns errors by row.

        drafts: by row, proposed ids that the body reads after the chosen id; needs `start_body(wait=True)`. Give no new
        draft to a sequence whose current draft continues with the chosen id. A sequence with an error has not read its
        id and must read again before its next id can be chosen; other sequences are not affected. An error is a
        `CodecError` if the id is illegal, or an error of PyTorch, for example out of memory.
        """
        errors: dict[int, Exception] = {}
        new: list[tuple[int, Installed]] = []
        again: list[int] = []
        for row, sequence in enumerate(self.sequences):
            if sequence.has_chosen:
                followed = self._take_from_draft(row, sequence, ids[row])
                try:
                    known, entry = self._push_id(sequence, ids[row])
                except CodecError as error:
                    self._record_error(row, sequence.book.mark(), error, errors)
                    continue
                new += [(row, entry)] * len(entry)
                again += [] if followed or (known and not self._postponed) else [row]
        self._make_new_rows(new, errors)
        again = [row for row in again if row not in errors]
        if self._postponed:
            self._run_postponed_bodies(again, drafts or {}, errors)
        else:
            for row in again:
                self._rerun_body(row, errors)
        return errors

    def _push_id(self, sequence: SequenceState, id_: int) -> tuple[bool, Installed]:
        """Pushes `id_`. Returns whether `id_` had a row when the body ran, and the entry that `id_` installs, if any.

        Only a hypertoken whose own entry is installed by that same id has no row (LZW's KwKwK). Raises `CodecError` if
        `id_` is illegal.
        """
        known = id_ < self.model.layout.hyper_id(len(sequence.book))
        entry, sequence.has_chosen = sequence.book.push(id_), False
        return known, entry

    def _record_error(self, row: int, length: int, error: Exception, errors: dict[int, Exception]) -> None:
        errors[row] = error
        self.trim_sequence(row, length)

    def _make_new_rows(self, new: Sequence[tuple[int, Installed]], errors: dict[int, Exception]) -> None:
        """Makes the rows of the entries in `new`, at most one per sequence. Adds errors to `errors`, by row."""
        if not new or self._new_rows is None:
            return
        try:
            self._new_rows.install(new, self.model.encode_entries)
        except RuntimeError as error:
            for row, _ in new:
                self._record_error(row, self.book(row).mark() - 1, error, errors)

    def _run_postponed_bodies(
        self, rows: Sequence[int], drafts: Mapping[int, Draft], errors: dict[int, Exception]
    ) -> None:
        """Runs the layers over the last id of each sequence in `rows`, and over the draft behind it, if any."""
        switching = [row for row in rows if self._has_switched_frequencies(self.sequences[row])]
        for row in switching:
            self._rerun_body(row, errors)
        rest = [row for row in rows if row not in switching]
        together = drafts and self.model.decoder.takes_rows_of_any_length
        ahead = [row for row in rest if together or row in drafts]
        if ahead:
            try:
                self._read_new_drafts(ahead, drafts)
            except RuntimeError as error:
                for row in ahead:
                    self._record_error(row, self.book(row).mark() - 1, error, errors)
        if stepping := [row for row in rest if row not in ahead]:
            self._send_step_flags([int(row in stepping) for row in range(self.max_sequences)])
            self._run_body_of_stepping()

    def _read_new_drafts(self, rows: Sequence[int], drafts: Mapping[int, Draft]) -> None:
        ids = {row: drafts[row].ids if row in drafts else [] for row in rows}
        outputs = self._reader.read_last_ids_and_drafts({row: (self.sequences[row], ids[row]) for row in rows})
        for row in rows:
            sequence = self.sequences[row]
            sequence.ahead = ReadDraft(drafts[row], outputs[row]) if row in drafts else None
            sequence.output = outputs[row][0]

    def _has_switched_frequencies(self, sequence: SequenceState) -> bool:
        last = sequence.position_count - 1
        return self.model.decoder.rope.frequency_set(last) != sequence.frequency_set

    def _rerun_body(self, row: int, errors: dict[int, Exception]) -> None:
        sequence = self.sequences[row]
        try:
            self._reader.run_body(row, sequence, sequence.book.mark() - 1)
        except RuntimeError as error:
            self._record_error(row, sequence.book.mark() - 1, error, errors)

    def _may_switch_frequencies(self, sequence: SequenceState) -> bool:
        """Returns whether the next id may need other rotary frequencies than the keys in the sequence's cache have."""
        last = sequence.position_count + self._most_positions_of_id - 1  # if the id is the longest
        return self.model.decoder.rope.frequency_set(last) != sequence.frequency_set

    # ---- drafts

    def draft(self, row: int) -> Draft | None:
        """Returns the draft that the body has read for a sequence, None if there is none."""
        ahead = self.sequences[row].ahead
        return None if ahead is None else ahead.draft

    def max_draft_length(self, row: int) -> int:
        """Returns how many ids may be proposed after a sequence's next id.

        Returns 0 if the next id may make LongRoPE switch its factors. One slot of the KV cache stays free after the
        draft, because steps of other sequences write to that slot.
        """
        return 0 if self._may_switch_frequencies(self.sequences[row]) else max(0, self.room_left(row) - 2)

    def _drop_draft(self, row: int) -> None:
        sequence = self.sequences[row]
        if sequence.ahead is not None:
            sequence.ahead = None
            self.kv.trim_row(row, sequence.book.mark())
            self._positions_used[row] = sequence.position_count

    def _take_from_draft(self, row: int, sequence: SequenceState, id_: int) -> bool:
        """Returns whether `id_` is the next id of the sequence's draft.

        If so, takes the output for `id_` from the draft; if not, drops the draft.
        """
        ahead = sequence.ahead
        if ahead is None:
            return False
        if ahead.draft.take_if_proposed(id_):
            sequence.output = ahead.output
            return True
        self._drop_draft(row)
        return False
