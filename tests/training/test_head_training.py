"""`train --draft-head`: the loss is the distance to what the frozen model says, and only the head is trained."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip import load
from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.engine.sampling.canonical import exclude_ids
from mlx_zip.engine.sampling.exclusions import CanonicalIds
from mlx_zip.errors import ModelError, TrainingError
from mlx_zip.models.draft_head import DraftHead, HeadedModel, load_draft_head, make_head_proposer, save_draft_head
from mlx_zip.models.model_folder import DRAFT_HEAD
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.packs.pack import Pack
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.training.head_training import HeadTrainee
from mlx_zip.training.run import train
from mlx_zip.training.run_folder import read_metrics
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.stepper import to_mlx_arrays
from support.generating import plain_model
from support.slow_cases import slow_but
from support.tiny import base_ids, tiny_config
from support.tiny_training import PLAIN, arrays_of, losses, make_sample, options, random_model, settings, write_shards

START = ((5, 6), (6, 7, 8), (9, 9))
DEPTH = 3


def by_hand(model: Any, head: DraftHead, sample: Any, params: Any) -> tuple[float, float]:
    """(nats, accepted) of one sample: the model reads it id by id, and the head guesses after each id."""
    headed, cache = HeadedModel(model), make_prompt_cache(model)
    vocab, state = params.vocab_size, find_zip_state(cache)
    rows = np.array(headed.matrix.weight)[:vocab]
    if state is not None:
        whole = Codebook(params)
        whole.push(sample.ids[:-1])
        pack = model.row_source.pack
        tuned = np.zeros((0, headed.width)) if pack is None else pack.rows.output
        written = np.array(model.encode_rows(*whole.padded_entries(0, len(whole)))[1])
        rows = np.concatenate([rows, tuned, written[len(tuned) :]])
    canonical = None if state is None else CanonicalIds(state.books[0])
    states, taught, ends = [], [], []
    for one in sample.ids[:-1].tolist():
        logits, h = headed.read(mx.array([[one]]), cache)
        logits, excluded = logits[:, -1], canonical.excluded() if canonical and model.config.canonical else []
        logits = exclude_ids(logits, [excluded])
        states.append(h[0, -1])
        taught.append(np.array(mx.softmax(logits[0].astype(mx.float32)))[: len(rows)])
        ends.append(vocab + (0 if state is None else len(state.books[0])))
    nats = accepted = 0.0
    for t, state_t in enumerate(states):
        guess, right = state_t, True
        for depth in range(1, min(DEPTH, len(states) - 1 - t) + 1):
            guess = head(guess, mx.array(rows[sample.ids[t + depth]].astype(np.float32)))
            logits = (rows @ np.array(guess))[: ends[t + depth]].astype(np.float64)
            share, weight = taught[t + depth][: len(logits)], float(sample.mask[t + depth + 1])
            nats += weight * (np.logaddexp.reduce(logits) - float(share @ logits)) / DEPTH
            right = right and weight > 0 and logits.argmax() == share.argmax()
            accepted += right
    return nats, accepted


def agree(trainee: HeadTrainee, samples: Any, params: Any, **options: Any) -> float:
    """Compares the losses of a batch with those of each sample by hand; returns how many guesses are accepted."""
    found = trainee.eval().losses(to_mlx_arrays(trainee.prepare_batch(make_batch(samples, params, **options))))
    want = [by_hand(trainee.model, trainee.draft_head, sample, params) for sample in samples]
    assert float(found["nats"]) == pytest.approx(sum(nats for nats, _ in want), rel=1e-4)
    assert float(found["accepted"]) == sum(accepted for _, accepted in want)
    assert float(found["count"]) == sum(sample.mask[2:].sum() for sample in samples)
    return float(found["accepted"])


CASES = [
    ("llama", "compressed", True, True),
    ("qwen3", "base_token_end", False, False),
    ("llama", "base_token_end", True, False),
    ("phi3", "compressed", False, True),
]


@pytest.mark.parametrize(("family", "mode", "canonical", "pack"), slow_but(CASES, *CASES[:2]))
def test_the_loss_is_the_cross_entropy_with_what_the_model_says(family, mode, canonical, pack):
    config = tiny_config(family, position_mode=mode, canonical=canonical)
    model = random_model(config).eval()
    params = model.config.codec_params
    tuned = None
    if pack:
        params = replace(params, start=START)
        rng = np.random.default_rng(3)
        rows = [rng.normal(0, 0.3, (len(START), config["hidden_size"])).astype(np.float32) for _ in range(2)]
        tuned = Pack(START, rows=TunedRows(*rows, model.fingerprint))
        model.use_pack(tuned)
    samples = [make_sample(params, base_ids(length, seed=length), masked=[2, 5]) for length in (26, 9)]
    options = {"canonical": canonical, "base_positions": mode == "base_token_end"}
    agree(HeadTrainee(model, 48, DEPTH, tuned), samples, params, **options)


def test_entries_of_a_pack_without_tuned_rows_have_the_encoders_rows():
    model = random_model(tiny_config("llama")).eval()
    params = replace(model.config.codec_params, start=START)
    samples = [make_sample(params, base_ids(length, seed=length), masked=[2, 5]) for length in (26, 9)]
    arrays = make_batch(samples, params)
    mx.random.seed(1)
    without = HeadTrainee(model, 48).eval()
    mx.random.seed(1)
    untuned = HeadTrainee(model, 48, pack=Pack(START)).eval()
    found = [float(one.losses(to_mlx_arrays(one.prepare_batch(arrays)))["nats"]) for one in (without, untuned)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_plain_models_head_learns_to_propose_what_the_model_would_say():
    model, params = plain_model(), CodecParams(40, 0, 1, (), 2)
    samples = [make_sample(params, base_ids(length, seed=length), masked=[3]) for length in (9, 24)]
    trainee, optimizer = HeadTrainee(model, 48, DEPTH), optim.Adam(1e-2)
    before, arrays = agree(trainee, samples, params), to_mlx_arrays(make_batch(samples, params))
    gradients = nn.value_and_grad(trainee, lambda: trainee.train().losses(arrays)["nats"])
    for _ in range(20):
        optimizer.update(trainee, gradients()[1])
        mx.eval(trainee.parameters(), optimizer.state)
    assert agree(trainee, samples, params) > before + 5


def trained(tmp_path, name="run", **changes):
    out = tmp_path / name
    chosen = settings(draft_head=True, head_size=24, **changes)
    return out, train(options(out, data=[tmp_path / "plain-data"]), chosen, quiet=True)


@pytest.fixture
def plain_data(tmp_path):
    return write_shards(tmp_path / "plain-data", PLAIN)


def test_only_the_head_is_trained_and_saved_into_the_models_folder(tmp_path, plain_data):
    options(tmp_path / "x")  # makes the model
    before = (tmp_path / "plain/model.safetensors").read_bytes()
    out, outcome = trained(tmp_path, iters=12)
    assert outcome.progress.step == 12
    assert (tmp_path / "plain/model.safetensors").read_bytes() == before
    first, last = losses(out)[0][1], losses(out)[-1][1]
    assert last < first
    assert (tmp_path / "plain" / DRAFT_HEAD).read_bytes() == (out / DRAFT_HEAD).read_bytes()
    assert not (out / "model").exists()
    model, _ = load(tmp_path / "plain")
    assert not any("draft" in name for name, _ in tree_flatten(model.parameters()))
    assert model.draft_head.head_for(HeadedModel(model)).up.weight.shape == (24, 16)


def test_held_out_samples_say_how_many_ids_are_accepted(tmp_path, plain_data):
    out = tmp_path / "run"
    chosen = settings(draft_head=True, iters=2, steps_per_eval=1)
    train(options(out, data=[plain_data], valid=[plain_data]), chosen, quiet=True)
    found = [line for line in read_metrics(out) if "val_loss" in line]
    assert [set(line) - {"step"} for line in found] == [{"val_loss", "val_accepted_ids"}] * 2
    assert all(0 <= line["val_accepted_ids"] <= 3 for line in found)
    assert not any("bits_per_byte" in name for line in read_metrics(out) for name in line)


def test_a_run_that_was_continued_trains_the_same_head(tmp_path, plain_data):
    whole, _ = trained(tmp_path, "whole", iters=6)
    part = tmp_path / "part"
    chosen = settings(draft_head=True, head_size=24, iters=6)
    source = options(part, data=[plain_data])
    from mlx_zip.training import trainer

    real = trainer.Trainer.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "step", lambda self, stop: real(self, self.progress.step >= 2))
        assert train(source, chosen, quiet=True).progress.step == 3
    train(source, chosen, quiet=True)
    heads = [arrays_of(load_draft_head(out / DRAFT_HEAD, 16, PLAIN.vocab_size)) for out in (whole, part)]
    assert heads[0].keys() == heads[1].keys()
    assert all(np.array_equal(heads[0][name], heads[1][name]) for name in heads[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"save": "adapter"}, "--save adapter"),
        ({"engine": "torch"}, "--engine torch"),
        ({"canonical": True}, "--canonical"),
    ],
)
def test_options_that_make_no_sense_for_a_head_are_refused(changes, said, tmp_path, plain_data):
    with pytest.raises(TrainingError, match=said):
        train(options(tmp_path / "run", data=[plain_data], **changes), settings(draft_head=True), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes", [{"fine_tune_type": "full"}, {"availability": "legacy"}])
def test_settings_that_a_head_would_ignore_are_refused(changes, tmp_path, plain_data):
    with pytest.raises(TrainingError, match="--draft-head goes without"):
        train(options(tmp_path / "run", data=[plain_data]), settings(draft_head=True, **changes), quiet=True)


def test_a_damaged_head_stops_drafts_and_not_the_model(tmp_path, plain_data):
    trained(tmp_path, iters=1)
    (tmp_path / "plain" / DRAFT_HEAD).write_bytes(b"nonsense")
    model, _ = load(tmp_path / "plain")
    with pytest.raises(ModelError, match="cannot be read"):
        make_head_proposer(model)


def test_data_with_a_codebook_are_refused_for_a_plain_model(tmp_path):
    with pytest.raises(TrainingError, match="prepared with a codebook"):
        train(options(tmp_path / "run"), settings(draft_head=True), quiet=True)


def test_settings_that_contradict_each_other_are_refused():
    for wrong in ({"draft_head": True, "pack_rows": True}, {"head_size": 8}, {"draft_head": True, "token_type": 0.1}):
        with pytest.raises(TrainingError):
            settings(**wrong)


@pytest.mark.parametrize(("width", "vocab"), [(32, PLAIN.vocab_size), (16, 7)])
def test_a_head_of_another_width_or_vocabulary_is_refused_in_one_line(width, vocab, tmp_path, plain_data):
    trained(tmp_path, iters=1)
    with pytest.raises(ModelError, match="is the head of a model of width 16") as caught:
        load_draft_head(tmp_path / "plain" / DRAFT_HEAD, width, vocab)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_head_is_refused(tmp_path):
    path = tmp_path / DRAFT_HEAD
    mx.save_safetensors(str(path), {"down.weight": mx.zeros((16, 8))})
    with pytest.raises(ModelError, match="no draft head"):
        load_draft_head(path, 16, 40)
    path.write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot be read"):
        load_draft_head(path, 16, 40)


@pytest.mark.parametrize(
    "changes",
    [
        {"down.weight": mx.array(1.0)},
        {"down.weight": mx.zeros((16, 0)), "up.weight": mx.zeros((0, 16))},
        {"down.weight": mx.zeros((16, 32), mx.complex64)},
        {"down.weight": mx.zeros((16, 32), mx.int8)},
        {"more": mx.zeros(3)},
    ],
)
def test_a_head_of_odd_tensors_is_refused_in_one_line(tmp_path, changes):
    path, head = tmp_path / DRAFT_HEAD, DraftHead(16, 32)
    save_draft_head(path, head, 40)
    weights, about = mx.load(str(path), return_metadata=True)
    mx.save_safetensors(str(path), weights | changes, about)
    with pytest.raises(ModelError) as caught:
        load_draft_head(path, 16, 40)
    assert "\n" not in str(caught.value)
