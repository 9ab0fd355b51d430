"""--pack-rows: each entry of the data's pack has rows of its own, which are trained and saved with the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_zip import CodecParams, load
from mlx_zip.engine.mlx.scoring import score_rows
from mlx_zip.engine.scored import Compressed
from mlx_zip.errors import ConversionError, TrainingError
from mlx_zip.packs.pack import IN_ADAPTER, Pack, load_pack
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.prepare.shards import Sample, make_codec_record, write_index, write_shard
from mlx_zip.training.run import choose_stepper, train
from mlx_zip.training.starting_model import freeze_and_add_lora
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.objective import LossWeights, PackAndModelTrainee, Trainee
from mlx_zip.training.steps.stepper import Stepper, make_optimizer, to_mlx_arrays
from support.converting import convert
from support.slow_cases import slow_but
from support.tiny import MERGE, PAD, VOCAB, tiny_config, tiny_model
from support.tiny_training import CODEC, losses, make_sample, options, random_model, settings, write_plain, write_shards

START = ((5, 6), (6, 7, 8), (9, 10), (7, 9))
PARAMS = replace(CODEC, start=START)  # of the plain model's data
TINY = CodecParams(VOCAB, 24, MERGE, (0, 1, PAD), PAD, START)  # of the tiny models
SIZES = {"initial_vocab_size": VOCAB, "max_codebook_size": 24, "max_subtokens": MERGE, "disabled_ids": [0, 1, PAD]}


def words(length: int, seed: int) -> list[int]:
    """Base ids of which many are entries of the pack."""
    rng, ids = np.random.default_rng(seed), [4]
    while len(ids) < length:
        ids += START[rng.integers(len(START))] if rng.random() < 0.7 else [int(rng.integers(4, 20))]
    return ids[:length]


def samples_of(count: int = 4, seed: int = 0, params: CodecParams = TINY) -> list[Any]:
    return [make_sample(params, words(24 + 5 * i, 1000 * seed + i)) for i in range(count)]


def model_of(family: str, tied: bool, canonical: bool) -> Any:
    return tiny_model(family, compression=SIZES, tie_encoders=tied, canonical=canonical)


def batch_of(trainee: Trainee, seed: int = 0) -> Any:
    canonical = trainee.model.config.canonical
    return trainee.prepare_batch(make_batch(samples_of(seed=seed), TINY, canonical=canonical))


def with_random_rows(trainee: PackAndModelTrainee, seed: int = 0) -> PackAndModelTrainee:
    rng = np.random.default_rng(seed)
    for name in ("output_rows", "input_rows"):
        if name in trainee:
            setattr(trainee, name, mx.array(rng.normal(0, 0.3, trainee.output_rows.shape).astype(np.float32)))
    return trainee


def write_data(tmp_path: Any) -> None:
    """Writes a prepared folder of samples that begin with the pack."""
    folder = tmp_path / "data"
    folder.mkdir()
    record = {
        "codec": {**make_codec_record(PARAMS), "start": START},
        "context": 128,
        "shards": [write_shard(folder, "shard-00000", samples_of(16, params=PARAMS))],
        "pool": None,
    }
    write_index(folder, record)


CASES = [("llama", False, False), ("llama", True, True), ("gemma", True, False)]


@pytest.mark.parametrize(("family", "tied", "canonical"), CASES)
def test_rows_begin_as_the_encoders(family, tied, canonical):
    model = model_of(family, tied, canonical)
    plain, own = Trainee(model, LossWeights()), PackAndModelTrainee(model, len(START))
    want, got = (one.losses(to_mlx_arrays(batch_of(one))) for one in (plain, own))
    assert float(got["count"]) == float(want["count"]) > 50
    np.testing.assert_allclose(float(got["nats"]), float(want["nats"]), rtol=1e-6)


@pytest.mark.parametrize(("family", "tied", "canonical"), CASES)
def test_the_loss_is_what_generation_gives_the_ids_with_the_saved_rows(family, tied, canonical):
    model = model_of(family, tied, canonical)
    trainee = with_random_rows(PackAndModelTrainee(model, len(START)))
    nats = float(trainee.losses(to_mlx_arrays(batch_of(trainee)))["nats"])
    rows = {name: np.array(value) for name, value in trainee.trained_pack_rows(START, TINY).items()}
    tuned = TunedRows(rows.get("input_rows", rows["output_rows"]), rows["output_rows"], model.fingerprint)
    start = Pack(START, rows=tuned)
    scored = score_rows(model, [Compressed(one.ids, np.ones(len(one.ids), np.int64), start) for one in samples_of()])
    np.testing.assert_allclose(nats, -sum(one.logprobs.sum() for one in scored), rtol=1e-5)


@pytest.mark.parametrize(("family", "tied", "canonical"), slow_but(CASES, ("gemma", True, False)))
def test_both_trainers_agree_over_twenty_steps(family, tied, canonical):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = tiny_config(family, "res_latent_attn", compression=SIZES, tie_encoders=tied, canonical=canonical)
    rates = {"learning_rate": 1e-2, "pack_learning_rate": 3e-2}
    # SGD, because Adam turns rounding errors of gradients near 0 into whole steps
    chosen = settings(iters=20, lora_rank=4, optimizer="sgd", pack_rows=True, **rates)
    first = random_model(config)
    steppers = []
    for make in (Stepper, choose_stepper("torch", config)):
        model = type(first)(first.args)
        model.load_weights(tree_flatten(first.parameters()))
        mx.random.seed(7)  # of the LoRA layers
        freeze_and_add_lora(model, chosen)
        trainee, optimizer = PackAndModelTrainee(model, len(START)), make_optimizer(chosen)
        optimizer.init(trainee.trainable_parameters())
        steppers.append(make(trainee, optimizer, chosen, mx.distributed.init()))
    for step in range(20):
        both = [one.step([batch_of(one.trainee, seed=step)], [False]) for one in steppers]
        assert both[1]["nats"] == pytest.approx(both[0]["nats"], rel=1e-4), step
    steppers[1].sync_to_trainee()
    ours, theirs = (one.trainee for one in steppers)
    for name in ("output_rows", "input_rows"):
        assert (name in ours) == (name in theirs)
        if name in ours:
            assert float(mx.abs(ours[name]).max()) > 1e-3
            np.testing.assert_allclose(np.array(theirs[name]), np.array(ours[name]), atol=2e-3)


def test_rows_have_the_learning_rate_that_is_given_for_them(tmp_path):
    write_data(tmp_path)
    moved = {}
    for rate in (1e-3, 1e-2):
        run = options(tmp_path / f"run-{rate}")
        train(run, settings(iters=1, learning_rate=1e-3, pack_rows=True, pack_learning_rate=rate), quiet=True)
        trained: Any = mx.load(str(list_checkpoints(run.out)[-1][1] / "trained.safetensors"))
        moved[rate] = float(mx.abs(trained["output_rows"]).max())
    assert moved[1e-2] == pytest.approx(10 * moved[1e-3], rel=1e-3)


def test_a_trained_model_begins_with_its_rows(tmp_path):
    write_data(tmp_path)
    run = options(tmp_path / "run")
    train(run, settings(iters=3, pack_rows=True), quiet=True)
    model, _ = load(run.out / "model")
    pack = load_pack(run.out / "model" / "pack.npz")
    assert pack.entries == START
    assert pack.rows is not None
    assert pack.rows.model == model.fingerprint
    encoded = [np.array(side) for side in model.encode_rows(*_padded())]
    moved = [np.abs(own - side).max() for own, side in zip((pack.rows.input, pack.rows.output), encoded, strict=True)]
    assert min(moved) > 1e-4


def _padded() -> tuple[Any, Any]:
    rows = np.full((len(START), PARAMS.merge_size), PARAMS.fill, np.uint32)
    for row, entry in zip(rows, START, strict=True):
        row[: len(entry)] = entry
    return rows, np.array([len(entry) for entry in START])


def test_an_adapters_rows_come_back_with_its_model(tmp_path):
    write_data(tmp_path)
    write_plain(tmp_path / "plain", hidden_size=32, intermediate_size=64)
    for name, save in (("whole", "model"), ("apart", "adapter")):
        train(options(tmp_path / name, save=save), settings(iters=3, pack_rows=True), quiet=True)
    whole = load_pack(tmp_path / "whole" / "model" / "pack.npz")
    assert whole.rows is not None
    for name, given in (("back", {}), ("small", {"quantize": True, "q_group_size": 32})):
        folder = convert(tmp_path / "apart" / "adapter", tmp_path / name, **given)
        model, _ = load(folder)
        back = load_pack(folder / "pack.npz")
        assert back.entries == whole.entries
        assert back.tokenizer == whole.tokenizer
        assert back.rows is not None
        assert back.rows.model == model.fingerprint
        np.testing.assert_array_equal(back.rows.input, whole.rows.input)
        np.testing.assert_array_equal(back.rows.output, whole.rows.output)


def test_rows_that_do_not_fit_the_adapter_are_refused_by_name(tmp_path):
    write_data(tmp_path)
    run = options(tmp_path / "run", save="adapter")
    train(run, settings(iters=1, pack_rows=True), quiet=True)
    file = run.out / "adapter" / IN_ADAPTER
    found: Any = mx.load(str(file))
    rows = {name: mx.array(np.array(value)) for name, value in found.items()}  # read before the file is replaced
    nan = mx.full(rows["output_rows"].shape, float("nan"))
    for wrong, said in (
        ({"output_rows": rows["output_rows"]}, "input_rows and output_rows"),
        ({**rows, "output_rows": rows["output_rows"][:-1]}, r"\[4, 16\]"),
        ({**rows, "more_rows": rows["output_rows"]}, "more_rows"),
        ({**rows, "output_rows": rows["output_rows"].astype(mx.int32)}, "int32"),
        ({**rows, "output_rows": nan}, "not finite"),
    ):
        mx.save_safetensors(str(file), wrong)
        with pytest.raises(ConversionError, match=said) as error:
            convert(run.out / "adapter", tmp_path / "back")
        assert IN_ADAPTER in str(error.value)
        assert not (tmp_path / "back").exists()


def test_rows_are_those_of_the_merged_model(tmp_path):
    write_data(tmp_path)
    run = options(tmp_path / "run", save="adapter")
    train(run, settings(iters=1, pack_rows=True), quiet=True)
    with pytest.raises(ConversionError, match="leave out --keep-adapter"):
        convert(run.out / "adapter", tmp_path / "back", keep_adapter=True)


def test_rows_of_an_earlier_training_are_not_lost_silently(tmp_path):
    write_data(tmp_path)
    first = options(tmp_path / "first")
    train(first, settings(iters=1, pack_rows=True), quiet=True)
    again = options(tmp_path / "again", model=str(first.out / "model"))
    with pytest.raises(TrainingError, match="has trained rows already"):
        train(again, settings(iters=1, pack_rows=True), quiet=True)
    assert not again.out.exists()


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    write_data(tmp_path)
    chosen = settings(iters=4, save_every=2, pack_rows=True, pack_learning_rate=2e-3)
    whole, cut = options(tmp_path / "whole"), options(tmp_path / "cut")
    train(whole, chosen, quiet=True)
    train(cut, chosen, quiet=True)
    for _, folder in list_checkpoints(cut.out)[1:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    (cut.out / "model").rename(tmp_path / "first")
    train(cut, chosen, quiet=True)
    assert losses(cut.out) == losses(whole.out)
    both: Any = [mx.load(str(list_checkpoints(run.out)[-1][1] / "trained.safetensors")) for run in (whole, cut)]
    assert all(mx.array_equal(both[0][name], both[1][name]).item() for name in both[0])


def test_rows_without_a_pack_and_losses_that_have_no_place_for_them_are_refused(tmp_path):
    write_shards(tmp_path / "data", CODEC)
    with pytest.raises(TrainingError, match="--pack"):
        train(options(tmp_path / "run"), settings(iters=1, pack_rows=True), quiet=True)
    with pytest.raises(TrainingError, match="leave out the other losses"):
        settings(pack_rows=True, token_type=0.1)
    with pytest.raises(TrainingError, match="pack_rows, which is off"):
        settings(pack_learning_rate=1e-3)


def test_a_plain_sample_among_others_changes_no_row_of_the_pack():
    trainee = with_random_rows(PackAndModelTrainee(model_of("llama", False, True), len(START)))
    plain = Sample(np.array(words(30, 7), np.uint32), np.ones(30, np.bool_), 30, 60, plain=True)

    def nats(samples: list[Any]) -> float:
        batch = trainee.prepare_batch(make_batch(samples, TINY, canonical=True))
        return float(trainee.losses(to_mlx_arrays(batch))["nats"].item())

    alone = nats([plain])
    assert nats([plain, *samples_of()]) == pytest.approx(alone + nats(samples_of()), rel=1e-5)
    assert nats([*samples_of(), plain]) == pytest.approx(alone + nats(samples_of()), rel=1e-5)
    none = Trainee(trainee.model, LossWeights())
    assert alone == pytest.approx(float(none.losses(to_mlx_arrays(make_batch([plain], TINY)))["nats"].item()), rel=1e-5)
