"""What a run says, what it keeps for validation, and how a finished one is made longer."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import load
from mlx_zip.cli import main
from mlx_zip.errors import TrainingError
from mlx_zip.progress import ProgressBar
from mlx_zip.training.checkpoints import Progress, list_checkpoints
from mlx_zip.training.run import train
from mlx_zip.training.run_data import JoinedFolders, count_held_out, split_held_out
from mlx_zip.training.run_folder import read_metrics
from mlx_zip.training.run_summary import training_hint_lines
from mlx_zip.training.trainer import expand_sample
from support.crashing import crash_after
from support.same_numbers import assert_same_losses
from support.tiny_training import PLAIN, losses, options, settings, write_shards

TINY = ["--encoder", "transformer", "--encoder-layers", "1", "--encoder-heads", "2", "--lora-rank", "2"]


def run_said(capsys: pytest.CaptureFixture[str], made: Any, *more: object) -> list[str]:
    """The lines that the command says on standard error; it must succeed."""
    flags = ["--model", made.model, "--data", *made.data, "--out", made.out, "--batch-size", 4, *TINY, *more]
    assert main(["train", *map(str, flags)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{made.out / 'model'}\n"
    return captured.err.splitlines()


def test_a_run_says_what_it_trains_how_far_it_is_and_what_came_of_it(tmp_path, capsys):
    lines = run_said(capsys, options(tmp_path / "run"), "--iters", 4, "--steps-per-report", 2)
    assert lines[0].startswith(f"training {tmp_path / 'plain'} (lora): ")
    assert lines[0].endswith(f" parameters; device: {mx.default_device().type.name}")
    assert lines[1].startswith("data: 20 samples, ")
    assert "; held out: 4 samples, " in lines[1]
    assert [line.partition(":")[0] for line in lines[2:5]] == ["step 2 of 4", "step 4 of 4", "step 4"]
    for part in ("loss ", " bits per byte, ", " base tokens/s, ", " left"):
        assert part in lines[2]
    assert lines[4].startswith("step 4: validation ")
    assert lines[5].startswith("4 steps in 0:0")
    assert "held-out text: " in lines[6]
    assert "before training, without hypertokens: " in lines[6]
    assert "base tokens of that text on average" in lines[7]
    assert lines[8].startswith("warning: training on one kind of text moves this gap too")
    assert "a base trained alike" in lines[8]
    assert "better" not in lines[6]
    assert lines[-2:] == [
        f"next: mlx_zip generate --model {tmp_path / 'run' / 'model'} --prompt TEXT",
        f"      mlx_zip evaluate --model {tmp_path / 'plain'} --model {tmp_path / 'run' / 'model'} --data FILE",
    ]


def test_a_validation_and_the_measuring_of_the_base_say_how_far_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlx_zip.progress.INTERVAL_S", 0.0)
    monkeypatch.setattr("mlx_zip.training.trainer.ProgressBar", partial(ProgressBar, interval_s=0.0))
    lines = run_said(capsys, options(tmp_path / "run"), "--iters", 1, "--batch-size", 2, "--val-batches", 0)
    assert any(re.match(r"Measuring the base: 1 of 2 batches, ", line) for line in lines), lines
    assert any(re.match(r"Validating: 1 of 2 batches, ", line) for line in lines), lines


@pytest.mark.slow
def test_a_run_that_goes_on_says_from_where(tmp_path, capsys, monkeypatch):
    made = options(tmp_path / "run", valid_share=None)
    changes = ["--iters", 6, "--save-every", 2]
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(RuntimeError, match="crashed"):
            run_said(capsys, made, *changes, "--steps-per-report", 1)
    capsys.readouterr()
    assert "resuming at step 2 of 6" in run_said(capsys, made, *changes)


def test_the_held_out_samples_are_not_trained_on_and_a_batch_is_always_left(tmp_path):
    data = JoinedFolders([write_shards(tmp_path / "data", samples=40)])
    count = count_held_out(data, 0.02, 4)
    train_on, valid = split_held_out(data, count, 0)
    assert count == 4
    assert valid is not None
    assert (np.flatnonzero(valid.lengths).size, np.flatnonzero(train_on.lengths).size) == (4, 36)
    assert not (train_on.lengths.astype(bool) & valid.lengths.astype(bool)).any()
    assert count_held_out(data, 0.02, 38) == 2
    assert count_held_out(data, 0.02, 40) == 0
    assert count_held_out(data, 0.5, 4) == 8
    assert count_held_out(data, 0.0, 4) == 0


def test_a_run_from_before_there_was_a_held_out_part_goes_on_without_one(tmp_path):
    train(options(tmp_path / "run"), settings(iters=2), quiet=True)
    assert "valid_share" not in json.loads((tmp_path / "run" / "train.json").read_text())
    train(options(tmp_path / "run", valid_share=None), settings(iters=2), quiet=True)
    with pytest.raises(TrainingError, match=r"--valid-share 0\.1: the run .* began with 0\.0"):
        train(options(tmp_path / "run", valid_share=0.1), settings(iters=2), quiet=True)


def test_prepared_validation_data_take_the_place_of_a_held_out_part(tmp_path):
    valid = write_shards(tmp_path / "valid", seed=3)
    train(options(tmp_path / "run", valid_share=None, valid=[valid]), settings(iters=2), quiet=True)
    assert "valid_share" not in json.loads((tmp_path / "run" / "train.json").read_text())
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "val_loss" in line] == [2]


@pytest.mark.parametrize("codec", [None, PLAIN], ids=["hypertokens", "none"])
def test_the_base_is_measured_as_a_model_that_reads_base_ids_alone(codec, tmp_path):
    if codec is not None:
        write_shards(tmp_path / "data", codec)
    made = options(
        tmp_path / "run",
        valid=[
            write_shards(
                tmp_path / "valid",
                codec or JoinedFolders([options(tmp_path / "run").data[0]]).params,
                seed=3,
                samples=5,
            )
        ],
    )
    train(made, settings(iters=1, val_batches=0), quiet=True)
    found = next(line["base_bits_per_byte"] for line in read_metrics(made.out) if "base_bits_per_byte" in line)
    model, valid = load(tmp_path / "plain")[0], JoinedFolders(made.valid)
    nats = n_bytes = 0.0
    for i in range(len(valid)):
        sample = expand_sample(valid[i], valid.params)
        assert sample.base_ids == len(sample.ids)
        logits = model(mx.array(sample.ids[None].astype(np.int32)))[0].astype(mx.float32)
        logs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        cost = -logs[np.arange(len(sample.ids) - 1), sample.ids[1:]]
        nats, n_bytes = nats + cost[sample.mask[1:]].sum(), n_bytes + sample.n_bytes
    assert found == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-4)


@pytest.mark.slow
def test_a_finished_run_goes_on_when_iters_are_raised_and_only_then(tmp_path, monkeypatch):
    made = options(tmp_path / "run")
    train(made, settings(iters=4), quiet=True)
    first = losses(made.out)
    with pytest.raises(TrainingError, match=r"iters 4; .*choose another --out"):
        train(made, settings(iters=3), quiet=True)
    with monkeypatch.context() as patch:
        crash_after(patch, 7)
        with pytest.raises(RuntimeError, match="crashed"):
            train(made, settings(iters=8), quiet=True)
    with pytest.raises(TrainingError, match="raised when the run's 8 steps are done"):
        train(made, settings(iters=9), quiet=True)
    assert train(made, settings(iters=8), quiet=True).progress.step == 8
    assert losses(made.out)[:4] == first
    assert [step for step, _, _ in losses(made.out)] == list(range(1, 9))
    assert list_checkpoints(made.out)[-1][0] == 8
    whole = options(tmp_path / "whole")
    train(whole, settings(iters=4), quiet=True)
    train(whole, settings(iters=8), quiet=True)
    assert_same_losses(losses(whole.out), losses(made.out))  # resuming is exact in the added steps too


def test_hints_are_given_where_the_figures_ask_for_them():
    long = Progress(step=100, seen_base_ids=10_000_000)
    assert training_hint_lines([1.0, 0.999], 2.0, long, True) == []
    assert "still falls: the same command with --iters 200" in training_hint_lines([1.0, 0.9], 2.0, long, True)[0]
    assert "more data would help" in training_hint_lines([0.9, 1.0], 9.0, long, True)[0]
    assert "only 40% of the data" in training_hint_lines([], 0.4, long, False)[0]
    assert "trial run" in training_hint_lines([], 1.0, Progress(step=1, seen_base_ids=5), True)[0]
