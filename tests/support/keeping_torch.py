"""What `support.keeping` does with MLX, for the engine on PyTorch: rows of a batch in place of caches."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from mlx_zip.codec import compress_next
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.model import open_model
from mlx_zip.cuda.session_caches import CudaCaches
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from support.torch_folders import save, save_weights

MOST, CAPACITY = 16, 400


class Rolling(Batch):
    """A batch whose oldest sequence is removed when a new one is added and no row is free."""

    def _add_sequence(self, begin):
        self._old = [sequence for sequence in getattr(self, "_old", []) if sequence.row >= 0]
        self._old += [sequence for sequence in self.sequences if sequence not in self._old]
        if len(self) == self.max_sequences:
            self.release(self._old[0])
        return super()._add_sequence(begin)


def model(made, name, config=None, dtype="float32"):
    """A model of MLX, opened on PyTorch. name: of its folder. config: that of a plain model."""
    folder = Path(mkdtemp()) / name
    saved = save(made, folder) if config is None else save_weights(made, folder, config)
    return open_model(saved, "cpu", dtype)


@cache
def batch_of(model):
    return Rolling(model, MOST, CAPACITY)


def store(model, tokenizer, **options):
    return SessionStore(CudaCaches(model, tokenizer, batch_of(model)), SessionOptions(**options))


def new_cache(model, start=None):
    batch = batch_of(model)
    return batch.sequences[batch.add(start)]


def read(sequence, base_ids, batch):
    """Has a row read base ids as a request does, after what it holds; returns the best next id."""
    return _step(sequence, compress_next(sequence.book, np.asarray(base_ids)), batch)


def _step(sequence, ids, batch):
    batch.read(sequence.row, ids)
    row = slice(sequence.row, sequence.row + 1)
    output = sequence.output
    return int(batch.model.head(output[None], batch.tables.outputs[row], batch.tables.installed[row]).best)


def greedy(model, sequence, base_ids, steps):
    """Reads base ids and returns the greedy ids after them, and the base ids that they stand for; all are read."""
    batch, out, base = batch_of(model), [], []
    best = read(sequence, base_ids, batch)
    for _ in range(steps):
        out.append(best)
        base += list(sequence.book.base_ids_of(best))
        best = _step(sequence, [best], batch)
    return out, base


def read_at_once(model, held, prompt, steps):
    """The greedy ids after a prompt whose beginning was read as the ids `held`, by a new row in one call."""
    sequence = new_cache(model)
    _step(sequence, np.asarray(held, np.uint32), batch_of(model))
    return greedy(model, sequence, prompt[sequence.book.base_length :], steps)[0]


def random_state():
    return torch.tensor([5, 6], dtype=torch.uint8)
