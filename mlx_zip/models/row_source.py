"""`RowSource`: fills requests' row tables with hyper rows from the sources that were chosen when the model was loaded.

A `RowSource` holds the row store, the pack with its tuned rows, and the choice of canonical decoding. The model's
modules hold weights only, so a model can be copied, saved and trained as any MLX model. A request's state is in its
cache.

An output row is encoded when its entry is installed. An input row is encoded when its id is first read, or earlier,
together with other rows (`mlx_zip.models.two_part_step`). If encoders and matrices are both tied, input and output rows
are equal, and each entry is encoded once. New rows are copied to the host one step late, after the host has read the id
that was computed with them, so that the copy does not wait.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.config import ZipConfig
from mlx_zip.errors import ModelError
from mlx_zip.models.rows.encoders import SingleEncoder, can_encode_singly, encode_entries, matrix_rows
from mlx_zip.models.rows.fingerprints import (
    KeptFingerprint,
    TensorPlace,
    are_unchanged,
    host_bytes,
    sample_values,
    tensor_places,
)
from mlx_zip.models.rows.row_folder import RowSet
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.rows.zip_state import ZipState
from mlx_zip.packs.pack import Pack

FORMAT = 1  # increase it when a change makes encoders compute other rows
_QUANTIZATION = ("bits", "group_size", "mode")


class RowSide(NamedTuple):
    """One side of a model, input or output, and how its hyper rows are encoded.

    name: "input" or "output". encoder: the hyper-encoder. matrix: the module whose rows the encoder reads. training:
    whether the model is being trained, so that rows must not be kept.
    """

    name: str
    encoder: nn.Module
    matrix: nn.Module
    training: bool


@dataclass(frozen=True)
class _SideNow:
    """A side with its weights as they are now. kind: the rows that it makes. places: the weights' tensors."""

    side: RowSide
    kind: RowSet
    places: list[TensorPlace]
    config: ZipConfig

    def is_current(self, side: RowSide) -> bool:
        """Returns whether `side` is this side, and no tensor has been replaced since."""
        same = self.side.encoder is side.encoder and self.side.matrix is side.matrix
        return same and are_unchanged(self.places)

    @cached_property
    def single_encoder(self) -> SingleEncoder | None:
        """The encoder for single entries, None if `SingleEncoder` does not support this side's encoder."""
        if not can_encode_singly(self.side.encoder):
            return None
        return SingleEncoder(self.side.encoder, self.side.matrix, self.config.merge_size, self.config.pad_id)


