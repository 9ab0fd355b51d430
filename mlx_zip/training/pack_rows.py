"""Trains the rows of a pack's entries, and nothing else: the model is frozen."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.models import Model
from mlx_zip.models.whole import encode_rows, run_whole
from mlx_zip.training.batches import Batch
from mlx_zip.training.objective import LossWeights, Trainee, joint_nats, samples_of
from mlx_zip.training.padding import CLOSE, Padding


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

    def losses(self, arrays: dict[str, mx.array], long: bool = False) -> dict[str, mx.array]:
        """Returns `nats` and `count` over base ids, the pack's entries, and entries that the samples installed.

        Rows of the latter come from the hyper-encoder.
        """
        samples = samples_of(arrays, long)
        grown = encode_rows(self.model, samples)
        read, output = mx.concatenate([self.read_rows, grown[0]]), mx.concatenate([self.output_rows, grown[1]])
        out = run_whole(self.model, samples, (read, output))
        return joint_nats(out.base, out.hyper, arrays)


def separate_pack(arrays: dict[str, NDArray], distinct: int, pack: int, padding: Padding = CLOSE) -> dict[str, NDArray]:
    """Returns a batch's arrays for a model that already has rows for the pack's entries.

    arrays: those of a `Batch` whose samples all have the pack's entries in their first `pack` slots, in one order.
    distinct: number of real entries, which come before the padding. padding: rules for the arrays' sizes. "Grown"
    entries are those outside the pack.

    entries, lengths: only of grown entries. slots: index of each slot's row in [pack rows | grown rows]. read: the
    grown entries that inputs use, as indices into `entries`. input_rows: index of each input's row in [pack rows | rows
    of `read`], -1 for a base id.
    """
    place = np.full(len(arrays["entries"]), -1)  # index of each entry in [pack | grown]
    place[arrays["slots"][0, :pack]] = np.arange(pack)
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
