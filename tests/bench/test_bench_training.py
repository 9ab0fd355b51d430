"""The training bench: what its records hold and that each part does what its name says (no timing is judged here)."""

from __future__ import annotations

import argparse
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_zip.bench import training
from mlx_zip.bench.codec import synthetic_ids
from mlx_zip.bench.training import TrainingBench, write_synthetic
from mlx_zip.bench.training_step import encoders_call, make_trained_stepper, plain_batch_of_same_size
from mlx_zip.codec import Codebook
from mlx_zip.errors import MlxZipError
from mlx_zip.training.prepare.shards import PreparedShards
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.forward_pass import encode_hyper_rows
from mlx_zip.training.steps.stepper import to_mlx_arrays
from support import tiny_training

TINY = [
    "--context",
    "24",
    "--batch-size",
    "2",
    "--batches",
    "1",
    "--trials",
    "2",
    "--encoder-layers",
    "1",
]


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    training.add_arguments(parser)
    return parser.parse_args([*TINY, *map(str, flags)])


def records(capsys, *flags: object) -> dict[str, dict]:
    assert training.run(parse(*flags)) == 0
    return {line["what"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}


# ---- what is printed


@pytest.mark.slow
def test_a_step_is_split_and_held_against_what_it_cannot_do_without(capsys):
    record = records(capsys, "--only", "step")["step"]
    names = ["zip step", "plain step", "encoders"]
    assert list(record["parts"]) == names
    samples = {name: record["parts"][name]["samples"] for name in names}
    assert all(len(values) == 2 and min(values) > 0 for values in samples.values())
    expected = [z / (p + e) for z, p, e in zip(*samples.values(), strict=True)]
    assert record["ratio"]["samples"] == pytest.approx(expected, abs=2e-3)
    assert record["machine"]
    assert record["versions"]["mlx"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--fine-tune-type", "full"], ["--compile", "on"], ["--dtype", "bfloat16"]])
def test_a_step_is_measured_in_every_way_it_can_be_trained(capsys, flags):
    assert records(capsys, "--only", "step", "--trials", "1", *flags)["step"]["ratio"]["median"] > 0


def test_a_model_and_prepared_data_take_the_place_of_what_is_made_up(capsys, tmp_path):
    model, data = tiny_training.write_plain(tmp_path / "base"), tiny_training.write_shards(tmp_path / "data")
    found = records(capsys, "--model", model, "--data", data, "--only", "step")
    assert {(line["data"], line["setting"]["model"]) for line in found.values()} == {("data", "base")}


# ---- what is measured


@pytest.fixture
def bench(tmp_path):
    return TrainingBench(parse(), tmp_path)


def samples_of(bench, n=3):
    return [bench.shards[i] for i in range(n)]


def encoders(bench, kind="lora"):
    """A model that a step trains, a batch, and the call that encodes the batch's rows."""
    settings = TrainSettings(iters=1, fine_tune_type=kind, lora_rank=2)
    model = make_trained_stepper("mlx", bench._make(bench.shards.params)[0], {}, settings).trainee.model
    batch = make_batch(samples_of(bench), bench.shards.params)
    return model, batch, encoders_call(model, settings, batch)


def test_the_plain_step_reads_as_many_ids_without_any_hypertoken(bench):
    batch = make_batch(samples_of(bench), bench.shards.params)
    plain = plain_batch_of_same_size(batch, training.VOCAB)
    assert (batch.arrays["targets"] >= training.VOCAB).any()
    assert plain.arrays.keys() == {"inputs", "targets", "weights"}
    for name, array in plain.arrays.items():
        assert array.shape == batch.arrays[name].shape
    assert plain.arrays["targets"].max() < training.VOCAB
    kept = batch.arrays["targets"] < training.VOCAB
    np.testing.assert_array_equal(plain.arrays["targets"][kept], batch.arrays["targets"][kept])


def test_the_encoders_part_has_value_and_gradient_of_the_rows_that_a_step_encodes(bench):
    model, batch, call = encoders(bench)
    value, gradients = call()
    rows = encode_hyper_rows(model, to_mlx_arrays(batch))
    assert value.item() == pytest.approx(sum(r.square().sum().item() for r in rows), rel=1e-5)
    assert gradients.keys() == {"input_encoder", "output_encoder"}
    norms = [float(mx.abs(value).max()) for _, value in tree_flatten(gradients)]
    assert max(norms) > 0


def test_what_a_step_is_held_against_encodes_each_side_once(bench, monkeypatch):
    """A second forward pass saves memory; it is the step's own cost, not one that it cannot do without."""
    (model, _, call), calls = encoders(bench), []
    kind = type(model.input_encoder)
    encode = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *args: (calls.append(self), encode(self, *args))[1])
    mx.eval(call())
    assert calls == [model.output_encoder, model.input_encoder]


def test_the_encoders_part_leaves_the_models_weights_as_they_were(bench):
    model, _, call = encoders(bench, "full")
    before = dict(tree_flatten(model.parameters()))
    mx.eval(call())
    after = dict(tree_flatten(model.parameters()))
    assert all(bool((before[name] == after[name]).all()) for name in before)


@pytest.mark.slow
def test_sharing_is_counted_over_the_measured_batches(capsys, bench):
    record = records(capsys, "--only", "step")["step"]
    assert 0 < record["distinct_entries"] <= record["installed_entries"] <= record["ids"]


def test_the_synthetic_samples_hold_the_synthetic_ids(tmp_path):
    shards = PreparedShards(write_synthetic(tmp_path, 700, 64, 3))
    found = []
    for i in range(len(shards)):
        book = Codebook(shards.params)
        book.push(shards[i].ids)
        found.append(book.expand(shards[i].ids))
    np.testing.assert_array_equal(np.concatenate(found), synthetic_ids(700, training.VOCAB))
    assert len(shards[0].ids) < 64 == shards[0].base_ids


# ---- what is refused


def test_a_model_needs_data_of_its_own(tmp_path):
    with pytest.raises(MlxZipError, match="--model and --data go together"):
        training.run(parse("--model", tmp_path))


def test_data_without_a_codebook_are_refused(tmp_path):
    data = tiny_training.write_shards(tmp_path / "data", tiny_training.PLAIN)
    with pytest.raises(MlxZipError, match="without a codebook"):
        training.run(parse("--model", tiny_training.write_plain(tmp_path / "base"), "--data", data))


def test_too_few_samples_are_refused(tmp_path):
    data = tiny_training.write_shards(tmp_path / "data", samples=1)
    with pytest.raises(MlxZipError, match="too few samples for 1 batches of 2"):
        training.run(parse("--model", tiny_training.write_plain(tmp_path / "base"), "--data", data))


@pytest.mark.parametrize("name", ["--context", "--trials", "--batches"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(MlxZipError, match=f"{name} must be at least 1, got 0"):
        training.run(parse(name, 0))
