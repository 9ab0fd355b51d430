"""The rows of one model's entries: out of its row store, or its encoders, into the tables of a request."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_zip.errors import ModelError
from mlx_zip.hyper import ModelName, RowKind, RowKinds, RowStore, RowTable, encode_entries
from mlx_zip.state import ZipState
from mlx_zip.vocab.tuned import TunedStart

if TYPE_CHECKING:
    from mlx_zip.models.zip_model import Model


class ModelRows:
    """Fills the row tables of requests of one model.

    In a step of generation there is one entry, whose rows come out of memory without an array in between.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kinds = RowKinds(model.args.config["zip2zip"].get("fingerprint"), model.config.merge_size)
        self._name = ModelName()

    def forget_kinds(self) -> None:
        """Weights have changed: rows of the old ones are not used any more."""
        self._kinds.forget()
        self._name.forget()

    def settle(self) -> None:
        """Lets the row store keep the rows of the last step: its id is here, so they are."""
        if self._model.row_store is not None:
            self._model.row_store.settle()

    # ---- tuned rows

    @property
    def name(self) -> str:
        """The fingerprint of the model as it is now."""
        return self._name.of(self._model)

    def check_tuned(self, start: TunedStart) -> None:
        """Raises `ModelError` unless the rows of a starting codebook are such as were tuned for this model as it is."""
        rows, name = start.rows, self.name
        if rows.model != name:
            raise ModelError(
                f"the pack's rows were tuned for another model ({rows.model[:12]}) than this one ({name[:12]}): use it "
                "with that one, or tune the pack for this one (mlx_zip vocab pack tune)"
            )
        if rows.one != self._model.sides_are_one:
            wanted = "one array" if self._model.sides_are_one else "two arrays"
            raise ModelError(f"the pack's input and output rows must be {wanted} for this model: tune the pack again")
        if (width := rows.output.shape[1]) != (own := self._model.config.encoder.model_size):
            raise ModelError(f"the pack's rows have {width} values, the model's have {own}: tune the pack again")

    def bind_tuned(self, state: ZipState) -> None:
        """Puts tuned rows into a request's tables, where they are found as encoded ones are; the store has no part.

        Raises `ModelError` for rows of another model, and where a saved state's rows are not here, nothing done.
        """
        if state.tuned_bound:
            return
        state.tuned = [self._at_hand(one) if isinstance(one, str) else one for one in state.tuned]
        found = [(b, one) for b, one in enumerate(state.tuned) if isinstance(one, TunedStart)]
        for start in {id(one): one for _, one in found}.values():
            self.check_tuned(start)
        for b, start in found:
            slots, limit = np.arange(len(start)), self._model.config.codebook_size
            sequence = np.full(len(start), b)
            sides = [("output", state.outputs, start.rows.output), ("input", state.inputs, start.rows.input)]
            for side, table, rows in sides[:1] if self._model.sides_are_one else sides:
                table.put(sequence, slots, mx.array(rows).astype(self._kind(side).dtype), limit)
        state.have_tuned_rows()

    def _at_hand(self, mark: str) -> TunedStart:
        pack = self._model.pack
        if pack is None or pack.fingerprint != mark:
            raise ModelError(
                f"the cache was begun with a pack of tuned rows ({mark[:12]}) that is not here: give that pack again "
                "(--pack, or load's pack), or make a new cache"
            )
        return pack

    # ---- encoded rows

    def encode_inputs(self, state: ZipState, slots: np.ndarray) -> None:
        """Sees to it that every slot among slots [B, L] (-1: not a hypertoken) has its input row."""
        sequence, wanted = state.missing_inputs(slots)
        self._encode(state, state.inputs, "input", sequence, wanted)
        state.encoded_inputs[sequence, wanted] = True

    def encode_input(self, state: ZipState, slot: int) -> None:
        """`encode_inputs` for one slot of a single sequence."""
        if not state.encoded_inputs[0, slot]:
            self._encode_one(state, state.inputs, "input", slot)
            state.encoded_inputs[0, slot] = True

    def encode_outputs(self, state: ZipState) -> None:
        """Sees to it that every installed entry has its output row."""
        if state.outputs_encoded():
            return
        slot = state.only_missing_output()
        if slot is not None:
            self._encode_one(state, state.outputs, "output", slot)
        else:
            self._encode(state, state.outputs, "output", *state.missing_outputs())
        state.have_encoded_outputs()

    def _encode_one(self, state: ZipState, table: RowTable, side: str, slot: int) -> None:
        """`_encode` for one slot of a single sequence."""
        store, book = self._store(), state.books[0]
        row = None if store is None else store.row(self._kind(side), book.words(slot))
        if row is None:
            row = self.of_entries(side, *book.rows(slot, 1))
        table.put_one(slot, row, self._model.config.codebook_size)

    def _encode(self, state: ZipState, table: RowTable, side: str, sequence: np.ndarray, slots: np.ndarray) -> None:
        """Puts the rows of the entries at (sequence [N], slots [N]) into one side's table, in one pass."""
        if len(slots) == 0:
            return
        rows = self.of_entries(side, *state.entries(sequence, slots))
        table.put(sequence, slots, rows, self._model.config.codebook_size)

    def of_entries(self, side: str, base_ids: np.ndarray, lengths: np.ndarray) -> mx.array:
        """Rows [N, D] of entries that are in no table: base_ids [N, merge_size], lengths [N], N > 0."""
        encode, store = partial(encode_entries, *self._model.side(side)), self._store()
        return encode(base_ids, lengths) if store is None else store.rows(self._kind(side), base_ids, lengths, encode)

    def _store(self) -> RowStore | None:
        return None if self._model.training else self._model.row_store

    def _kind(self, side: str) -> RowKind:
        return self._kinds.kind(side, *self._model.side(side))
