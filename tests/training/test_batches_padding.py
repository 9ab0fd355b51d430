"""Sizes of batches: close where a step is not compiled, few where it is."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_zip.training.run import train
from mlx_zip.training.run_folder import read_metrics
from mlx_zip.training.steps.batches import COARSE_PADDING, FINE_PADDING, make_batch
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import to_mlx_arrays
from support.tiny import base_ids, tiny_config
from support.tiny_training import CODEC, losses, make_sample, options, random_model, settings, text_ids

STEPS = 120


def shapes(batch) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for _, array in sorted(batch.arrays.items()))


def varied_batches(padding, canonical: bool = False) -> list:
    """Batches of four samples whose lengths lie anywhere between 16 and 400 ids."""
    rng = np.random.default_rng(0)
    made = []
    for step in range(STEPS):
        centre = rng.integers(20, 380)
        lengths = rng.integers(centre - 4, centre + 20, 4)
        samples = [make_sample(CODEC, text_ids(int(n), 7 * step + i)) for i, n in enumerate(lengths)]
        made.append(make_batch(samples, CODEC, canonical=canonical, padding=padding))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("canonical", [False, True])
def test_few_sizes_make_few_shapes_of_batches_of_any_length(canonical):
    few, close = (
        {shapes(batch) for batch in varied_batches(padding, canonical)} for padding in (COARSE_PADDING, FINE_PADDING)
    )
    assert len(few) <= 16
    assert len(close) > 3 * len(few)


@pytest.mark.parametrize("n", [1, 31, 37, 64, 65, 129, 1000, 1025, 5000])
def test_few_sizes_are_at_most_half_of_what_is_needed_too_large_or_one_step(n):
    assert n <= COARSE_PADDING.padded_length(n) <= max(n + 31, 1.5 * n)
    assert n <= COARSE_PADDING.padded_entry_count(n) <= max(n + 63, 1.5 * n)
    assert (
        n
        <= COARSE_PADDING.padded_read_entry_count(n, COARSE_PADDING.padded_entry_count(4 * n))
        <= max(COARSE_PADDING.padded_entry_count(4 * n), 2 * n)
    )
    assert (
        n
        <= COARSE_PADDING.padded_slot_count(n, COARSE_PADDING.padded_length(n), 4096)
        <= COARSE_PADDING.padded_length(n)
    )


def test_a_full_codebook_of_long_samples_is_not_padded_to_their_length():
    assert COARSE_PADDING.padded_slot_count(1024, COARSE_PADDING.padded_length(8000), 1024) == 1024


@pytest.mark.parametrize("canonical", [False, True])
def test_few_sizes_change_no_loss(canonical):
    config = tiny_config("llama", "res_latent_attn")
    model = random_model({**config, "zip2zip": {**config["zip2zip"], "canonical": canonical}})
    params = model.config.codec_params
    samples = [make_sample(params, base_ids(n, seed=n), masked=[3]) for n in (26, 50, 33)]
    trainee = Trainee(model, LossWeights(token_type=0.1))
    close, few = (
        trainee.losses(to_mlx_arrays(make_batch(samples, params, canonical=canonical, padding=padding)))
        for padding in (FINE_PADDING, COARSE_PADDING)
    )
    for name, value in close.items():
        assert few[name].item() == pytest.approx(value.item(), rel=1e-5), name


# ---- traces


def varied(folder, lengths):
    """Prepared data of samples of these many base ids."""
    from mlx_zip.training.prepare.shards import make_codec_record, write_index, write_shard

    folder.mkdir(parents=True)
    shards = [write_shard(folder, "shard-00000", [make_sample(CODEC, text_ids(n, i)) for i, n in enumerate(lengths)])]
    write_index(folder, {"codec": make_codec_record(CODEC), "context": 64, "shards": shards, "pool": None})


def test_a_compiled_run_over_many_lengths_is_traced_a_few_times_and_says_how_often(tmp_path):
    varied(tmp_path / "data", [10 + (i * 37) % 54 for i in range(48)])
    run = options(tmp_path / "run")
    chosen = settings(compile="on", iters=12, lora_layers=1, lora_keys="self_attn.q_proj", save_every=50)
    train(run, chosen, quiet=True)
    counts = [line["traces"] for line in read_metrics(run.out) if "loss" in line]
    assert len(losses(run.out)) == len(counts) == 12
    assert counts == sorted(counts)
    assert 2 <= counts[-1] <= 5  # the update once, the gradients once per shape


def test_a_run_that_is_not_compiled_has_no_traces(tmp_path):
    run = options(tmp_path / "run")
    train(run, settings(compile="off", iters=2), quiet=True)
    assert not any("traces" in line for line in read_metrics(run.out))
