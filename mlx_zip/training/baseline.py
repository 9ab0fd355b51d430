"""Measures a model without hypertokens: the baseline that a trained zip2zip model is compared with."""

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
    """Returns bits per byte of the validation samples when the trainer's model reads them as base ids only.

    Called before the first step, it measures the model that training begins with. A base id counts if the id that it
    was compressed into counts.
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
    """Returns a sample with its ids expanded to base ids; a base id counts if the id that it comes from counts."""
    if not grows(params):
        return sample
    book = Codebook(sample.params(params))
    book.push(sample.ids)
    ids, mask = book.expand(sample.ids), np.repeat(sample.mask, book.spans(sample.ids))
    return Sample(ids, mask, sample.base_ids, sample.n_bytes)


def _base_nats(model: Any, batch: Batch, long: bool) -> dict[str, mx.array]:
    """Returns `nats` and `count` of a batch of base ids. long: use LongRoPE's long factors.

    A zip2zip model gets one entry that no position may predict.
    """
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
