"""What `support.keeping` does with MLX, for the engine on PyTorch: rows of a batch in place of caches."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

from mlx_zip.codec import compress_next
from mlx_zip.cuda.batch import Batch, RowHandles
from mlx_zip.cuda.model import open_model
from mlx_zip.cuda.session_caches import CudaCaches
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from support.torch_folders import save, save_weights

MOST, CAPACITY = 16, 400
_FOLDERS = tempfile.TemporaryDirectory()


class Rolling(RowHandles):
    """Seats of which the oldest is given up when a new one is taken and none is free."""

    def add(self, start):
        self._free()
        return super().add(start)

    def restore(self, snapshot, ids):
        self._free()
        return super().restore(snapshot, ids)

    def _free(self):
        self._old = [row_handle for row_handle in getattr(self, "_old", []) if row_handle in self._row_handles]
        self._old += [row_handle for row_handle in self._row_handles if row_handle not in self._old]
        if len(self.batch) == self.batch.max_sequences:
            self.release(self._old[0])


def model(made, name, config=None, dtype="float32"):
    """A model of MLX, opened on PyTorch. name: of its folder. config: that of a plain model."""
    folder = Path(_FOLDERS.name) / name
    saved = save(made, folder) if config is None else save_weights(made, folder, config)
    return open_model(saved, "cpu", dtype)


@cache
def row_handles(model):
    return Rolling(Batch(model, MOST, CAPACITY))


def store(model, tokenizer, **options):
    return SessionStore(CudaCaches(model, tokenizer, row_handles(model)), SessionOptions(**options))


def new_cache(model, start=None):
    return row_handles(model).add(start)


def read(row_handle, base_ids, batch):
    """Has a row read base ids as a request does, after what it holds; returns the best next id."""
    return _step(row_handle, compress_next(row_handle.book, np.asarray(base_ids)), batch)


def _step(row_handle, ids, batch):
    batch.read(row_handle.row, ids)
    row = slice(row_handle.row, row_handle.row + 1)
    output = batch._sequences[row_handle.row].output
    return int(batch.model.head(output[None], batch.tables.outputs[row], batch.tables.installed[row]).best)


def greedy(model, row_handle, base_ids, steps):
    """Reads base ids and returns the greedy ids after them, and the base ids that they stand for; all are read."""
    batch, out, base = row_handles(model).batch, [], []
    best = read(row_handle, base_ids, batch)
    for _ in range(steps):
        out.append(best)
        base += list(row_handle.book.base_ids_of(best))
        best = _step(row_handle, [best], batch)
    return out, base


def read_at_once(model, held, prompt, steps):
    """The greedy ids after a prompt whose beginning was read as the ids `held`, by a new row in one call."""
    row_handle = new_cache(model)
    _step(row_handle, np.asarray(held, np.uint32), row_handles(model).batch)
    return greedy(model, row_handle, prompt[row_handle.book.base_length :], steps)[0]


def random_state():
    return torch.tensor([5, 6], dtype=torch.uint8)
