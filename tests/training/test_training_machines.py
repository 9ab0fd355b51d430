"""Two processes on MLX's ring, over loopback: the same losses as one, one folder, and nobody left waiting."""

from __future__ import annotations

import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.run import train
from mlx_zip.training.run_folder import read_metrics
from support.processes import Command, wait_all
from support.several_machines import ring
from support.tiny_training import ENCODER, losses, options, settings, write_plain, write_shards

LIMIT_S = 240
CHANGES = {"iters": 5, "batch_size": 4, "grad_accumulation_steps": 2, "token_type": 0.05}
FLAGS = {
    "batch-size": 4,
    "learning-rate": 0.01,
    "lora-rank": 2,
    "steps-per-report": 1,
    "save-every": 2,
    "keep": 3,
    "encoder": ENCODER.kind,
    "encoder-layers": 1,
    "encoder-heads": 2,
    "encoder-intermediate-size": 16,
    "valid-share": 0,
}


def start(home: Path, outs: list[Path], **flags: Any) -> list[Command]:
    """One process per folder in `outs`, each a machine of one run."""
    processes = []
    for machine, out in zip(ring(home, len(outs)), outs, strict=True):
        places = {"model": home / "plain", "data": home / "data", "out": out}
        values = [str(x) for k, v in {**places, **FLAGS, **flags}.items() for x in (f"--{k.replace('_', '-')}", v)]
        values += ["--plot"] if find_spec("matplotlib") else []
        processes.append(Command(["train", *values], home / f"{out.name}.said", machine))
    return processes


def ended(processes: list[Command]) -> list[tuple[int, str]]:
    """(exit status, stderr) of each; all are killed when one takes too long."""
    return wait_all(processes, LIMIT_S)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, and `one`, the run of a single process."""
    folder = tmp_path_factory.mktemp("machines")
    train(options(folder / "one"), settings(**CHANGES), quiet=True)
    return folder


@pytest.mark.slow
def test_two_machines_give_the_losses_of_one_with_the_whole_batch_and_resume_from_the_first_ones_disk(home):
    outs = [home / "first", home / "second"]
    flags = {"iters": 5, "grad_accumulation_steps": 2, "token_type": 0.05}
    assert [status for status, _ in ended(start(home, outs, **flags))] == [0, 0]
    assert not outs[1].exists()
    assert_equal_lines(outs[0], home / "one")
    for later in ("step-000004", "step-000005"):  # back to step 2, and once more
        shutil.rmtree(outs[0] / "checkpoints" / later)
    shutil.rmtree(outs[0] / "model")
    before = losses(outs[0])
    assert [status for status, _ in ended(start(home, outs, **flags))] == [0, 0]
    assert losses(outs[0]) == before
    assert (outs[0] / "model" / "config.json").exists()


def assert_equal_lines(found: Path, expected: Path) -> None:
    ours, theirs = read_metrics(found), read_metrics(expected)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [1, 2, 3, 4, 5]
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "bits_per_byte", "token_type", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
        for name in ("seen_samples", "seen_ids", "seen_base_ids", "seen_bytes"):
            assert one[name] == other[name], name


@pytest.mark.slow
def test_a_signal_to_one_machine_stops_both_after_the_same_step(home):
    outs = [home / "stopped", home / "stopped-too"]
    processes = start(home, outs, iters=100_000)
    deadline = time.monotonic() + LIMIT_S
    while len(read_metrics(outs[0])) < 2 and time.monotonic() < deadline and not processes[0].ended:
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    assert [status for status, _ in ended(processes)] == [143, 143]
    assert list_checkpoints(outs[0])[-1][0] == losses(outs[0])[-1][0]


@pytest.mark.slow
def test_when_the_first_machine_cannot_save_the_other_ends_with_a_word(home):
    outs = [home / "full", home / "full-too"]
    shutil.copytree(home / "one", outs[0])
    shutil.rmtree(outs[0] / "checkpoints")
    (outs[0] / "checkpoints").write_text("in the way")
    (first, told), (second, reason) = ended(start(home, outs, iters=5, grad_accumulation_steps=2, token_type=0.05))
    assert (first, second) == (2, 2)
    assert "cannot write" in told
    assert "another machine" in reason


@pytest.mark.slow
def test_when_one_machine_cannot_begin_the_other_does_not_wait_for_it(home, tmp_path):
    write_plain(tmp_path / "plain")
    write_shards(tmp_path / "data")
    (tmp_path / "first").write_text("no folder")
    (first, told), (second, reason) = ended(start(tmp_path, [tmp_path / "first", tmp_path / "second"], iters=2))
    assert (first, second) == (2, 2)
    assert "cannot write" in told
    assert "another machine" in reason
