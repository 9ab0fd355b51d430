"""Decoding steps of one sequence on PyTorch, without the engine around them, to measure what the engine adds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np

from mlx_zip.codec.codebook import compress_next
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.sampling import best_canonical_ids
from mlx_zip.engine.sampling.exclusions import CanonicalIds
from mlx_zip.errors import GenerationError, ModelError
from mlx_zip.packs.pack import PackOrEntries

CHUNK = 512  # ids of a prompt in one prefill pass
Emitted = tuple[int, tuple[int, ...]]  # an id, and the base ids that it stands for


def generate_greedily(
    model: CudaModel,
    base_ids: Sequence[int],
    max_tokens: int,
    eos_ids: Collection[int] = (),
    *,
    pack: PackOrEntries | None = None,
    capacity: int | None = None,
    chunk: int = CHUNK,
    batch: Batch | None = None,
) -> Iterator[Emitted]:
    """Yields greedily chosen ids that follow a prompt of base ids, each with the base ids that it stands for.

    max_tokens: base ids to emit; the last hypertoken may exceed this number. eos_ids: base ids that end the text. pack:
    see `CudaModel.sequence_start`. capacity: number of ids that the caches have room for; None: as many as needed.
    chunk: ids per prefill pass. batch: an empty batch of this model, whose CUDA graphs are reused and which is empty
    again at the end; None makes a batch with `capacity`. Raises `GenerationError` if the prompt is empty, `ModelError`
    if `batch` is not empty or another model's, and `CodecError`.
    """
    if not len(base_ids):
        raise GenerationError("the prompt is empty; give at least one id")
    if batch is None:
        batch = Batch(model, 1, len(base_ids) + max_tokens if capacity is None else capacity)
    if len(batch) or batch.model is not model:
        raise ModelError("the batch holds a sequence, or is another model's")
    row = batch.add(pack)
    try:
        prefill_in_chunks(batch, row, compress_next(batch.book(row), np.asarray(base_ids)), chunk)
        yield from GreedySteps(batch, max_tokens, eos_ids)
    finally:
        batch.remove(row)


def prefill_in_chunks(batch: Batch, row: int, ids: np.ndarray, chunk: int = CHUNK) -> None:
    """Reads a prompt's ids into a sequence, `chunk` ids per pass."""
    for begin in range(0, len(ids), chunk):
        batch.read(row, ids[begin : begin + chunk], more=begin + chunk < len(ids))


class GreedySteps:
    """Iterates over the ids that the only sequence of a batch emits. max_tokens, eos_ids: as in `generate_greedily`.

    While the caller handles an id, the device runs the decoder's layers over the next id. After a complete iteration,
    the batch has read every emitted id.
    """

    def __init__(self, batch: Batch, max_tokens: int, eos_ids: Collection[int] = ()) -> None:
        self._batch, self._left, self._ends = batch, max_tokens, frozenset(eos_ids)
        config = batch.model.config
        self._canonical = CanonicalIds(batch.book(0)) if config is not None and config.canonical else None
        self._pad = 0 if config is None else config.pad_id

    def __iter__(self) -> Iterator[Emitted]:
        going = self._begin_step()
        while going:
            [emitted] = self._batch.wait_for_ids()
            for error in self._batch.update_codebooks([emitted]).values():
                raise error
            base_ids = tuple(self._batch.book(0).base_ids(self._batch.book(0).mark() - 1).tolist())
            self._left -= len(base_ids) if self._ends.isdisjoint(base_ids) else self._left
            going = self._begin_step()
            yield emitted, base_ids

    def _begin_step(self) -> bool:
        """Starts the next step and returns True; returns False if the text has ended or the caches are full."""
        if self._left <= 0 or not self._batch.room_left(0):
            return False
        self._choose_id()
        self._batch.start_body()
        return True

    def _choose_id(self) -> None:
        """Chooses the best id, or the best canonical id if the model's config requires canonical decoding."""
        excluded = [] if self._canonical is None else self._canonical.excluded()
        chooser = partial(best_canonical_ids, excluded=[excluded], never=self._pad) if excluded else None
        self._batch.choose_ids(chooser)