class RowSource:
    """The sources of a model's hyper rows. Every model has one `RowSource`; `mlx_zip.load` sets its fields.

    config: the model's `ZipConfig`, with the start entries and the canonical decoding chosen in `load`. store: the
    `RowStore` that keeps rows from one request to the next, or None; the store never changes a result. pack: the pack
    of the start entries with tuned rows, or None if the rows of the start entries are encoded. fingerprint: of the
    whole model. recorded: the fingerprints in the model's config, by side. A side without a fingerprint gets a random
    name in the store, and its rows are not kept on disk.
    """

    def __init__(
        self, config: ZipConfig, recorded: Any, store: RowStore | None = None, pack: Pack | None = None
    ) -> None:
        self.config, self.store, self.pack, self.fingerprint = config, store, pack, KeptFingerprint()
        self._recorded: Mapping[str, Any] = recorded if isinstance(recorded, Mapping) else {}
        self._sides: dict[str, _SideNow] = {}

    def for_copy(self) -> RowSource:
        """Returns a row source for a copy of the model, with this one's config, store and pack.

        In the store, the copy never shares rows with the original, because the copy's weights may be changed before
        any fingerprint of them is taken.
        """
        return RowSource(self.config, None, self.store, self.pack)

    def __repr__(self) -> str:
        pack = "none" if self.pack is None else f"{len(self.pack)} entries"
        return f"<RowSource: store {self.store!r}, tuned pack {pack}, canonical {self.config.canonical}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSource:
        return self.for_copy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the row source without its store, which holds memory and open files of this process."""
        return RowSource, (self.config, None, None, self.pack)

    # ---- the weights that rows depend on

    def weights_changed(self) -> None:
        """Stops using rows that were encoded before the weights changed."""
        self._forget_sides()
        self.fingerprint.forget()

    def _forget_sides(self) -> None:
        """Makes both sides use new names in the store, which no other model has."""
        self._sides.clear()
        self._recorded = {}

    def _side_now(self, side: RowSide) -> _SideNow:
        """Returns the side with its current weights."""
        known = self._sides.get(side.name)
        if known is not None and known.is_current(side):
            return known
        if known is not None:  # a tensor was replaced, perhaps by one with equal samples
            self._forget_sides()
        places = [*tensor_places(side.encoder), *tensor_places(side.matrix)]
        made = self._sides[side.name] = _SideNow(side, self._make_kind(side), places, self.config)
        return made

    def _make_kind(self, side: RowSide) -> RowSet:
        """Returns the kind of the rows that a side makes now, with its name in the store.

        A store never mixes rows of different weights. The name covers the fingerprint in config.json, which the
        converter or the trainer wrote. Other tools quantize, fuse or adapt a model without changing that fingerprint,
        and a program may change weights in memory. So the name also covers the type, the quantization and a few values
        of every tensor that rows depend on (no tensor is hashed whole), and a new name is made when a tensor is
        replaced.
        """
        size = self.config.merge_size
        entry = matrix_rows(side.matrix, mx.zeros((1, size), mx.uint32))
        row = side.encoder(entry, mx.array([size], mx.int32))  # for its shape and type
        recorded = self._recorded.get(side.name)
        durable = isinstance(recorded, str) and bool(recorded)
        facts = [
            FORMAT,
            side.name,
            recorded if durable else os.urandom(16).hex(),
            str(row.dtype),
            row.shape[-1],
            str(mx.default_device().type),
            _tensor_facts(side.encoder),
            _tensor_facts(side.matrix),
        ]
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        return RowSet(digest, size, row.shape[-1] * row.dtype.size, row.dtype, durable)

    # ---- the store

    def take_rows_to_submit(self) -> list[mx.array]:
        """Returns the rows encoded since the last call, not yet computed; submit them along with the step's id."""
        return [] if self.store is None else self.store.take_rows_to_submit()

    def note_submitted_computed(self) -> None:
        """Notes that the rows which `take_rows_to_submit` has returned are computed. Call this after reading ids."""
        if self.store is not None:
            self.store.note_submitted_computed()

    def store_computed_rows(self) -> None:
        """Puts the rows that were noted as computed into the store."""
        if self.store is not None:
            self.store.store_computed_rows()

    def store_unsubmitted_rows(self) -> None:
        """Puts the rows of earlier calls that `take_rows_to_submit` has not returned into the store."""
        if self.store is not None:
            self.store.store_unsubmitted_rows()

    def store_all_rows(self) -> None:
        """Puts all rows encoded so far into the store, and waits for rows that are still being computed."""
        if self.store is not None:
            self.store.store_all_rows()

    def rows_of_entries(self, side: RowSide, base_ids: np.ndarray, lengths: np.ndarray) -> mx.array:
        """Returns a side's rows [N, D] of N > 0 entries (base_ids [N, M], lengths [N]), from the store or encoded."""
        encode = partial(self.encode_rows_of_side, side)
        if self.store is None or side.training:
            return encode(base_ids, lengths)
        return self.store.find_or_encode_rows(self._side_now(side).kind, base_ids, lengths, encode)

    def encode_rows_of_side(self, side: RowSide, base_ids: np.ndarray, lengths: np.ndarray) -> mx.array:
        """Encodes the rows [N, D] of N > 0 entries; uses `SingleEncoder` for a single entry, except in training."""
        if len(lengths) == 1 and not side.training:
            single = self._side_now(side).single_encoder
            if single is not None:
                return single(mx.array(base_ids[:, : int(lengths[0])]))
        return encode_entries(side.encoder, side.matrix, base_ids, lengths)

    # ---- the row tables of a request

    def fill_inputs(self, state: ZipState, side: RowSide, places: np.ndarray) -> None:
        """Puts the input rows of the entries at places [N], which have none yet, into the input table.

        side: the input side. If both sides have equal rows, the output side, whose table's rows are copied.
        """
        if len(places) == 0:
            return
        if side.name == "output":
            rows = state.outputs.rows_at(places)
        elif len(places) == 1 and state.places is None:
            rows = self._row_of_slot(state, side, int(places[0]))
        else:
            rows = self.rows_of_entries(side, *state.entries(places))
        if len(places) == 1:
            state.inputs.put_run(int(places[0]), rows)
        else:
            state.inputs.put_rows(places, rows)
        state.encoded_inputs[places] = True

    def fill_outputs(self, state: ZipState, side: RowSide) -> None:
        """Puts the missing output rows of all installed entries into the output table."""
        if state.places is not None:
            return state.share_outputs(partial(self.rows_of_entries, side))
        slot = state.only_missing_output()
        if slot is not None:
            state.outputs.put_run(slot, self._row_of_slot(state, side, slot))
        else:
            slots = np.array(state.missing_outputs()[0], np.int64)
            if len(slots):
                state.outputs.put_rows(slots, self.rows_of_entries(side, *state.entries(slots)))
        return state.mark_outputs_encoded()

    def _row_of_slot(self, state: ZipState, side: RowSide, slot: int) -> mx.array:
        """Returns the row [1, D] of one slot of a single sequence, from the store or encoded."""
        book = state.books[0]

        def encode() -> mx.array:
            row = self.encode_rows_of_side(side, *book.padded_entries(slot, 1))
            state.submit(row)
            return row

        if self.store is None or side.training:
            return encode()
        return self.store.find_or_encode_row(self._side_now(side).kind, book.entry_words(slot), encode)

    # ---- tuned rows

    def resolve_packs(self, state: ZipState) -> list[Pack]:
        """Returns the distinct packs with tuned rows that the sequences of a request began with.

        A state that was loaded from a file has only its pack's fingerprint; this row source's `pack` stands for it.
        Raises `ModelError` if `pack` has another fingerprint.
        """
        state.tuned = [self._pack_with_fingerprint(mark) if isinstance(mark, str) else mark for mark in state.tuned]
        return list({id(one): one for one in state.tuned if isinstance(one, Pack)}.values())

    def _pack_with_fingerprint(self, fingerprint: str) -> Pack:
        """Returns this source's pack. Raises `ModelError` unless the pack has this fingerprint."""
        if self.pack is None or self.pack.tuned_fingerprint != fingerprint:
            raise ModelError(
                f"the cache was begun with a pack of tuned rows ({fingerprint[:12]}) that is not loaded: give that "
                "pack again (--pack, or pack= of load), or make a new cache"
            )
        return self.pack

    def put_tuned_rows(self, state: ZipState, sides: Sequence[RowSide]) -> None:
        """Puts the tuned rows of all sequences into the tables, cast to the dtype of encoded rows.

        sides: the output side and, unless both sides have equal rows, the input side.
        """
        for b, pack in enumerate(state.tuned):
            if isinstance(pack, Pack) and not state.bound[b]:
                state.put_tuned_rows(b, *(self._tuned_rows_of_side(pack, side) for side in sides))

    def _tuned_rows_of_side(self, pack: Pack, side: RowSide) -> mx.array:
        """Returns a pack's tuned rows [P, D] of one side, cast to the dtype of encoded rows."""
        assert pack.rows is not None
        rows = pack.rows.output if side.name == "output" else pack.rows.input
        return mx.array(rows).astype(self._side_now(side).kind.dtype)


def _tensor_facts(module: nn.Module) -> list[Any]:
    """Returns what a kind covers of a module: its tensors' names, types, shapes, sampled values and quantization."""
    found = list(tensor_places(module))
    tensors = [(key, value, sample_values(value)) for _, key, value in found if isinstance(value, mx.array)]
    mx.eval([some for _, _, some in tensors])
    modules = [module, *(value for _, _, value in found if isinstance(value, nn.Module))]
    return [
        [[str(key), str(value.dtype), value.shape, bytes(host_bytes(some)).hex()] for key, value, some in tensors],
        [[type(node).__name__, *(str(getattr(node, name, None)) for name in _QUANTIZATION)] for node in modules],
    ]
