"""Tuning a pack: only the rows are trained, by the loop that trains models."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import CodecParams, DataError, TrainingError
from mlx_zip.engine.mlx.scoring import score_rows
from mlx_zip.engine.scored import Compressed
from mlx_zip.packs.pack import Pack
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.pack_tuning import tune_pack
from mlx_zip.training.prepare.text_windows import CompressedTexts
from mlx_zip.training.run_folder import METRICS_FILE, read_metrics
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.objective import LossWeights, PackTrainee, Trainee
from mlx_zip.training.steps.stepper import to_mlx_arrays
from support.crashing import crash_after
from support.same_numbers import assert_same_losses, is_exact
from support.slow_cases import slow_but
from support.tiny import MERGE, PAD, VOCAB, tiny_model
from support.tiny_training import arrays_of, losses, make_sample, settings

WORDS = ((5, 6), (6, 7, 8), (9, 10), (11, 12, 13, 14), (7, 9))


CODEC = CodecParams(VOCAB, 24, MERGE, (0, 1, PAD), PAD, WORDS)


def sentence(length, seed):
    """Base ids of which many are words of the pack."""
    rng, ids = np.random.default_rng(seed), [1]
    while len(ids) < length:
        ids += WORDS[rng.integers(len(WORDS))] if rng.random() < 0.7 else [int(rng.integers(3, 20))]
    return ids[:length]


def texts(params=CODEC, samples=24, seed=0):
    return CompressedTexts(
        params, [make_sample(params, sentence(20 + i % 9, 1000 * seed + i)) for i in range(samples)], "texts"
    )


def model_of(family="llama", **changes):
    """A model whose codebook is CODEC's."""
    sizes = {"initial_vocab_size": VOCAB, "max_codebook_size": 24, "max_subtokens": MERGE, "disabled_ids": [0, 1, PAD]}
    return tiny_model(family, compression=sizes, **changes)


def rows_by_encoder(model):
    base_ids = np.array([[*run, *[PAD] * (MERGE - len(run))] for run in WORDS], np.uint32)
    return model.encode_rows(base_ids, np.array([len(run) for run in WORDS]))


def random_rows(model, seed=0):
    rng = np.random.default_rng(seed)
    output = mx.array(rng.normal(0, 0.3, (len(WORDS), 64)).astype(np.float32))
    return (output if model.sides_are_one else output[::-1], output)


def sums_of(trainee, data):
    canonical = trainee.model.config.canonical
    batch = trainee.prepare_batch(make_batch(data.samples, data.params, range(len(data)), canonical=canonical))
    return {name: float(value) for name, value in trainee.losses(to_mlx_arrays(batch)).items()}


# ---- what is minimised


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma", True)])
def test_with_the_encoders_rows_the_loss_is_that_of_training_the_model(family, tied):
    model, data = model_of(family, tie_encoders=tied), texts()
    got = sums_of(PackTrainee(model, *rows_by_encoder(model)), data)
    want = sums_of(Trainee(model, LossWeights()), data)
    assert got["count"] == want["count"] > 100
    np.testing.assert_allclose(got["nats"], want["nats"], rtol=1e-5)


@pytest.mark.parametrize("codebook_size", [24, len(WORDS)])
@pytest.mark.parametrize(("family", "tied", "canonical"), [("llama", False, False), ("gemma", True, True)])
def test_the_loss_is_what_generation_gives_the_ids_with_these_rows(family, tied, canonical, codebook_size):
    params = replace(CODEC, codebook_size=codebook_size)
    sizes = {
        "initial_vocab_size": VOCAB,
        "max_codebook_size": codebook_size,
        "max_subtokens": MERGE,
        "disabled_ids": [0, 1, PAD],
    }
    model = tiny_model(family, compression=sizes, tie_encoders=tied, canonical=canonical)
    rows, data = random_rows(model), texts(params, samples=6)
    got = sums_of(PackTrainee(model, *rows), data)
    output = np.array(rows[1])
    start = Pack(WORDS, rows=TunedRows(output if tied else np.array(rows[0]), output, model.fingerprint))
    spans = [np.ones(len(sample.ids), np.int64) for sample in data.samples]
    scored = score_rows(model, [Compressed(s.ids, n, start) for s, n in zip(data.samples, spans, strict=True)])
    np.testing.assert_allclose(got["nats"], -sum(one.logprobs.sum() for one in scored), rtol=1e-5)


def test_gradients_are_of_the_rows_alone_and_right():
    model, data = model_of(), texts(samples=4)
    trainee = PackTrainee(model, *random_rows(model))
    assert set(dict(trainee.trainable_parameters())) >= {"input_rows", "output_rows"}
    assert not trainee.trainable_parameters()["model"].get("layers")
    batch = to_mlx_arrays(trainee.prepare_batch(make_batch(data.samples, data.params, range(4))))

    def nats(name, rows):
        setattr(trainee, name, rows)
        return trainee.losses(batch)["nats"]

    for name in ("input_rows", "output_rows"):
        rows = getattr(trainee, name)
        slope = mx.grad(lambda rows, name=name: nats(name, rows))(rows)
        way = slope / mx.linalg.norm(slope)
        ahead, behind = (float(nats(name, rows + step * way)) for step in (2e-3, -2e-3))
        np.testing.assert_allclose((ahead - behind) / 4e-3, float((slope * way).sum()), rtol=2e-2)
        setattr(trainee, name, rows)


# ---- tuning


