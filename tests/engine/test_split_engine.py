"""An engine on two machines answers as an engine on one."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import mlx.core as mx
import pytest

from mlx_zip import generate, load
from mlx_zip.engine.mlx.mlx_engine import open_engine
from mlx_zip.engine.mlx.split_engine import open_split_engine
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.errors import GenerationError
from mlx_zip.packs.pack import Pack
from support import tiny
from support.processes import Command, wait_all
from support.serving import ask
from support.several_machines import LIMIT_S, PROMPT, answered, losing, ring, serve_on, write_model

pytestmark = pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="MLX has no ring backend here")

TALK, SOME = tiny.base_ids(40, 5), tiny.base_ids(40, 8)
SAMPLED = {"temp": 0.9, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5, "logit_bias": {7: -2.0}}
REQUESTS: list[dict[str, Any]] = [
    {"base_ids": tiny.base_ids(50, 1), "max_tokens": 40},
    {"base_ids": tiny.base_ids(17, 2), "max_tokens": 60, "sampling": SAMPLED},
    {"base_ids": tiny.base_ids(9, 3), "max_tokens": 20, "top_logprobs": 3},
    {"base_ids": tiny.base_ids(30, 4), "max_tokens": 25, "only": [5, 6, 7, 8, 9]},
    {"base_ids": TALK, "max_tokens": 30},
    {"base_ids": [*TALK, 5, 6, 7, 5, 6], "max_tokens": 30, "after": True},  # goes on with what a session holds
]
FAILING: list[dict[str, Any]] = [
    {"base_ids": tiny.base_ids(30, 4), "max_tokens": 50, "only": [5, 6, 7], "broken": True},
    {"base_ids": tiny.base_ids(30, 4), "max_tokens": 50, "only": []},
    {"base_ids": tiny.base_ids(20, 7), "max_tokens": 100_000, "cancel_at": 5},
    {"base_ids": tiny.base_ids(20, 6), "max_tokens": 30, "after": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("plain", [False, True])
def test_requests_on_two_machines_get_what_they_get_on_one(family, plain, tmp_path):
    folder = write_model(tmp_path / "model", family, plain=plain)
    with open_engine(folder) as engine:
        alone = answered(engine, REQUESTS)
    found = serve_on(2, tmp_path / "two", folder, REQUESTS)
    assert found == alone
    assert found[-1][2] >= len(TALK) - 4  # base tokens that were not read again


@pytest.mark.slow
def test_requests_that_fail_or_are_cancelled_end_on_both_machines_and_the_next_is_answered(tmp_path):
    folder = write_model(tmp_path / "model", "llama")
    with open_engine(folder) as engine:
        (alone,) = answered(engine, FAILING[-1:])
    broken, empty, cancelled, last = serve_on(2, tmp_path / "two", folder, FAILING)
    assert "the constraint is broken" in broken[1]
    assert "allows no token" in empty[1]
    assert cancelled[1] == "cancelled"
    assert last == alone


@pytest.mark.slow
def test_a_request_may_begin_with_a_pack_on_two_machines(tmp_path):
    folder = write_model(tmp_path / "model", "llama")
    pairs = [[(a, b) for a, b in zip(some[::2], some[1::2], strict=True) if min(a, b) > 2] for some in (SOME, TALK)]
    packs = [Pack(tuple(dict.fromkeys(one))) for one in pairs]
    requests = [{"base_ids": TALK, "max_tokens": 40, "pack": pack} for pack in (*packs, None)]
    with open_engine(folder) as engine:
        alone = answered(engine, requests)
    assert serve_on(2, tmp_path / "two", folder, requests) == alone
    assert alone[0][0] != alone[2][0]


@pytest.mark.slow
def test_each_machine_finds_its_share_of_a_conversation_after_a_restart(tmp_path):
    folder, kept = write_model(tmp_path / "model", "llama"), tmp_path / "kept"
    first, second = {"base_ids": TALK, "max_tokens": 30}, {"base_ids": [*TALK, 5, 6, 7, 5, 6], "max_tokens": 30}
    with open_engine(folder) as engine:
        alone = answered(engine, [first, {**second, "after": True}])
    options = {"sessions": SessionOptions(folder=kept)}
    assert serve_on(2, tmp_path / "one", folder, [first], **options) == alone[:1]
    shares = [list((kept / f"machine-{n}-of-2").glob("*.safetensors")) for n in (1, 2)]
    assert [len(files) for files in shares] == [1, 1]
    assert serve_on(2, tmp_path / "two", folder, [second], **options) == alone[1:]
    for file in kept.glob("machine-2-of-2/*"):  # lost on one machine: all read the prompt again
        file.unlink()
    assert serve_on(2, tmp_path / "three", folder, [second], **options)[0][::2] == [alone[1][0], 0]
    mixed = kept / "machine-2-of-2"
    mixed.mkdir(exist_ok=True)
    for file in (kept / "machine-1-of-2").glob("*"):
        file.rename(mixed / file.name)
    assert serve_on(2, tmp_path / "four", folder, [second], **options)[0][::2] == [alone[1][0], 0]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("busy", [False, True])
def test_a_machine_that_is_lost_ends_the_others_engine_also_when_nothing_is_asked(lost, busy, tmp_path):
    folder = write_model(tmp_path / "model", "llama")
    status, said = losing(lost, busy, tmp_path, folder)
    assert status == 2, said
    assert "error: another machine of this run has ended" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_request_that_came_just_before_closing_is_answered_on_one_machine_of_a_run_too(tmp_path, monkeypatch):
    engine = open_split_engine(mx.distributed.init(), write_model(tmp_path / "model", "llama"), sessions=None)
    take, asked, go = engine._inbox.run_queued_calls, [], threading.Event()

    def then_closes(wait_s):
        take(wait_s)
        if go.is_set() and not asked:
            asked.append(ask(engine, tiny.base_ids(9), max_tokens=5)[1])
            engine.close(drain_s=LIMIT_S)

    monkeypatch.setattr(engine._inbox, "run_queued_calls", then_closes)
    go.set()
    engine._thread.join(LIMIT_S)
    assert asked[0].wait().end.reason == "length"


def test_how_likely_a_prompt_is_nobody_is_told_and_the_engine_goes_on(tmp_path):
    folder = write_model(tmp_path / "model", "llama")
    with open_split_engine(mx.distributed.init(), folder, sessions=None) as engine:
        with pytest.raises(GenerationError, match="split over several machines does not tell"):
            engine.score_prompt_ids(tiny.base_ids(9))
        assert ask(engine, tiny.base_ids(9), max_tokens=5)[1].wait().end.reason == "length"


# ---- mlx_zip serve


@pytest.mark.slow
def test_serve_on_two_machines_answers_as_one_and_ends_with_the_first(tmp_path):
    folder = write_model(tmp_path / "model", "llama")
    flags = "serve", "--model", str(folder), "--port", "0"
    processes = [
        Command(flags, tmp_path / f"said-{rank}", place, tmp_path / f"out-{rank}")
        for rank, place in enumerate(ring(tmp_path, 2))
    ]
    try:
        address = _address(tmp_path / "out-0", processes)
        body = {"model": str(folder), "prompt": PROMPT, "max_tokens": 30, "temperature": 0.8, "seed": 5}
        asked = Request(f"{address}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(asked, timeout=LIMIT_S) as response:
            text = json.load(response)["choices"][0]["text"]
        model, tokenizer = load(folder)
        assert text == generate(model, tokenizer, PROMPT, max_tokens=30, temp=0.8, seed=5)
    finally:
        processes[0].send_signal(signal.SIGTERM)
        ended = wait_all(processes, LIMIT_S)
    assert [status for status, _ in ended] == [143, 0], ended
    assert (tmp_path / "out-1").read_text() == ""


def _address(out: Path, processes: list[Command]) -> str:
    """The address that the first machine says it serves on."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and not any(process.ended for process in processes):
        if out.exists() and (found := re.search(r"http://\S+", out.read_text())):
            return found[0]
        time.sleep(0.05)
    raise AssertionError("no address was printed")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--session-files", "x"], ["--pipeline"]])
def test_flags_of_serve_that_several_machines_cannot_use_are_refused(flags, tmp_path):
    processes = [
        Command(["serve", *flags], tmp_path / f"said-{rank}", place) for rank, place in enumerate(ring(tmp_path, 2))
    ]
    ended = wait_all(processes, LIMIT_S)
    assert [status for status, _ in ended] == [2, 2]
    assert f"{flags[0]} cannot be used" in ended[0][1]
