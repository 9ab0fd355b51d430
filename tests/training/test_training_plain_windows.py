"""Data prepared without hypertokens among data prepared with them: such samples are read and costed as plain text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_zip.errors import DataError
from mlx_zip.models.zip_model import Model
from mlx_zip.training.prepare.shards import Sample
from mlx_zip.training.run import train
from mlx_zip.training.run_data import JoinedFolders
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import to_mlx_arrays
from support.tiny import tiny_model
from support.tiny_training import CODEC, PLAIN, losses, make_sample, options, settings, write_shards

START = ((5, 6), (6, 7, 8), (9, 9))
IDS = [4, 5, 6, 7, 8, 5, 6, 9, 9, 12, 5, 6, 4, 5, 6, 7, 8]


def as_plain(ids: list[int]) -> Sample:
    return Sample(np.array(ids, np.uint32), np.ones(len(ids), np.bool_), len(ids), 2 * len(ids), plain=True)


def in_zip(ids: list[int], model: Model) -> Sample:
    return make_sample(replace(model.config.codec_params, start=START), ids)


def nats_of(model: Model, samples: list[Sample], canonical: bool) -> float:
    trainee = Trainee(model, LossWeights())
    batch = make_batch(samples, replace(model.config.codec_params, start=START), canonical=canonical)
    return float(trainee.losses(to_mlx_arrays(trainee.prepare_batch(batch)))["nats"].item())


@pytest.mark.parametrize("canonical", [False, True])
def test_a_plain_sample_costs_what_the_decoder_alone_says(canonical):
    model = tiny_model("llama", canonical=canonical)
    logits = model(mx.array([IDS[:-1]]))[0, :, : model.config.codec_params.vocab_size].astype(mx.float32)
    expected = nn.losses.cross_entropy(logits, mx.array(IDS[1:]), reduction="sum").item()
    assert nats_of(model, [as_plain(IDS)], canonical) == pytest.approx(expected, rel=1e-5)
    zipped = in_zip(IDS, model)
    both = nats_of(model, [as_plain(IDS), zipped], canonical)
    assert both == pytest.approx(expected + nats_of(model, [zipped], canonical), rel=1e-5)


def test_the_first_folder_with_hypertokens_gives_the_codec_wherever_it_stands(tmp_path):
    zipped, plain = write_shards(tmp_path / "zip", samples=3), write_shards(tmp_path / "plain", PLAIN, samples=2)
    for folders in ([zipped, plain], [plain, zipped]):
        data = JoinedFolders(folders)
        assert data.params == CODEC
        marks = {folder: [] for folder in folders}
        for i in range(len(data)):
            marks[folders[0] if i < len(data.parts[0]) else folders[1]].append(data[i].plain)
        assert marks == {zipped: [False] * 3, plain: [True] * 2}
    assert not any(JoinedFolders([plain])[i].plain for i in range(2))  # of that codec there are no hypertokens anyway


def test_plain_data_of_another_tokenizer_are_still_refused(tmp_path):
    other = write_shards(tmp_path / "plain", replace(PLAIN, disabled_ids=(0, 1)), samples=2)
    with pytest.raises(DataError, match=r"plain was prepared for another codec than .*zip"):
        JoinedFolders([write_shards(tmp_path / "zip", samples=2), other])


@pytest.mark.parametrize("engine", ["mlx", "torch"])
def test_a_run_reads_both_kinds_side_by_side_and_both_trainers_agree(engine, tmp_path):
    if engine == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
        pytest.importorskip("transformers", reason="transformers is not installed")

    def run(name: str, data: list[Any], which: str) -> list[float]:
        made = options(tmp_path / name, data=data, canonical=True, engine=which)
        train(made, settings(iters=3, learning_rate=1e-3), quiet=True)
        return [loss for _, loss, _ in losses(made.out)]

    zipped = write_shards(tmp_path / "data", samples=10)
    plain = write_shards(tmp_path / "as-it-is", PLAIN, samples=10)
    both = run("both", [zipped, plain], engine)
    assert both != run("alone", [zipped], engine)
    if engine == "torch":
        assert both == pytest.approx(run("other", [zipped, plain], "mlx"), rel=1e-4)
