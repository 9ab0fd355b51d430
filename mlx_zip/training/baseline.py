"""Measures a model without hypertokens: the baseline that a trained zip2zip model is compared with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.training.batches import make_batch
from mlx_zip.training.prepare.shards import Sample, grows
from mlx_zip.training.trainer import Trainer


def base_bits_per_byte(trainer: Trainer) -> float:
    """Returns bits per byte of the validation samples when the trainer's model reads them as base ids only.

    Called before the first step, it measures the model that training begins with. A base id counts if the id that it
    was compressed into counts.
    """
    assert trainer.valid is not None
    params, nats, n_bytes = trainer.valid.params, 0.0, 0
    trainer.trainee.eval()
    for indices in trainer.shown_validation_batches("Measuring the base"):
        samples = [expanded(trainer.valid[int(i)], params) for i in indices]
        batch = make_batch(samples, replace(params, codebook_size=0, merge_size=1, start=None), base_positions=True)
        nats += trainer.stepper.base_nats(batch, trainer.is_long(batch))
        n_bytes += batch.n_bytes
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
