"""`mlx_zip train`: flags, the YAML file, what it prints, and settings that cannot be."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_zip import load
from mlx_zip.cli import command_parser, main
from mlx_zip.cli.training import ENCODER_FLAGS
from mlx_zip.codec import CodecParams
from mlx_zip.errors import TrainingError
from mlx_zip.training import trainer
from mlx_zip.training.prepare.shards import PreparedShards
from mlx_zip.training.run import train
from mlx_zip.training.run_data import JoinedFolders
from mlx_zip.training.run_folder import MetricsLog, plot_training_curves, read_metrics
from mlx_zip.training.settings import OPTIMIZERS, SAVES, EncoderOptions, TrainSettings, setting_help_text
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import last_learning_rate, make_optimizer, to_mlx_arrays
from support.tiny_training import options, settings, write_shards

TINY = ["--encoder", "transformer", "--encoder-layers", "1", "--encoder-heads", "2", "--lora-rank", "2"]


def flags(out: Path, *more: str) -> list[str]:
    made = options(out)
    places = ["--model", str(made.model), "--data", *map(str, made.data), "--out", str(out)]
    return ["train", *places, "--iters", "3", "--batch-size", "4", *TINY, *more]


def test_every_setting_is_a_flag_with_its_choices_its_help_and_its_default():
    actions = {action.dest: action for action in command_parser("train", "train")._actions}
    named = {one.name: one for one in fields(TrainSettings)}
    named |= {ENCODER_FLAGS[one.name]: one for one in fields(EncoderOptions)}
    for name, one in named.items():
        assert actions[name].option_strings[0] == f"--{name.replace('_', '-')}"
        assert actions[name].choices == one.metadata["choices"]
        assert actions[name].help == setting_help_text(one)
        assert "(default: " in setting_help_text(one)
        assert actions[name].default is None, "a flag that is not given leaves the YAML file's value"


def test_the_settings_are_read_without_mlx():
    program = "import sys, mlx_zip.cli.training; sys.exit('mlx.core' in sys.modules or 'mlx_lm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_run_prints_the_folder_it_leaves_and_nothing_else(tmp_path, capsys):
    assert main(flags(tmp_path / "run", "--iters", "1")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'model'}\n"
    assert main(flags(tmp_path / "other", "--save", "adapter", "--iters", "1")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'other' / 'adapter'}\n"
    assert set(SAVES) == {"model", "adapter"}


def test_a_yaml_file_sets_what_the_flags_do_not(tmp_path, monkeypatch):
    seen: dict[str, Any] = {}

    def look(made: Any, chosen: TrainSettings) -> Any:
        seen["options"], seen["settings"] = made, chosen
        return trainer.Outcome(trainer.Progress())

    monkeypatch.setattr("mlx_zip.training.run.train", look)
    (tmp_path / "c.yaml").write_text(
        "model: m\ndata: [a, b]\nout: o\nlearning_rate: 3e-4\niters: 7\nbatch_size: 2\ngrad_checkpoint: true\n"
        "encoder_layers: 3\nsave: adapter\n"
    )
    assert main(["train", "--config", str(tmp_path / "c.yaml"), "--batch-size", "5"]) == 0
    found = seen["settings"]
    assert (found.learning_rate, found.iters, found.batch_size, found.grad_checkpoint) == (3e-4, 7, 5, True)
    assert seen["options"].data == [Path("a"), Path("b")]
    assert (seen["options"].save, seen["options"].encoder) == ("adapter", EncoderOptions(num_hidden_layers=3))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("surprise: 1", "unknown surprise"),
        ("learning_rate: fast", "learning_rate must be a number"),
        ("iters: 2.5", "iters must be a whole number"),
        ("grad_checkpoint: 'yes'", "grad_checkpoint must be true or false"),
        ("save_dtype: int8", "save_dtype 'int8' is not one of"),
        ("- 1", "holds no settings"),
        ("a: [", "c.yaml cannot be read: line 1: expected the node content"),
        ("iters: 5\niters: 6", "c.yaml cannot be read: line 2: iters is given twice"),
        ("lora_parameters: {rank: 4, rank: 8}", "c.yaml cannot be read: line 1: rank is given twice"),
        ("{[a]: 5}", "c.yaml cannot be read: line 1: found unhashable key"),
        ('out: "a\\0b"', "out must not hold a null character"),
        ('data: ["a\\0b"]', "data must not hold a null character"),
    ],
)
def test_a_yaml_file_that_cannot_be_is_one_line(text, match, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(text)
    assert main(["train", "-c", str(tmp_path / "c.yaml"), "--model", "m", "--data", "d", "--out", "o"]) == 2
    told = capsys.readouterr().err
    assert match in told
    assert told.count("\n") == 1


def test_a_yes_or_no_of_the_encoder_in_a_yaml_file_is_not_guessed(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("tie_encoders: 'no'")
    assert main(flags(tmp_path / "run", "-c", str(tmp_path / "c.yaml"))) == 2
    assert "tie_encoders must be true or false, got 'no'" in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path, capsys):
    for argv, match in (
        (["train", "--model", "m", "--out", "o"], "--data is missing"),
        (["train", "--model", "m", "--data", str(write_shards(tmp_path / "data"))], "--out is missing"),
        (["train", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "o")], "--from-scratch"),
        (
            ["train", "--model", "m", "--data", str(tmp_path / "none"), "--out", "o"],
            "no such file or folder; --data names",
        ),
    ):
        assert main(argv) == 2
        assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"iters": 0},
        {"batch_size": 0},
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"lora_layers": 0},
        {"lora_layers": -2},
        {"lora_dropout": 1.0},
        {"seed": -1},
        {"warmup": 6},
        {"optimizer": "magic"},
        {"iters": True},
        {"learning_rate": "1e-3"},
        {"steps_per_eval": 0},
        {"val_batches": -1},
        {"grad_checkpoint": True, "lora_dropout": 0.1},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused_by_name(changes):
    with pytest.raises(TrainingError, match=next(iter(changes))):
        settings(**changes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_rate_rises_falls_and_ends_where_asked_for_every_optimizer(optimizer):
    chosen = settings(iters=60, warmup=5, learning_rate=0.1, min_learning_rate=0.01, optimizer=optimizer)
    model = nn.Linear(3, 4)
    made = make_optimizer(chosen)
    rates, moves = [], []
    for _ in range(60):
        before = model.bias
        made.update(model, {"weight": mx.ones((4, 3)), "bias": mx.ones(4)})
        rates.append(last_learning_rate(made))
        moves.append(float(mx.abs(model.bias - before).max().item()))
    assert rates[0] == 0
    assert rates[5] == pytest.approx(0.1)
    assert (np.diff(rates[:6]) > 0).all()
    assert (np.diff(rates[7:]) < 0).all()
    assert rates[-1] == pytest.approx(0.01, rel=0.05)
    assert moves[0] == 0
    assert moves[5] == pytest.approx(0.1, rel=0.2)  # the rate is what a step of size 1 moves


def test_metrics_tell_rates_totals_and_losses_in_nats_and_bits(tmp_path):
    run = options(tmp_path / "run", valid=[write_shards(tmp_path / "valid", seed=3)])
    train(run, settings(iters=4, steps_per_eval=2, reconstruction=0.1, token_type=0.1), quiet=True)
    lines = read_metrics(run.out)
    told = [line for line in lines if "loss" in line]
    assert [line["step"] for line in told] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "val_loss" in line] == [2, 4]
    for name in ("ids_per_s", "base_ids_per_s", "bytes_per_s", "reconstruction", "token_type", "learning_rate"):
        assert all(line[name] > 0 for line in told), name
    data = JoinedFolders([tmp_path / "data"])
    epoch = [data[i] for batch in trainer.order_batches(data.lengths, 4, 0, 0)[:4] for i in batch.tolist()]
    assert told[-1]["seen_samples"] == len(epoch) == 16
    assert told[-1]["seen_ids"] == sum(len(sample.ids) - 1 for sample in epoch)
    assert told[-1]["seen_bytes"] == sum(sample.n_bytes for sample in epoch)


def test_validation_is_the_mean_over_all_its_samples_without_dropout(tmp_path):
    run = options(tmp_path / "run", valid=[write_shards(tmp_path / "valid", seed=3, samples=7)])
    train(run, settings(iters=2, steps_per_eval=2, val_batches=0, lora_dropout=0.5, learning_rate=0.1), quiet=True)
    found = next(line for line in read_metrics(run.out) if "val_loss" in line)
    trainee, valid = Trainee(load(run.out / "model")[0], LossWeights()), JoinedFolders([tmp_path / "valid"])
    sums = [trainee.losses(to_mlx_arrays(make_batch([valid[i]], valid.params))) for i in range(len(valid))]
    nats, count = (sum(one[name].item() for one in sums) for name in ("nats", "count"))
    assert found["val_loss"] == pytest.approx(nats / count, rel=1e-5)
    n_bytes = sum(valid[i].n_bytes for i in range(len(valid)))
    assert found["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)


@pytest.mark.slow
def test_plot_draws_the_curves(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(flags(tmp_path / "run", "--plot", "--steps-per-report", "1")) == 0
    picture = (tmp_path / "run" / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_a_run_without_lines_has_nothing_to_draw(tmp_path):
    MetricsLog(tmp_path, 0)
    with pytest.raises(TrainingError, match="no lines to draw"):
        plot_training_curves(tmp_path)


def test_an_empty_shard_can_be_read(tmp_path):
    empty = PreparedShards(write_shards(tmp_path / "empty", samples=0))
    assert len(empty) == 0
    assert isinstance(empty.params, CodecParams)
