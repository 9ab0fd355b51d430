"""`Session`: the choices made when a model is loaded, and the functions that fill a request's row tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.config import ZipConfig
from mlx_zip.errors import ModelError
from mlx_zip.hyper import ModelName, RowKind, RowKinds, RowStore, RowTable, encode_entries
from mlx_zip.state import ZipState
from mlx_zip.vocab.tuned import TunedStart


class Side(NamedTuple):
    """One side of a model: `name` is "input" or "output", `encoder` makes its rows out of rows of `matrix`.

    training: whether the model is being trained, so that its rows must not be kept.
    """

    name: str
    encoder: nn.Module
    matrix: nn.Module
    training: bool


class Session:
    """The choices made when a model is loaded. Every model has a session; `mlx_zip.load` fills it.

    config: the model's `ZipConfig`, with the start entries and the canonical decoding that `load` was asked for.
    store: the `RowStore` that keeps rows from one request to the next, or None; it never changes a result. pack: the
    tuned rows of `config.start`, or None when the start entries' rows are encoded.
    """

    def __init__(
        self, config: ZipConfig, fingerprints: Any, store: RowStore | None = None, pack: TunedStart | None = None
    ) -> None:
        self.config, self.store, self.pack = config, store, pack
        self._kinds = RowKinds(fingerprints, config.merge_size)
        self._name = ModelName()

    def for_copy(self) -> Session:
        """A session for a copy of the model, with this one's config, store and pack.

        The store never gives the copy rows of the original, because the copy's weights may be changed before they are
        looked at.
        """
        return Session(self.config, None, self.store, self.pack)

    def __repr__(self) -> str:
        pack = "none" if self.pack is None else f"{len(self.pack)} entries"
        return f"<Session: store {self.store!r}, tuned pack {pack}, canonical {self.config.canonical}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self.for_copy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the store, which holds memory and open files of this process."""
        return Session, (self.config, None, None, self.pack)

    # ---- the weights that rows depend on

    def weights_changed(self) -> None:
        """Stops using rows of the weights as they were before."""
        self._kinds.forget()
        self._name.forget()

    def fingerprint(self, model: nn.Module) -> str:
        """The fingerprint of the model as it is now (`mlx_zip.hyper.model_fingerprint`)."""
        return self._name.of(model)

    # ---- the store

    def settle(self) -> None:
        """Lets the store keep the rows of the last call, whose values exist once the call's id has been read."""
        if self.store is not None:
            self.store.settle()

    def pending_rows(self) -> list[mx.array]:
        """Rows that the store will keep at the next `settle`, for a loop to evaluate with the id of its step."""
        return [] if self.store is None else self.store.pending

    def rows(self, side: Side, base_ids: np.ndarray, lengths: np.ndarray) -> mx.array:
        """Rows [N, D] of entries, out of the store or encoded: base_ids [N, merge_size], lengths [N], N > 0."""
        encode = partial(encode_entries, side.encoder, side.matrix)
        if self.store is None or side.training:
            return encode(base_ids, lengths)
        return self.store.rows(self._kind(side), base_ids, lengths, encode)

    def _kind(self, side: Side) -> RowKind:
        return self._kinds.kind(side.name, side.encoder, side.matrix)

    # ---- the row tables of a request

    def fill_inputs(self, state: ZipState, side: Side, slots: np.ndarray) -> None:
        """Gives every slot among slots [B, L] (-1: not a hypertoken) its input row."""
        sequence, wanted = state.missing_inputs(slots)
        self._fill(state, state.inputs, side, sequence, wanted)
        state.encoded_inputs[sequence, wanted] = True

    def fill_input(self, state: ZipState, side: Side, slot: int) -> None:
        """Gives one slot of a single sequence its input row, which it must not have yet."""
        self._fill_one(state, state.inputs, side, slot)
        state.encoded_inputs[0, slot] = True

    def fill_outputs(self, state: ZipState, side: Side) -> None:
        """Gives every installed entry its output row."""
        slot = state.only_missing_output()
        if slot is None:
            self._fill(state, state.outputs, side, *state.missing_outputs())
        else:
            self._fill_one(state, state.outputs, side, slot)
        state.mark_outputs_encoded()

    def _fill(self, state: ZipState, table: RowTable, side: Side, sequence: np.ndarray, slots: np.ndarray) -> None:
        """Puts the rows of the entries at (sequence [N], slots [N]) into one side's table, in one pass."""
        if len(slots) == 0:
            return
        rows = self.rows(side, *state.entries(sequence, slots))
        table.put(sequence, slots, rows, self.config.codebook_size)

    def _fill_one(self, state: ZipState, table: RowTable, side: Side, slot: int) -> None:
        """`_fill` for one slot of a single sequence: a row in memory gets there without numpy."""
        book, row = state.books[0], None
        if self.store is not None and not side.training:
            row = self.store.row(self._kind(side), book.words(slot))
        if row is None:
            row = self.rows(side, *book.rows(slot, 1))
        table.put_one(slot, row, self.config.codebook_size)

    # ---- tuned rows

    def find_packs(self, state: ZipState) -> list[TunedStart]:
        """The distinct packs of tuned rows that a request begins with; a saved state's are looked for in `pack`.

        Raises `ModelError` where a saved state's pack is another one.
        """
        state.tuned = [self._pack_of(mark) if isinstance(mark, str) else mark for mark in state.tuned]
        return list({id(one): one for one in state.tuned if isinstance(one, TunedStart)}.values())

    def _pack_of(self, fingerprint: str) -> TunedStart:
        if self.pack is None or self.pack.fingerprint != fingerprint:
            raise ModelError(
                f"the cache was begun with a pack of tuned rows ({fingerprint[:12]}) that is not loaded: give that "
                "pack again (--pack, or pack= of load), or make a new cache"
            )
        return self.pack

    def put_tuned(self, state: ZipState, sides: Sequence[tuple[Side, RowTable]]) -> None:
        """Puts the tuned rows of all sequences into their tables, cast to the type of encoded rows."""
        for b, pack in enumerate(state.tuned):
            if isinstance(pack, TunedStart):
                slots, sequence = np.arange(len(pack)), np.full(len(pack), b)
                for side, table in sides:
                    rows = pack.rows.output if side.name == "output" else pack.rows.input
                    table.put(sequence, slots, mx.array(rows).astype(self._kind(side).dtype), self.config.codebook_size)
        state.mark_tuned_rows()


def check_tuned(pack: TunedStart, model: str, one: bool, width: int) -> None:
    """Raises `ModelError` unless a pack's rows were tuned for a model with this fingerprint and rows of this width.

    one: whether an entry's input row is its output row in the model.
    """
    rows = pack.rows
    if rows.model != model:
        raise ModelError(
            f"the pack's rows were tuned for another model ({rows.model[:12]}) than this one ({model[:12]}): use the "
            "pack with that model, or tune it for this one (mlx_zip vocab pack tune)"
        )
    if rows.one != one:
        wanted = "one array" if one else "two arrays"
        raise ModelError(f"the pack's input and output rows must be {wanted} for this model: tune the pack again")
    if (found := rows.output.shape[1]) != width:
        raise ModelError(f"the pack's rows have {found} values, the model's have {width}: tune the pack again")
