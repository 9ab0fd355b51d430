"""What a run refuses, and how it ends when something goes wrong on its way."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import MlxZipError
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.files import try_lock_folder
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.run import train
from mlx_zip.training.run_folder import MetricsLog, read_metrics
from mlx_zip.training.settings import EncoderOptions, TrainSettings
from mlx_zip.training.trainer import Trainer, train_to_step
from support.crashing import crash_after
from support.slow_cases import slow_but
from support.tiny_training import (
    CODEC,
    losses,
    options,
    settings,
    write_plain,
    write_shards,
)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that crashed after step 5; its checkpoints are of steps 2 and 4."""
    home = tmp_path_factory.mktemp("crashed")
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, 5)
        with pytest.raises(RuntimeError, match="crashed"):
            train(options(home / "run"), settings(), quiet=True)
    return home


@pytest.fixture
def half_done(crashed: Path, tmp_path: Path) -> Any:
    """A copy of the run that crashed, its model and its data."""
    shutil.copytree(crashed, tmp_path, dirs_exist_ok=True)
    return options(tmp_path / "run")


def test_other_settings_are_refused_by_name(half_done):
    with pytest.raises(TrainingError, match=r"learning_rate, seed.*choose another --out"):
        train(half_done, settings(seed=1, learning_rate=0.5), quiet=True)
    train(half_done, settings(steps_per_report=2, save_every=3, keep=1), quiet=True)  # these change no number


def test_another_model_of_the_same_shape_is_refused(half_done, tmp_path):
    file = str(tmp_path / "plain" / "model.safetensors")
    tensors: Any = mx.load(file)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.5
    mx.save_safetensors(file, tensors)
    with pytest.raises(TrainingError, match=r"holds another run.*choose another --out"):
        train(half_done, settings(), quiet=True)


def test_other_encoders_and_other_data_are_refused_by_name(half_done, tmp_path):
    other = EncoderOptions(kind="attention", num_heads=2)
    with pytest.raises(TrainingError, match="encoder"):
        train(options(half_done.out, encoder=other), settings(), quiet=True)
    more = [tmp_path / "data", write_shards(tmp_path / "more", seed=1)]
    with pytest.raises(TrainingError, match=r"another run \(data\)"):
        train(options(half_done.out, data=more), settings(), quiet=True)


def test_data_prepared_otherwise_are_refused_though_of_the_same_size_and_moved_sources_are_not(tmp_path):
    def prepared(path: str, train_on: str) -> None:
        made = {"sources": [{"data": [path], "sha256": {path: "12ab"}}], "train_on": train_on}
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        write_shards(tmp_path / "data", settings=made)

    prepared("a.txt", "answers")
    train(options(tmp_path / "run"), settings(iters=1), quiet=True)
    prepared("elsewhere/a.txt", "answers")
    train(options(tmp_path / "run"), settings(iters=1), quiet=True)
    prepared("a.txt", "all")  # masks differ, counts do not
    with pytest.raises(TrainingError, match=r"another run \(data\)"):
        train(options(tmp_path / "run"), settings(iters=1), quiet=True)


def test_another_codec_is_refused(half_done, tmp_path):
    shutil.rmtree(tmp_path / "data")
    write_shards(tmp_path / "data", replace(CODEC, codebook_size=40))
    with pytest.raises(TrainingError, match="data"):
        train(half_done, settings(), quiet=True)


def test_a_checkpoint_of_another_run_is_refused(half_done, tmp_path):
    other = options(tmp_path / "other")
    train(other, settings(iters=4, seed=3), quiet=True)
    last = list_checkpoints(half_done.out)[-1][1]
    shutil.rmtree(last)
    shutil.copytree(list_checkpoints(other.out)[-1][1], last)
    with pytest.raises(TrainingError, match="belongs to another model"):
        train(half_done, settings(), quiet=True)


