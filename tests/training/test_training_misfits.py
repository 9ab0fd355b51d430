"""Data, bases, encoders and settings that do not fit together."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from mlx_zip import ConfigError, load
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.training import trainer
from mlx_zip.training.prepare.shards import PreparedShards, make_codec_record
from mlx_zip.training.run import train
from mlx_zip.training.settings import EncoderOptions
from mlx_zip.training.starting_model import make_starting_model
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import to_mlx_arrays
from support.tiny_training import (
    CODEC,
    ENCODER,
    PLAIN,
    TOKENS,
    arrays_of,
    losses,
    options,
    saved_config,
    settings,
    write_plain,
    write_shards,
)


def test_data_of_another_codec_than_the_zip_models_are_refused(tmp_path):
    first = options(tmp_path / "first")
    train(first, settings(iters=1), quiet=True)
    other = write_shards(tmp_path / "other", replace(CODEC, merge_size=2))
    with pytest.raises(TrainingError, match="another codec"):
        train(options(tmp_path / "run", model=str(first.out / "model"), data=[other]), settings(), quiet=True)


def test_a_zip_model_is_not_trained_on_data_without_a_codebook(tmp_path):
    first = options(tmp_path / "first")
    train(first, settings(iters=1), quiet=True)
    other = write_shards(tmp_path / "other", replace(CODEC, codebook_size=0))
    with pytest.raises(TrainingError, match="another codec"):
        train(options(tmp_path / "run", model=str(first.out / "model"), data=[other]), settings(), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_zip_model_takes_over_the_codebook_size_and_longer_entries_of_its_data(tmp_path):
    first = options(tmp_path / "first")
    train(first, settings(iters=1), quiet=True)
    larger = replace(CODEC, merge_size=CODEC.merge_size + 1, codebook_size=CODEC.codebook_size + 8)
    other = write_shards(tmp_path / "other", larger)
    before, _ = make_starting_model(first.out / "model", None, CODEC, ENCODER)
    after, config = make_starting_model(first.out / "model", None, larger, ENCODER)
    assert after.config.codec_params == larger
    assert config["zip2zip"]["compression"]["max_subtokens"] == larger.merge_size
    old, new = arrays_of(before), arrays_of(after)
    assert old.keys() == new.keys()
    for name, value in new.items():
        np.testing.assert_array_equal(value[: len(old[name])], old[name])
        if name.endswith("pos_embed.weight"):
            np.testing.assert_array_equal(value[CODEC.merge_size :], old[name][-1:])
    train(options(tmp_path / "run", model=str(first.out / "model"), data=[other]), settings(iters=1), quiet=True)
    assert saved_config(tmp_path / "run" / "model")["zip2zip"]["compression"]["max_codebook_size"] == 56


def test_a_run_makes_a_model_canonical_or_keeps_what_it_is(tmp_path, monkeypatch):
    seen = []
    making = trainer.make_batch
    monkeypatch.setattr(trainer, "make_batch", lambda *a, **k: seen.append(made := making(*a, **k)) or made)
    first = options(tmp_path / "first", canonical=True)
    train(first, settings(iters=1), quiet=True)
    assert saved_config(first.out / "model")["zip2zip"]["canonical"] is True
    start = {"model": str(first.out / "model")}
    for name, canonical, expected in (("kept", None, True), ("without", False, False)):
        seen.clear()
        train(options(tmp_path / name, canonical=canonical, **start), settings(iters=1), quiet=True)
        assert saved_config(tmp_path / name / "model")["zip2zip"].get("canonical", False) is expected
        assert all(("excluded" in batch.arrays) is expected for batch in seen)
        assert seen


def test_canonical_decoding_needs_a_codebook(tmp_path):
    plain = write_shards(tmp_path / "no-codebook", PLAIN)
    with pytest.raises(TrainingError, match="prepared without one"):
        train(options(tmp_path / "run", data=[plain], canonical=True), settings(), quiet=True)
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_are_refused(tmp_path):
    write_shards(tmp_path / "data", tokenizer={"fingerprint": "0" * 64, "size": TOKENS})
    with pytest.raises(DataError, match=r"another tokenizer than the one in .*plain"):
        train(options(tmp_path / "run"), settings(), quiet=True)


def test_data_folders_of_different_codecs_are_not_read_as_one(tmp_path):
    folders = [write_shards(tmp_path / "a"), write_shards(tmp_path / "b", replace(CODEC, codebook_size=47))]
    with pytest.raises(DataError, match="another codec"):
        train(options(tmp_path / "run", data=folders), settings(), quiet=True)


def test_windows_longer_than_the_models_context_are_refused(tmp_path):
    write_plain(tmp_path / "plain", max_position_embeddings=32)
    with pytest.raises(TrainingError, match=r"64 base ids, the model's context is 32"):
        train(options(tmp_path / "run"), settings(), quiet=True)


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("model.layers.0.extra", np.zeros(3, np.float32), "has tensors the decoder has no place for"),
        ("model.norm.weight", None, "lacks tensors of the decoder"),
    ],
)
def test_a_base_that_lacks_a_tensor_or_has_one_too_many_is_refused(tmp_path, name, tensor, match):
    write_plain(tmp_path / "plain", tensors={name: tensor})
    with pytest.raises(TrainingError, match=f"{match}: {re.escape(name)}"):
        train(options(tmp_path / "run"), settings(), quiet=True)


@pytest.mark.parametrize(
    ("encoder", "match"),
    [
        (EncoderOptions(kind="gru"), "gru"),
        (EncoderOptions(kind="transformer", size=8), "as wide as the model"),
        (EncoderOptions(num_heads=3), "num_heads 3"),
        (EncoderOptions(size=0), "hidden_size must be"),
    ],
)
def test_an_encoder_that_cannot_be_is_refused(encoder, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        train(options(tmp_path / "run", encoder=encoder), settings(), quiet=True)


def test_a_run_that_would_train_nothing_is_refused(tmp_path):
    averaging = options(tmp_path / "run", encoder=EncoderOptions(kind="averaging"))
    with pytest.raises(TrainingError, match="nothing to train"):
        train(averaging, settings(fine_tune_type="encoders"), quiet=True)


def test_samples_are_read_with_the_codebook_they_were_prepared_with_and_not_with_the_models(tmp_path):
    start = ((5, 6), (6, 7, 8))
    params = replace(CODEC, start=start)
    write_shards(tmp_path / "data", params, codec={**make_codec_record(params), "start": start})
    run = options(tmp_path / "run")
    train(run, settings(iters=1), quiet=True)
    assert saved_config(run.out / "model")["zip2zip"]["start"] == [list(entry) for entry in start]
    empty = PreparedShards(write_shards(tmp_path / "empty", samples=4))  # its first slot holds another entry
    further = options(tmp_path / "further", model=str(run.out / "model"), data=[empty.folder])
    train(further, settings(iters=1), quiet=True)
    trainee = Trainee(load(run.out / "model")[0], LossWeights())
    sums = trainee.losses(to_mlx_arrays(make_batch([empty[i] for i in range(4)], CODEC)))
    assert losses(further.out)[0][1] == pytest.approx(sums["nats"].item() / sums["count"].item(), rel=1e-5)
