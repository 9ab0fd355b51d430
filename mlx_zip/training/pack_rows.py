"""Trains rows of a pack's entries: alone, with the model frozen, or together with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import CodecParams
from mlx_zip.models.whole import Samples, encode_rows
from mlx_zip.models.zip_model import Model
from mlx_zip.training.batches import CLOSE, Batch, Padding
from mlx_zip.training.objective import LossWeights, Trainee


class PackTrainee(Trainee):
    """A frozen model, and the trained rows of the P entries that every sample begins with.

    output_rows [P, D]: one row per entry. input_rows [P, D]: likewise; absent if the model uses the same rows for input
    and output.
    """

    def __init__(self, model: Model, input_rows: mx.array, output_rows: mx.array) -> None:
        super().__init__(model, LossWeights())
        model.freeze()
        self.output_rows = output_rows
        if not model.sides_are_one:
            self.input_rows = input_rows

    @property
    def read_rows(self) -> mx.array:
        """The rows [P, D] that the pack's entries have in the input."""
        return self.output_rows if self.model.sides_are_one else self.input_rows

    def prepare_batch(self, batch: Batch) -> Batch:
        """Returns the batch with the pack's entries separated from the others, see `separate_pack`."""
        return replace(batch, arrays=separate_pack(batch.arrays, batch.distinct, len(self.output_rows), batch.padding))

    def rows(self, arrays: Mapping[str, mx.array], samples: Samples) -> tuple[mx.array, mx.array]:
        """Returns the pack's rows, then those that the hyper-encoder makes of entries that the samples installed."""
        grown = encode_rows(self.model, samples)
        return mx.concatenate([self.read_rows, grown[0]]), mx.concatenate([self.output_rows, grown[1]])


class PackAndModelTrainee(Trainee):
    """A model that is trained together with rows of the P entries that every sample begins with.

    output_rows, input_rows: as of `PackTrainee`, but added to the hyper-encoder's rows, and 0 at first. So what
    the encoder learns of one entry serves all others, and the rest is the entry's own.
    """

    def __init__(self, model: Model, entries: int) -> None:
        super().__init__(model, LossWeights())
        self.output_rows = mx.zeros((entries, model.config.encoder.model_size))
        if not model.sides_are_one:
            self.input_rows = mx.zeros_like(self.output_rows)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Returns the batch with `in_pack` [U] int32: the place of each distinct entry in the pack, P for none."""
        size = len(self.output_rows)
        places = places_in_pack(batch.arrays, size)
        return replace(batch, arrays={**batch.arrays, "in_pack": np.where(places < 0, size, places).astype(np.int32)})

    def rows(self, arrays: Mapping[str, mx.array], samples: Samples) -> tuple[mx.array, mx.array]:
        """Returns the encoder's rows, with those of the pack's entries added to them."""
        read, output = encode_rows(self.model, samples)
        places = arrays["in_pack"]
        own_read = self.input_rows if "input_rows" in self else self.output_rows
        return read + _with_zero(own_read)[places[samples.read]], output + _with_zero(self.output_rows)[places]

    def pack_rows(self, entries: Sequence[Sequence[int]], params: CodecParams) -> dict[str, mx.array]:
        """Returns the rows [P, D] float32 of the pack's entries, by the names that `TunedRows` stores them under."""
        read, output = encoded_rows(self.model, entries, params)
        rows = {"output_rows": output + self.output_rows}
        return rows if self.model.sides_are_one else {**rows, "input_rows": read + self.input_rows}


def places_in_pack(arrays: Mapping[str, NDArray[Any]], pack: int) -> NDArray[np.int64]:
    """Returns the place of each distinct entry in the pack, -1 for none, [U].

    arrays: those of a `Batch`, whose samples have the pack's entries in their first `pack` slots, in one order; plain
    samples have no entry.
    """
    places = np.full(len(arrays["entries"]), -1)
    with_pack = np.flatnonzero(arrays["available"].max(1) >= pack)
    if pack and len(with_pack):
        places[arrays["slots"][with_pack[0], :pack]] = np.arange(pack)
    return places


def _with_zero(rows: mx.array) -> mx.array:
    """Returns rows [P, D] and one more row of zeros."""
    return mx.concatenate([rows, mx.zeros((1, rows.shape[1]), rows.dtype)])


def encoded_rows(model: Model, entries: Sequence[Sequence[int]], params: CodecParams) -> list[mx.array]:
    """Returns the input rows and the output rows that a model's hyper-encoders make of entries, float32 [P, D] each."""
    lengths = np.array([len(entry) for entry in entries], np.int64)
    base_ids = np.full((len(entries), params.merge_size), params.fill, np.uint32)
    for row, entry in zip(base_ids, entries, strict=True):
        row[: len(entry)] = entry
    rows = [side.astype(mx.float32) for side in model.rows(base_ids, lengths)]
    mx.eval(rows)
    return rows


def separate_pack(arrays: dict[str, NDArray], distinct: int, pack: int, padding: Padding = CLOSE) -> dict[str, NDArray]:
    """Returns a batch's arrays for a model that already has rows for the pack's entries.

    arrays: as of `places_in_pack`. distinct: number of real entries, which come before the padding. padding: rules for
    the arrays' sizes. "Grown" entries are those outside the pack.

    entries, lengths: only of grown entries. slots: index of each slot's row in [pack rows | grown rows]. read: the
    grown entries that inputs use, as indices into `entries`. input_rows: index of each input's row in [pack rows | rows
    of `read`], -1 for a base id.
    """
    place = places_in_pack(arrays, pack)  # of each entry in [pack | grown]
    grown = np.flatnonzero(place[:distinct] < 0)
    place[grown] = pack + np.arange(len(grown))
    read = place[arrays["read"][: int(arrays["input_rows"].max()) + 1]]
    is_grown = read >= pack
    new_index = np.where(is_grown, pack + np.cumsum(is_grown) - 1, read)  # of each entry in the old `read`
    rows, size = arrays["input_rows"], padding.entries(len(grown))
    grown_read = (read[is_grown] - pack).astype(np.int32)
    return {
        **arrays,
        "entries": _padded(arrays["entries"][grown], arrays["entries"], size),
        "lengths": _padded(arrays["lengths"][grown], arrays["lengths"], size),
        "slots": np.maximum(place[arrays["slots"]], 0).astype(np.int32),
        "read": _padded(grown_read, np.zeros(1, np.int32), padding.read(len(grown_read), size)),
        "input_rows": np.where(rows < 0, -1, new_index[rows] if len(new_index) else -1).astype(np.int32),
    }


def _padded(values: NDArray, like: NDArray, size: int) -> NDArray:
    """Returns the values, padded to `size` with copies of the first value of `like`."""
    return np.concatenate([values, np.repeat(like[:1], size - len(values), axis=0)])
