"""A model split over two processes, on MLX's ring over loopback, writes the ids of one process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_zip.errors import ModelError
from mlx_zip.models.decoder_options import FAMILIES
from mlx_zip.models.machines import SHARDED_TYPES, raise_unless_splittable
from support import tiny
from support.command_line import runner, without_torch
from support.places import REPO
from support.processes import Command, wait_all
from support.several_machines import LIMIT_S, PROMPT, free_ports, generated_ids, ids_on, peaks_on, ring, write_model

pytestmark = pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="MLX has no ring backend here")

GREEDY: dict[str, Any] = {"max_tokens": 14}
SAMPLED: dict[str, Any] = {"max_tokens": 14, "temp": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}
UNSEEDED: dict[str, Any] = {"max_tokens": 8, "temp": 1.5}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral"},
    "by base tokens": {"family": "llama", "position_mode": "base_token_end"},
    "quantized": {"family": "llama", "quantized": True},
    "plain llama": {"family": "llama", "plain": True},
    "plain qwen3": {"family": "qwen3", "plain": True},
}

FLAGS = [["--prompt", "-"], ["--prompt-cache-file", "x"], ["--adapter-path", "x"]]  # that one machine may have


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[dict[str, Any]]]]:
    home = tmp_path_factory.mktemp("models")
    return [(write_model(home / name, **options), [GREEDY, SAMPLED, UNSEEDED]) for name, options in MODELS.items()]


@pytest.fixture(scope="module")
def found(jobs, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ids_on(2, tmp_path_factory.mktemp("two"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_machines_write_the_ids_of_one(name, jobs, found):
    index = list(MODELS).index(name)
    folder, requests = jobs[index]
    alone = generated_ids(folder, requests[:2])
    if not MODELS[name].get("plain"):
        assert max(max(ids) for ids in alone) >= tiny.VOCAB  # hypertokens are among them
    assert found[0][index][:2] == found[1][index][:2] == alone


@pytest.mark.slow
def test_machines_choose_the_same_ids_without_a_seed_too(jobs, found):
    unseeded = [[ids[2] for ids in machine] for machine in found]
    assert unseeded[0] == unseeded[1]


@pytest.mark.slow
def test_a_machine_never_holds_more_than_its_share_and_one_tensor(tmp_path):
    folder = write_model(tmp_path / "wide", "llama", encoder="averaging", hidden=512)
    for peak, whole in peaks_on(2, tmp_path / "two", folder):
        assert peak < 0.75 * whole


@pytest.mark.slow
def test_mlx_launch_runs_generate_and_only_the_first_machine_prints(jobs, tmp_path, capsys):
    flags = "--prompt", PROMPT, "--max-tokens", "12", "--temp", "0.8", "--seed", "5", "--json"
    launch = Path(sys.executable).parent / "mlx.launch"
    command = [*without_torch("mlx_zip"), "generate", "--model", str(jobs[0][0]), *flags]
    words = [launch, "-n", "2", "--backend", "ring", "--starting-port", str(free_ports(1)[0]), "--cwd", REPO]
    done = subprocess.run(
        [*map(str, words), "--", *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    status, out, _ = runner(capsys, "generate")("--model", jobs[0][0], *flags)
    assert status == 0
    (split,), alone = map(json.loads, done.stdout.splitlines()), json.loads(out)
    assert {k: split[k] for k in ("text", "steps", "hypertokens")} == {
        k: alone[k] for k in ("text", "steps", "hypertokens")
    }


# ---- what cannot be split


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SHARDED_TYPES])
@pytest.mark.parametrize("plain", [False, True])
def test_an_architecture_that_cannot_be_split_is_refused_by_name(family, plain):
    config = {"model_type": family} if plain else tiny.tiny_config(family)
    with pytest.raises(ModelError, match=f"type {family} cannot be split"):
        raise_unless_splittable(config, 2)


@pytest.mark.parametrize(
    ("changes", "size", "named"),
    [
        ({}, 3, "num_attention_heads is 4"),
        ({}, 4, "num_key_value_heads is 2"),
        ({"intermediate_size": 49}, 2, "intermediate_size is 49"),
    ],
)
def test_counts_that_the_machines_do_not_divide_are_refused_by_name(changes, size, named):
    with pytest.raises(ModelError, match=named):
        raise_unless_splittable({**tiny.tiny_config(), **changes}, size)


@pytest.mark.slow
def test_every_machine_says_why_the_model_cannot_be_split(tmp_path):
    model = write_model(tmp_path / "phi3", "phi3")
    ended = wait_all(on_two(tmp_path, "--model", model), LIMIT_S)
    assert [status for status, _ in ended] == [2, 2]
    assert ["type phi3 cannot be split" in said for _, said in ended] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_several_machines_cannot_use_are_refused(flags, jobs, tmp_path):
    ended = wait_all(on_two(tmp_path, "--model", jobs[0][0], *flags), LIMIT_S)
    assert [status for status, _ in ended] == [2, 2]
    assert flags[0] in ended[0][1]


# ---- machines that fail or differ


def on_two(home: Path, *flags: Any, second: tuple[Any, ...] = ()) -> list[Command]:
    """`mlx_zip generate` on two machines; `second` are further flags of the second one."""
    given = "--prompt", PROMPT, *flags
    words = [["generate", *map(str, given), *map(str, more)] for more in ((), second)]
    return [
        Command(argv, home / f"said-{rank}", place, home / f"out-{rank}")
        for rank, (argv, place) in enumerate(zip(words, ring(home, 2), strict=True))
    ]


@pytest.mark.slow
def test_machines_with_different_weights_refuse_to_begin(jobs, tmp_path):
    other = write_model(tmp_path / "other", "llama", seed=1)
    ended = wait_all(on_two(tmp_path, "--model", jobs[0][0], second=("--model", other)), LIMIT_S)
    assert [status for status, _ in ended] == [2, 2]
    assert ["differ in the model's weights" in said for _, said in ended] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("second", [("--max-tokens", 99), ("--codebook-size", 32)])
def test_machines_with_different_requests_refuse_to_begin(second, jobs, tmp_path):
    ended = wait_all(on_two(tmp_path, "--model", jobs[0][0], second=second), LIMIT_S)
    assert [status for status, _ in ended] == [2, 2]
    assert ["differ in the request" in said for _, said in ended] == [True, True]


@pytest.mark.slow
def test_a_machine_that_cannot_load_ends_the_other(jobs, tmp_path):
    ended = wait_all(on_two(tmp_path, "--model", jobs[0][0], second=("--model", tmp_path / "none")), LIMIT_S)
    assert [status for status, _ in ended] == [2, 2]
    assert "another machine of this run could not go on" in ended[0][1]
    assert "no such model folder" in ended[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_killed_ends_the_other_with_one_line_of_its_own(lost, jobs, tmp_path):
    processes = on_two(tmp_path, "--model", jobs[0][0], "--max-tokens", 1_000_000)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and written(tmp_path / "out-0") < 100:
        time.sleep(0.05)
    processes[lost].send_signal(signal.SIGKILL)
    status, said = processes[1 - lost].wait(LIMIT_S)
    processes[lost].wait(1)
    assert status == 2
    ours = [line for line in said.splitlines() if not line.startswith("[ring]")]
    assert len(ours) == 1
    assert "another machine of this run has ended" in ours[0]
    assert not (tmp_path / "out-1").read_bytes()


def written(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