def run_tuning(run, model=None, pack=None, **changes):
    model = model_of() if model is None else model
    options = settings(**{"optimizer": "adam", "iters": 12, "val_batches": 0, "steps_per_eval": 100, **changes})
    return tune_pack(pack or Pack(WORDS), model, texts(), texts(samples=8, seed=1), options, run, quiet=True)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """(the folder of a finished run of two steps, what came of it)"""
    run = tmp_path_factory.mktemp("tuned") / "run"
    return run, run_tuning(run, iters=2)


@pytest.fixture
def finished(two_steps, tmp_path):
    """The same with a folder that a test may change."""
    return Path(shutil.copytree(two_steps[0], tmp_path / "run")), two_steps[1]


@pytest.mark.slow
def test_rows_become_better_and_the_model_stays(tmp_path):
    model = model_of()
    before = arrays_of(model)
    found = run_tuning(tmp_path / "run", model, iters=40)
    assert found.after < found.before - 0.05
    assert all(np.array_equal(before[name], value) for name, value in arrays_of(model).items())
    assert found.rows.model == model_of().fingerprint
    lines = losses(tmp_path / "run")
    assert lines[-1][1] < lines[0][1]


@pytest.mark.slow
def test_a_tuning_goes_on_as_if_it_had_never_stopped_and_depends_on_its_seed_alone(tmp_path, monkeypatch):
    whole = run_tuning(tmp_path / "whole")
    with monkeypatch.context() as patched:
        crash_after(patched, 7)
        with pytest.raises(RuntimeError, match="crashed"):
            run_tuning(tmp_path / "cut")
    resumed = run_tuning(tmp_path / "cut")
    if is_exact():
        assert resumed.rows.fingerprint == whole.rows.fingerprint
    assert_same_losses([resumed.before, resumed.after], [whole.before, whole.after])
    assert_same_losses(losses(tmp_path / "cut"), losses(tmp_path / "whole"))
    assert run_tuning(tmp_path / "whole").rows.fingerprint == whole.rows.fingerprint  # it was finished
    assert run_tuning(tmp_path / "other", seed=1).rows.fingerprint != whole.rows.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("log", ["lost", "damaged"])
def test_a_resumed_tuning_without_its_log_still_tells_what_was_before_its_first_step(log, tmp_path, monkeypatch):
    whole = run_tuning(tmp_path / "whole")
    with monkeypatch.context() as patched:
        crash_after(patched, 7)
        with pytest.raises(RuntimeError, match="crashed"):
            run_tuning(tmp_path / "cut")
    assert list_checkpoints(tmp_path / "cut")
    if log == "lost":
        (tmp_path / "cut" / METRICS_FILE).unlink()
    else:
        (tmp_path / "cut" / METRICS_FILE).write_text('{"step": 0, "val_bits_per_byte": ')
    resumed = run_tuning(tmp_path / "cut")
    assert (resumed.before, resumed.rows.fingerprint) == (whole.before, whole.rows.fingerprint)
    assert read_metrics(tmp_path / "cut")[0] == read_metrics(tmp_path / "whole")[0]


def test_windows_longer_than_the_models_context_are_refused(tmp_path):
    model = model_of()
    model.args.config["max_position_embeddings"] = 24
    with pytest.raises(TrainingError, match=r"windows of 28 base ids .* 24 positions"):
        run_tuning(tmp_path / "run", model)
    assert not (tmp_path / "run").exists()


def test_anothers_run_is_refused(finished):
    for other in (
        {"model": tiny_model(seed=1)},
        {"pack": Pack(WORDS, "ab" * 32)},
        {"learning_rate": 1e-3},
    ):
        with pytest.raises(TrainingError, match="holds another run"):
            run_tuning(finished[0], **{"iters": 2, **other})


@pytest.mark.slow
def test_tuning_a_tuned_pack_goes_on_from_its_rows(tmp_path):
    first = run_tuning(tmp_path / "a", iters=20)
    again = run_tuning(tmp_path / "b", pack=Pack(WORDS, rows=first.rows), iters=1)
    assert again.before == pytest.approx(first.after, abs=1e-6)
    of_another = replace(first.rows, model="of another")
    anew = run_tuning(tmp_path / "c", pack=Pack(WORDS, rows=of_another), iters=1)
    assert anew.before == first.before


@pytest.mark.parametrize("log", slow_but([None, "", '{"step": 0, "val_bits_per_byte": "x"}'], ""))
def test_what_the_rows_were_worth_before_is_right_also_where_the_log_is_lost(finished, log):
    run, first = finished
    path = run / "metrics.jsonl"
    path.unlink() if log is None else path.write_text(log)
    again = run_tuning(run, iters=2)
    assert again.before == pytest.approx(first.before, abs=1e-9)
    assert (again.after, again.rows.fingerprint) == (first.after, first.rows.fingerprint)


@pytest.mark.parametrize(("name", "error"), [("train.json", TrainingError), ("metrics.jsonl", DataError)])
def test_a_pipe_in_a_runs_folder_is_an_error_and_not_waited_for(finished, name, error):
    run, _ = finished
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(error, match=name):
        run_tuning(run, iters=2)


def test_a_batch_that_cannot_be_filled_is_told_before_there_is_a_run(tmp_path):
    with pytest.raises(TrainingError, match="24 usable samples do not fill a batch of 25"):
        run_tuning(tmp_path / "run", batch_size=25)
    assert not (tmp_path / "run").exists()