FILES, HARM = (
    ["trained.safetensors", "optimizer.safetensors", "state.json"],
    ["cut", "empty", "gone", "other", "nothing", "pipe"],
)
QUICK = [(FILES[(i + 2) % 3], harm) for i, harm in enumerate(HARM)]  # each harm, and each file harmed in two ways


@pytest.mark.parametrize(("file", "harm"), slow_but(product(FILES, HARM), *QUICK))
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(file, harm, half_done):
    last = list_checkpoints(half_done.out)[-1][1]
    damage(last / file, harm)
    with pytest.raises(TrainingError, match=last.name):
        train(half_done, settings(), quiet=True)
    shutil.rmtree(last)
    if file == "state.json" and harm == "cut":
        assert train(half_done, settings(), quiet=True).progress.step == 6


def damage(path: Path, harm: str) -> None:
    whole = path.read_bytes()
    path.unlink()
    if harm == "cut":
        path.write_bytes(whole[:-20])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "other":
        if path.suffix == ".json":
            path.write_text("[1]")
        else:
            mx.save_safetensors(str(path), {"other": mx.zeros((2, 2))})
    elif harm == "nothing":
        path.write_bytes(bytes(len(whole)))
    elif harm == "pipe":
        os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "value"), [("raised_to", "x"), ("raised_to", True), ("valid_share", 5), ("valid_share", "x")]
)
def test_a_record_with_a_value_that_cannot_be_is_named(name, value, half_done):
    path = half_done.out / "train.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(TrainingError, match=rf"train\.json: {name} is {value!r}; choose another --out"):
        train(replace(half_done, valid_share=None), settings(), quiet=True)


def test_a_folder_with_other_things_in_it_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("dear")
    with pytest.raises(TrainingError, match="holds no run"):
        train(options(tmp_path / "run"), settings(), quiet=True)


# ---- trouble on the way


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_batch(tmp_path, monkeypatch):
    run = options(tmp_path / "run")
    batches = Trainer._make_step_batches

    def poisoned(self: Trainer, step: int) -> Any:
        made = batches(self, step)
        if step == 4:
            made[0].arrays["weights"][0, 0] = np.nan
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_make_step_batches", poisoned)
        with pytest.raises(TrainingError, match=r"step 5: .* samples \[\d+, \d+, \d+, \d+\] of .*data"):
            train(run, settings(), quiet=True)
    assert [step for step, _ in list_checkpoints(run.out)] == [2, 4]
    assert train(run, settings(), quiet=True).progress.step == 6
    assert np.isfinite([loss for _, loss, _ in losses(run.out)]).all()


def test_weights_that_are_no_numbers_stop_the_run_before_anything_is_saved(tmp_path):
    folder = write_plain(tmp_path / "plain")
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    tensors["model.norm.weight"][0] = mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(TrainingError, match="step 1: "):
        train(options(tmp_path / "run"), settings(), quiet=True)
    assert list_checkpoints(tmp_path / "run") == []


@pytest.mark.slow
def test_a_run_that_failed_before_its_first_checkpoint_is_not_in_the_way_of_one_with_other_settings(tmp_path):
    with pytest.raises(TrainingError, match="step 1: ") as failed:
        train(options(tmp_path / "run", valid_share=0.2), settings(lora_scale=1e300), quiet=True)
    assert "checkpoint" not in str(failed.value)
    assert train(options(tmp_path / "run"), settings(seed=1), quiet=True).progress.step == 6
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert record["fixed"]["settings"]["seed"] == 1
    assert "valid_share" not in record
    whole = options(tmp_path / "whole")
    train(whole, settings(seed=1), quiet=True)
    assert losses(tmp_path / "run") == losses(whole.out)


def test_a_run_without_a_checkpoint_that_another_process_trains_is_left_alone(tmp_path):
    with pytest.raises(TrainingError, match="step 1: "):
        train(options(tmp_path / "run"), settings(lora_scale=1e300), quiet=True)
    before = (tmp_path / "run" / "train.json").read_bytes()
    with try_lock_folder(tmp_path / "run"), pytest.raises(TrainingError, match=r"another process trains in .*run"):
        train(options(tmp_path / "run"), settings(), quiet=True)
    assert (tmp_path / "run" / "train.json").read_bytes() == before


