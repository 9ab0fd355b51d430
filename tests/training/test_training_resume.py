"""A run goes on as if it had never stopped, whatever stopped it, and refuses what is not its own."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import MlxZipError
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.files import sole_user
from mlx_zip.training.batches import batch_order
from mlx_zip.training.checkpoint import checkpoints
from mlx_zip.training.loop import run_steps
from mlx_zip.training.metrics import FILE, Metrics, read_metrics
from mlx_zip.training.run import train
from mlx_zip.training.settings import EncoderOptions, TrainSettings
from mlx_zip.training.trainer import Trainer
from support.crashing import crash_after
from support.processes import Command
from support.same_numbers import assert_same_losses, assert_same_weights, is_exact
from support.tiny_training import (
    CODEC,
    ENCODER,
    losses,
    options,
    settings,
    write_plain,
    write_shards,
)

MANY = 36


def weights(out: Path) -> dict[str, np.ndarray]:
    loaded: Any = mx.load(str(out / "model" / "model.safetensors"))
    return {name: np.array(value) for name, value in loaded.items()}


def assert_same_run(found: Path, expected: Path) -> None:
    assert_same_losses(losses(found), losses(expected))
    assert_same_weights(weights(found), weights(expected))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a GPU the default device, by its name."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


def test_a_run_on_the_cpu_is_compared_bit_for_bit():
    if not is_exact():
        pytest.skip("the default device is a GPU")
    for compare, one, other in (
        (assert_same_losses, [(1, 2.0)], [(1, 2.0000001)]),
        (assert_same_weights, {"a": np.array([1.0, 2.0])}, {"a": np.array([1.0, 2.0000001])}),
    ):
        compare(one, one)
        with pytest.raises(AssertionError):
            compare(one, other)


@pytest.mark.usefixtures("gpu")
def test_a_run_on_a_gpu_is_compared_with_a_tolerance_that_a_wrong_one_misses():
    for compare, one, near, far in (
        (assert_same_losses, [(1, 2.0)], [(1, 2.0001)], [(1, 2.01)]),
        (assert_same_weights, {"a": np.ones(9)}, {"a": np.full(9, 1.001)}, {"a": np.full(9, 1.02)}),
    ):
        compare(one, near)
        with pytest.raises(AssertionError):
            compare(one, far)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.3},
        {"grad_accumulation_steps": 3, "warmup": 2},
        {"optimizer": "muon", "fine_tune_type": "full", "reconstruction": 0.1, "token_type": 0.05},
        {"optimizer": "adafactor", "fine_tune_type": "encoders"},
        {"optimizer": "sgd", "dtype": "bfloat16"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_a_run_that_crashed_goes_on_with_the_same_numbers(changes, tmp_path, monkeypatch):
    whole, broken = options(tmp_path / "whole"), options(tmp_path / "broken")
    train(whole, settings(**changes), quiet=True)
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(RuntimeError, match="crashed"):
            train(broken, settings(**changes), quiet=True)
    assert [step for step, _ in checkpoints(broken.out)] == [2]
    assert losses(broken.out)[-1][0] == 3  # told, but not saved: it will be told again
    train(broken, settings(**changes), quiet=True)
    assert_same_run(broken.out, whole.out)


def test_a_compiled_run_that_crashed_goes_on_with_the_same_numbers(tmp_path, monkeypatch):
    write_shards(tmp_path / "data", samples=8, alike=True)  # one shape, compiled once
    whole, broken = options(tmp_path / "whole"), options(tmp_path / "broken")
    compiled = settings(compile="on", lora_dropout=0.3, iters=4, lora_layers=1)
    train(whole, compiled, quiet=True)
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(RuntimeError, match="crashed"):
            train(broken, compiled, quiet=True)
    train(broken, compiled, quiet=True)
    assert_same_run(broken.out, whole.out)


def test_every_epoch_has_an_order_of_its_own_that_depends_on_the_seed_alone():
    lengths = np.arange(100, dtype=np.int64) % 7
    orders = [batch_order(lengths, 4, seed, epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    first = [batch.tolist() for batch in orders[0]]
    assert first == [batch.tolist() for batch in orders[1]]
    assert all(first != [batch.tolist() for batch in order] for order in orders[2:])
    assert all(lengths[i] >= 2 for batch in first for i in batch)
    seen = [i for batch in first for i in batch]
    assert len(set(seen)) == len(seen) >= (lengths >= 2).sum() - 3


def test_samples_of_a_batch_begin_with_codebooks_of_like_size():
    rng = np.random.default_rng(0)
    lengths, starts = rng.integers(2, 60, 640), rng.choice([0, 256, 1024], 640, p=[0.5, 0.4, 0.1])
    batches = batch_order(lengths, 8, 0, 0, starts)
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(640))
    mixed = sum(len(set(starts[batch].tolist())) > 1 for batch in batches)
    assert mixed <= 2 * 3  # in each of the three runs, one at each border between two sizes


def test_a_finished_run_is_not_trained_again(tmp_path):
    run = options(tmp_path / "run")
    first = train(run, settings(), quiet=True)
    before = losses(run.out)
    assert train(run, settings(), quiet=True).progress == first.progress
    assert losses(run.out) == before


# ---- another process, another end


def command(out: Path) -> list[str]:
    values = {
        "model": out.parent / "plain",
        "data": out.parent / "data",
        "out": out,
        "iters": MANY,
        "batch-size": 2,
        "learning-rate": 0.01,
        "lora-rank": 2,
        "lora-dropout": 0.1,
        "steps-per-report": 1,
        "save-every": 5,
        "keep": 3,
        "encoder": ENCODER.kind,
        "encoder-layers": 1,
        "encoder-heads": 2,
        "encoder-intermediate-size": 16,
        "valid-share": 0,
    }
    return ["train", *(str(x) for k, v in values.items() for x in (f"--{k}", v))]


def same_in_process(out: Path) -> Any:
    """What `command` asks for."""
    changes = {"iters": MANY, "batch_size": 2, "lora_dropout": 0.1, "save_every": 5}
    return train(options(out), settings(**changes), quiet=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole run of `command`; its neighbours are the model and the data."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    same_in_process(out)
    return out


def stopped_with(number: int, out: Path, steps: int) -> int:
    """Starts the command, sends it a signal once so many steps are told, and returns its exit status."""
    process = Command(command(out), out.with_suffix(".said"))
    deadline = time.monotonic() + 120
    while len(read_metrics(out)) < steps and not process.ended and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    status, told = process.wait(120)
    assert "Traceback" not in told
    return status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_saves_the_last_step_and_the_run_goes_on_from_there(number, status, uninterrupted):
    out = uninterrupted.parent / f"stopped-{number}"
    assert stopped_with(number, out, steps=3) == status
    done = losses(out)[-1][0]
    assert 3 <= done < MANY
    assert checkpoints(out)[-1][0] == done
    assert not (out / "model").exists()
    same_in_process(out)
    assert_same_run(out, uninterrupted)


def test_a_killed_run_loses_at_most_the_steps_since_its_last_checkpoint(uninterrupted):
    out = uninterrupted.parent / "killed"
    steps = random.randint(6, 24)  # any moment will do
    assert stopped_with(signal.SIGKILL, out, steps) == -signal.SIGKILL
    told, saved = losses(out)[-1][0], checkpoints(out)[-1][0]
    assert told - 5 <= saved < MANY
    same_in_process(out)
    assert_same_run(out, uninterrupted)


def test_what_a_killed_process_left_half_written_is_ignored_and_removed(tmp_path, monkeypatch):
    whole, run = options(tmp_path / "whole"), options(tmp_path / "run")
    train(whole, settings(), quiet=True)
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(RuntimeError, match="crashed"):
            train(run, settings(), quiet=True)
    left = run.out / "checkpoints" / ".step-000004.partial-1"
    shutil.copytree(checkpoints(run.out)[-1][1], left)
    (left / "trained.safetensors").write_bytes(b"half")
    with open(run.out / FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    train(run, settings(), quiet=True)
    assert not left.exists()
    assert_same_run(run.out, whole.out)


# ---- what is refused


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
    from dataclasses import replace

    shutil.rmtree(tmp_path / "data")
    write_shards(tmp_path / "data", replace(CODEC, codebook_size=40))
    with pytest.raises(TrainingError, match="data"):
        train(half_done, settings(), quiet=True)


def test_a_checkpoint_of_another_run_is_refused(half_done, tmp_path):
    other = options(tmp_path / "other")
    train(other, settings(seed=3), quiet=True)
    last = checkpoints(half_done.out)[-1][1]
    shutil.rmtree(last)
    shutil.copytree(checkpoints(other.out)[-1][1], last)
    with pytest.raises(TrainingError, match="belongs to another model"):
        train(half_done, settings(), quiet=True)


@pytest.mark.parametrize("file", ["trained.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["cut", "empty", "gone", "other", "nothing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(file, harm, half_done):
    last = checkpoints(half_done.out)[-1][1]
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
    batches = Trainer._batches

    def poisoned(self: Trainer, step: int) -> Any:
        made = batches(self, step)
        if step == 4:
            made[0].arrays["weights"][0, 0] = np.nan
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_batches", poisoned)
        with pytest.raises(TrainingError, match=r"step 5: .* samples \[\d+, \d+, \d+, \d+\] of .*data"):
            train(run, settings(), quiet=True)
    assert [step for step, _ in checkpoints(run.out)] == [2, 4]
    assert train(run, settings(), quiet=True).progress.step == 6
    assert np.isfinite([loss for _, loss, _ in losses(run.out)]).all()


def test_weights_that_are_no_numbers_stop_the_run_before_anything_is_saved(tmp_path):
    folder = write_plain(tmp_path / "plain")
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    tensors["model.norm.weight"][0] = mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(TrainingError, match="step 1: "):
        train(options(tmp_path / "run"), settings(), quiet=True)
    assert checkpoints(tmp_path / "run") == []


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
    with sole_user(tmp_path / "run"), pytest.raises(TrainingError, match=r"another process trains in .*run"):
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


@pytest.mark.parametrize("size", [100, 9000])
def test_when_nothing_more_can_be_written_the_last_checkpoint_stays_good(size, half_done):
    kept = [path for _, path in checkpoints(half_done.out)]
    with no_file_larger_than(size), pytest.raises(TrainingError, match="cannot write"):
        train(half_done, settings(), quiet=True)
    assert [path for _, path in checkpoints(half_done.out)] == kept
    assert [path.name for path in (half_done.out / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert train(half_done, settings(), quiet=True).progress.step == 6


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
        assert len(checkpoints(run.out)) > 1
        shutil.rmtree(checkpoints(run.out)[0][1])
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


def test_a_checkpoint_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    run = options(tmp_path / "run")
    train(run, settings(), quiet=True)
    shutil.rmtree(run.out / "checkpoints")
    (run.out / "checkpoints").write_text("in the way")
    with pytest.raises(MlxZipError, match="cannot write"):
        train(run, settings(), quiet=True)


def test_lines_behind_the_resumed_step_are_dropped(tmp_path):
    metrics = Metrics(tmp_path, 0)
    for step in (1, 2, 3, 4):
        metrics.add(step=step, loss=float(step))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    Metrics(tmp_path, 2).add(step=3, loss=30.0)
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 2.0, 30.0]


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"24 usable samples do not fill a batch of 25: .*smaller --batch-size"):
        train(options(tmp_path / "run"), settings(batch_size=25), quiet=True)


def test_validation_data_without_a_sample_are_refused(tmp_path):
    empty = write_shards(tmp_path / "empty", samples=0)
    with pytest.raises(DataError, match="no sample to validate on"):
        train(options(tmp_path / "run", valid=[empty]), settings(), quiet=True)


def test_a_run_until_step_zero_trains_nothing():
    job = SimpleNamespace(progress=SimpleNamespace(step=0), save=lambda: None)
    assert not run_steps(job, TrainSettings(iters=2), SimpleNamespace(), lambda: None, until=0)
