"""A run goes on as if it had never stopped, whatever stopped it."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.training import trainer
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.run import train
from mlx_zip.training.run_folder import METRICS_FILE, MetricsLog, read_metrics
from mlx_zip.training.steps.batches import order_batches, start_batch_workers
from mlx_zip.training.steps.stepper import Stepper
from support.crashing import crash_after
from support.processes import Command
from support.same_numbers import assert_same_losses, assert_same_weights, is_exact
from support.slow_cases import slow_but
from support.tiny_training import (
    ENCODER,
    losses,
    options,
    settings,
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


CHANGES: list[dict[str, Any]] = [
    {"lora_dropout": 0.3},
    {"grad_accumulation_steps": 3, "warmup": 2},
    {"optimizer": "muon", "fine_tune_type": "full", "reconstruction": 0.1, "token_type": 0.05},
    {"optimizer": "adafactor", "fine_tune_type": "encoders"},
    {"optimizer": "sgd", "dtype": "bfloat16"},
]


@pytest.mark.parametrize("changes", slow_but(CHANGES, CHANGES[4]), ids=lambda one: " ".join(map(str, one.values())))
def test_a_run_that_crashed_goes_on_with_the_same_numbers(changes, tmp_path, monkeypatch):
    whole, broken = options(tmp_path / "whole"), options(tmp_path / "broken")
    train(whole, settings(**changes), quiet=True)
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(RuntimeError, match="crashed"):
            train(broken, settings(**changes), quiet=True)
    assert [step for step, _ in list_checkpoints(broken.out)] == [2]
    assert losses(broken.out)[-1][0] == 3  # reported, but not saved: it will be reported again
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
    orders = [order_batches(lengths, 4, seed, epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    first = [batch.tolist() for batch in orders[0]]
    assert first == [batch.tolist() for batch in orders[1]]
    assert all(first != [batch.tolist() for batch in order] for order in orders[2:])
    assert all(lengths[i] >= 2 for batch in first for i in batch)
    seen = [i for batch in first for i in batch]
    assert len(set(seen)) == len(seen) >= (lengths >= 2).sum() - 3


def test_samples_of_a_batch_begin_with_codebooks_of_like_size():
    rng = np.random.default_rng(0)
    lengths, starts = rng.integers(2, 60, 640), rng.choice([0, 256, 1024], 640, p=[0.5, 0.4, 0.1])
    batches = order_batches(lengths, 8, 0, 0, starts)
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(640))
    mixed = sum(len(set(starts[batch].tolist())) > 1 for batch in batches)
    assert mixed <= 2 * 3  # in each of the three runs, one at each border between two sizes


def test_a_finished_run_is_not_trained_again(tmp_path):
    run = options(tmp_path / "run")
    first = train(run, settings(iters=2), quiet=True)
    before = losses(run.out)
    assert train(run, settings(iters=2), quiet=True).progress == first.progress
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
    """Starts the command, sends it a signal once so many steps are reported, and returns its exit status."""
    process = Command(command(out), out.with_suffix(".said"))
    deadline = time.monotonic() + 120
    while len(read_metrics(out)) < steps and not process.ended and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    status, told = process.wait(120)
    assert "Traceback" not in told
    return status


@pytest.mark.slow
def test_batches_made_in_other_processes_are_those_of_this_one(uninterrupted, monkeypatch):
    monkeypatch.setattr(Stepper, "batch_workers", 2)
    made_here = []
    monkeypatch.setattr(trainer, "call_in_this_process", lambda function, *args, **named: made_here.append(function))
    out = uninterrupted.parent / "by-workers"
    same_in_process(out)
    assert_same_run(out, uninterrupted)
    assert not made_here


@pytest.mark.parametrize("killed", slow_but([0, 1], 0))
def test_a_killed_process_that_makes_batches_is_told(killed):
    def make_batches() -> None:
        with start_batch_workers(2) as call, ThreadPoolExecutor(2) as pool:
            for one in [pool.submit(call, time.sleep, 1) for _ in range(2)]:
                one.result()
            first, second = (process.pid for process in multiprocessing.active_children())
            os.kill((first, second)[killed] or 0, signal.SIGKILL)
            for _ in range(100):
                call(time.sleep, 0.1)

    with pytest.raises(BrokenProcessPool):
        make_batches()


@pytest.mark.slow
def test_a_stop_signal_of_the_terminal_ends_no_process_that_makes_batches():
    code = (
        "import os, signal, sys, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from mlx_zip.training.steps.batches import block_stop_signals, start_batch_workers\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, lambda *_: None)\n"
        "    with start_batch_workers(2) as call, ThreadPoolExecutor(2, initializer=block_stop_signals) as pool:\n"
        "        found = [pool.submit(call, os.getpid) for _ in range(2)]\n"
        "        for _ in range(20):\n"
        "            os.killpg(0, signal.SIGINT)\n"
        "            time.sleep(0.1)\n"
        "        print(all(one.result() for one in found), call(abs, -7))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "True 7\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_saves_the_last_step_and_the_run_goes_on_from_there(number, status, uninterrupted):
    out = uninterrupted.parent / f"stopped-{number}"
    assert stopped_with(number, out, steps=3) == status
    done = losses(out)[-1][0]
    assert 3 <= done < MANY
    assert list_checkpoints(out)[-1][0] == done
    assert not (out / "model").exists()
    same_in_process(out)
    assert_same_run(out, uninterrupted)


def test_a_signal_during_the_last_step_does_not_stop_the_run(tmp_path, monkeypatch):
    def add(log, **values):
        whole(log, **values)
        if values["step"] == 1:
            signal.raise_signal(signal.SIGTERM)

    whole = MetricsLog.add
    monkeypatch.setattr(MetricsLog, "add", add)
    outcome = train(options(tmp_path / "run"), settings(iters=2), quiet=True)
    assert (outcome.progress.step, outcome.stopped_by) == (2, None)
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.slow
def test_a_killed_run_loses_at_most_the_steps_since_its_last_checkpoint(uninterrupted):
    out = uninterrupted.parent / "killed"
    steps = random.randint(6, 24)  # any moment will do
    assert stopped_with(signal.SIGKILL, out, steps) == -signal.SIGKILL
    told, saved = losses(out)[-1][0], list_checkpoints(out)[-1][0]
    assert told - 5 <= saved < MANY
    same_in_process(out)
    assert_same_run(out, uninterrupted)


@pytest.mark.slow
def test_what_a_killed_process_left_half_written_is_ignored_and_removed(tmp_path, monkeypatch):
    whole, run = options(tmp_path / "whole"), options(tmp_path / "run")
    train(whole, settings(), quiet=True)
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(RuntimeError, match="crashed"):
            train(run, settings(), quiet=True)
    left = run.out / "checkpoints" / ".step-000004.partial-1"
    shutil.copytree(list_checkpoints(run.out)[-1][1], left)
    (left / "trained.safetensors").write_bytes(b"half")
    with open(run.out / METRICS_FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    train(run, settings(), quiet=True)
    assert not left.exists()
    assert_same_run(run.out, whole.out)
