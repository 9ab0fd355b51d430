"""A run that begins with the trained weights of another one: a training in legs."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import cli
from mlx_zip.errors import TrainingError
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.run import train
from mlx_zip.training.settings import EncoderOptions
from support.crashing import crash_after
from support.slow_cases import slow_but
from support.tiny_training import losses, options, settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of 4 steps, next to its model and data."""
    leg = options(tmp_path_factory.mktemp("legs") / "first")
    train(leg, settings(iters=4), quiet=True)
    return leg.out.parent


@pytest.fixture
def first(trained, tmp_path):
    """A leg that may be deleted, in the test's folder, with its model and data."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return options(tmp_path / "first")


def test_a_second_leg_begins_with_the_weights_of_the_first_and_a_new_optimizer(first, tmp_path):
    second = options(tmp_path / "second", init_from=first.out)
    train(second, settings(iters=1, learning_rate=1e-9, min_learning_rate=0.0), quiet=True)
    before = mx.load(str(list_checkpoints(first.out)[-1][1] / "trained.safetensors"))
    after = mx.load(str(list_checkpoints(second.out)[-1][1] / "trained.safetensors"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(np.array(after[name]), np.array(value), atol=1e-7)
    begun = options(tmp_path / "begun")
    train(begun, settings(iters=1), quiet=True)
    assert losses(second.out)[0][1] != losses(begun.out)[0][1]


def test_a_leg_is_another_run_when_it_begins_with_other_weights(first, tmp_path):
    train(options(tmp_path / "second", init_from=first.out), settings(iters=1), quiet=True)
    with pytest.raises(TrainingError, match="holds another run"):
        train(options(tmp_path / "second"), settings(iters=1), quiet=True)


@pytest.mark.parametrize("engine", slow_but(["mlx", "torch"], "mlx"))
def test_a_leg_goes_on_from_its_own_checkpoint_not_from_the_leg_before(engine, first, tmp_path):
    if engine == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    whole = options(tmp_path / "whole", init_from=first.out, engine=engine)
    train(whole, settings(iters=4), quiet=True)
    cut = options(tmp_path / "cut", init_from=first.out, engine=engine)
    shutil.copytree(whole.out, cut.out)
    for _, folder in list_checkpoints(cut.out)[-1:]:
        (folder / "state.json").rename(folder / "gone")  # as after a crash that left step 2 only
        folder.rename(folder.with_name(".lost"))
    train(cut, settings(iters=4), quiet=True)
    assert losses(cut.out)[-2:] == losses(whole.out)[-2:]


@pytest.mark.slow
def test_a_leg_with_a_checkpoint_goes_on_without_the_leg_before(first, tmp_path, monkeypatch):
    whole, cut = (options(tmp_path / name, init_from=first.out) for name in ("whole", "cut"))
    train(whole, settings(iters=4), quiet=True)
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(RuntimeError, match="crashed"):
            train(cut, settings(iters=4), quiet=True)
    shutil.rmtree(first.out)
    train(cut, settings(iters=4), quiet=True)
    assert losses(cut.out) == losses(whole.out)
    with pytest.raises(TrainingError, match="holds another run"):
        train(options(tmp_path / "cut"), settings(iters=4), quiet=True)


def test_a_leg_without_a_checkpoint_still_needs_the_leg_before(first, tmp_path, monkeypatch):
    cut = options(tmp_path / "cut", init_from=first.out)
    with monkeypatch.context() as patch:
        crash_after(patch, 1)
        with pytest.raises(RuntimeError, match="crashed"):
            train(cut, settings(iters=4), quiet=True)
    assert not list_checkpoints(cut.out)
    shutil.rmtree(first.out)
    with pytest.raises(TrainingError, match="no checkpoint"):
        train(cut, settings(iters=4), quiet=True)


def test_a_run_without_a_checkpoint_or_of_other_weights_is_refused_and_nothing_is_written(first, tmp_path):
    with pytest.raises(TrainingError, match="no checkpoint"):
        train(options(tmp_path / "second", init_from=tmp_path / "nowhere"), settings(), quiet=True)
    with pytest.raises(TrainingError, match=r"trained other weights, for example model\."):
        train(options(tmp_path / "third", init_from=first.out), settings(lora_rank=3), quiet=True)
    narrow = EncoderOptions(kind="res_latent_attn", num_heads=2, size=8)
    with pytest.raises(TrainingError, match="trained other weights"):
        train(options(tmp_path / "fourth", init_from=first.out, encoder=narrow), settings(), quiet=True)
    assert not any((tmp_path / name / "checkpoints").exists() for name in ("second", "third", "fourth"))


def test_the_command_names_the_leg_before(first, tmp_path, capsys):
    words = (
        f"train --model {tmp_path / 'plain'} --data {tmp_path / 'data'} --out {tmp_path / 'second'} --iters 1".split()
    )
    words += ["--encoder", "transformer", "--encoder-layers", "1", "--encoder-heads", "2"]
    words += ["--encoder-intermediate-size", "16"]
    words += ["--lora-rank", "2", "--batch-size", "4", "--valid-share", "0", "--init-from", str(first.out)]
    assert cli.main(words) == 0
    words[words.index("--out") + 1] = str(tmp_path / "third")
    assert cli.main([*words[:-1], str(tmp_path / "nowhere")]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_encoders_learn_at_a_rate_of_their_own(tmp_path):
    still = options(tmp_path / "still")
    train(still, settings(iters=1, encoder_learning_rate=1e-12), quiet=True)
    moving = options(tmp_path / "moving")
    train(moving, settings(iters=1), quiet=True)
    mine, theirs = (mx.load(str(list_checkpoints(one.out)[-1][1] / "trained.safetensors")) for one in (still, moving))
    for name, value in theirs.items():
        same = np.allclose(np.array(mine[name]), np.array(value), atol=1e-6)
        assert same is ("encoder" not in name), name


def test_muon_has_no_rate_for_encoders():
    with pytest.raises(TrainingError, match="encoder_learning_rate"):
        settings(optimizer="muon", encoder_learning_rate=1e-4)