def test_a_file_of_the_users_that_is_called_like_a_runs_record_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    for text in ("[1]", '{"fingerprint": 1}', "no JSON"):
        (tmp_path / "run" / "train.json").write_text(text)
        with pytest.raises(TrainingError, match="choose another --out"):
            train(options(tmp_path / "run"), settings(), quiet=True)
        assert (tmp_path / "run" / "train.json").read_text() == text


@contextmanager
def no_file_larger_than(size: int) -> Any:
    """Writing more fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", slow_but([100, 9000], 9000))
def test_when_nothing_more_can_be_written_the_last_checkpoint_stays_good(size, half_done):
    kept = [path for _, path in list_checkpoints(half_done.out)]
    with no_file_larger_than(size), pytest.raises(TrainingError, match="cannot write"):
        train(half_done, settings(), quiet=True)
    assert [path for _, path in list_checkpoints(half_done.out)] == kept
    assert [path.name for path in (half_done.out / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert train(half_done, settings(), quiet=True).progress.step == 6


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_good(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small disk")
    try:
        for name, make in (("plain", write_plain), ("data", write_shards)):
            make(tmp_path / name)
        run = options(disk / "run", made=("plain", "data"), model=str(tmp_path / "plain"), data=[tmp_path / "data"])
        with pytest.raises(TrainingError, match=r"cannot write .*stays good"):
            train(run, settings(keep=100, iters=40), quiet=True)
        assert len(list_checkpoints(run.out)) > 1
        shutil.rmtree(list_checkpoints(run.out)[0][1])
        with pytest.raises(TrainingError, match="cannot write"):  # reads the last one, and goes on until it is full
            train(run, settings(keep=100, iters=40), quiet=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for name in ("plain", "data"):
        {"plain": write_plain, "data": write_shards}[name](tmp_path / name)
    run = options(
        tmp_path / "file" / "run", made=("plain", "data"), model=str(tmp_path / "plain"), data=[tmp_path / "data"]
    )
    with pytest.raises(TrainingError, match="cannot write"):
        train(run, settings(), quiet=True)


def test_a_file_in_place_of_the_model_is_left_alone(half_done):
    (half_done.out / "model").write_text("mine")
    with pytest.raises(TrainingError, match=r"cannot write .*model: is a file, not a folder; the last checkpoint"):
        train(half_done, settings(), quiet=True)
    assert (half_done.out / "model").read_text() == "mine"
    assert not [path for path in half_done.out.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_checkpoint_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    run = options(tmp_path / "run")
    train(run, settings(), quiet=True)
    shutil.rmtree(run.out / "checkpoints")
    (run.out / "checkpoints").write_text("in the way")
    with pytest.raises(MlxZipError, match="cannot write"):
        train(run, settings(), quiet=True)


def test_lines_after_the_resumed_step_are_dropped(tmp_path):
    metrics = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3, 4):
        metrics.add(step=step, loss=float(step))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    MetricsLog(tmp_path, 2).add(step=3, loss=30.0)
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 2.0, 30.0]


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"24 usable samples do not fill a batch of 25: .*smaller --batch-size"):
        train(options(tmp_path / "run"), settings(batch_size=25), quiet=True)


def test_validation_data_without_a_sample_are_refused(tmp_path):
    empty = write_shards(tmp_path / "empty", samples=0)
    with pytest.raises(DataError, match="no sample to validate on"):
        train(options(tmp_path / "run", valid=[empty]), settings(), quiet=True)


def test_a_run_until_step_zero_trains_nothing():
    job = SimpleNamespace(progress=SimpleNamespace(step=0), save_checkpoint=lambda: None)
    assert not train_to_step(job, TrainSettings(iters=2), lambda: None, quiet=True, until=0)
