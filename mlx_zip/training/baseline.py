"""What a model costs without hypertokens: the base that a trained zip2zip model is compared with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.models import Model
from mlx_zip.models.whole import Samples, run_whole
from mlx_zip.training.batches import Batch, make_batch
from mlx_zip.training.objective import joint_nats, plain_nats
from mlx_zip.training.shards import Sample, grows
from mlx_zip.training.stepping import to_device
from mlx_zip.training.trainer import Trainer


def base_bits_per_byte(trainer: Trainer) -> float:
    """Bits per byte of the validation samples, read by the trainer's model as base ids alone.

    Before the first step that is the figure of the model that training begins with. Of a sample with a mask, base ids
    count whose hypertoken does.
    """
    assert trainer.valid is not None
    params, nats, n_bytes = trainer.valid.params, 0.0, 0
    trainer.trainee.eval()
    for indices in trainer.validation_batches():
        samples = [expanded(trainer.valid[int(i)], params) for i in indices]
        batch = make_batch(samples, replace(params, codebook_size=0, merge_size=1, start=None), base_positions=True)
        sums: Any = _base_nats(trainer.trainee.model, batch, trainer.is_long(batch))["nats"]
        nats, n_bytes = nats + sums.item(), n_bytes + batch.n_bytes
    trainer.trainee.train()
    return nats / math.log(2) / max(n_bytes, 1)


def expanded(sample: Sample, params: CodecParams) -> Sample:
    """A sample as base ids, each of which counts if the id that stood for it did."""
    if not grows(params):
        return sample
    book = Codebook(sample.params(params))
    book.push(sample.ids)
    ids, mask = book.expand(sample.ids), np.repeat(sample.mask, book.spans(sample.ids))
    return Sample(ids, mask, sample.base_ids, sample.n_bytes)


def _base_nats(model: Any, batch: Batch, long: bool) -> dict[str, mx.array]:
    arrays = to_device(batch)
    if not isinstance(model, Model):
        return plain_nats(model(arrays["inputs"]), arrays)
    none, row = mx.zeros((1,), mx.int32), mx.zeros((1, model.config.encoder.model_size))
    rows = mx.full(arrays["inputs"].shape, -1, mx.int32)
    slots = mx.zeros((arrays["inputs"].shape[0], 1), mx.int32)
    index = arrays["index"] if model.config.position_mode == "base_token_end" else None
    samples = Samples(arrays["inputs"], none, rows, none[:, None], none, slots, index=index, long=long)
    out = run_whole(model, samples, (row, row))
    return joint_nats(out.base, out.hyper, {**arrays, "available": mx.zeros_like(arrays["targets"])})
