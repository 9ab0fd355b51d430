"""The rows of a pack as all that is trained: the model around them is frozen."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.models import Model
from mlx_zip.models.whole import encode_rows, run_whole
from mlx_zip.training.batches import Batch, bucket
from mlx_zip.training.objective import LossWeights, Trainee, joint_nats, samples_of


class PackTrainee(Trainee):
    """A frozen model and the rows [P, D] of the entries that every sample begins with, which are trained.

    output_rows: one per entry; input_rows too, unless the model's two sides are one.
    """

    def __init__(self, model: Model, input_rows: mx.array, output_rows: mx.array) -> None:
        super().__init__(model, LossWeights())
        model.freeze()
        self.output_rows = output_rows
        if not model.sides_are_one:
            self.input_rows = input_rows

    @property
    def read_rows(self) -> mx.array:
        """The rows [P, D] that are read."""
        return self.output_rows if self.model.sides_are_one else self.input_rows

    def prepared(self, batch: Batch) -> Batch:
        """Sorts the pack's entries out: see `sort_out`."""
        return replace(batch, arrays=sort_out(batch.arrays, batch.distinct, len(self.output_rows)))

    def losses(self, arrays: dict[str, mx.array], long: bool = False) -> dict[str, mx.array]:
        """`nats` and `count` over [base | pack | what grew]; the rows of what grew are the encoder's."""
        samples = samples_of(arrays, long)
        grown = encode_rows(self.model, samples)
        read, output = mx.concatenate([self.read_rows, grown[0]]), mx.concatenate([self.output_rows, grown[1]])
        out = run_whole(self.model, samples, (read, output))
        return joint_nats(out.base, out.hyper, arrays)


def sort_out(arrays: dict[str, NDArray], distinct: int, pack: int) -> dict[str, NDArray]:
    """A batch's arrays, of which `distinct` entries are real, when rows of the first `pack` slots are at hand.

    entries, lengths: of what grew alone. slots: where the row of each slot is among [pack | what grew]. read: which of
    those that grew are read; input_rows: where each hypertoken's row is among [pack | those]. Every sample has the
    pack's entries in its first slots, in one order.
    """
    place = np.full(len(arrays["entries"]), -1)
    place[arrays["slots"][0, :pack]] = np.arange(pack)
    grown = np.flatnonzero(place[:distinct] < 0)
    place[grown] = pack + np.arange(len(grown))
    read = place[arrays["read"][: int(arrays["input_rows"].max()) + 1]]
    more = read >= pack
    where = np.where(more, pack + np.cumsum(more) - 1, read)
    rows = arrays["input_rows"]
    return {
        **arrays,
        "entries": _padded(arrays["entries"][grown], arrays["entries"]),
        "lengths": _padded(arrays["lengths"][grown], arrays["lengths"]),
        "slots": np.maximum(place[arrays["slots"]], 0).astype(np.int32),
        "read": _padded((read[more] - pack).astype(np.int32), np.zeros(1, np.int32)),
        "input_rows": np.where(rows < 0, -1, where[rows] if len(where) else -1).astype(np.int32),
    }


def _padded(values: NDArray, like: NDArray) -> NDArray:
    """To a length that recurs, with copies of the first of `like`."""
    more = bucket(len(values), least=32) - len(values)
    return np.concatenate([values, np.repeat(like[:1], more, axis=0)])
