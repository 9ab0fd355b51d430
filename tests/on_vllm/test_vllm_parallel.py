"""Two processes that share a model, and vLLM's core in a process of its own, give the ids that one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.on_vllm import answer_three

WAYS = {"tensor parallel": {"tensor_parallel_size": 2}, "pipeline parallel": {"pipeline_parallel_size": 2}}
TESTS = Path(__file__).parents[1]


def run_script(name: str, *arguments: str) -> Any:
    """Returns what a script beside this file prints last, run in a process that has vLLM's core in another one."""
    script = Path(__file__).with_name(name)
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The ids of three requests, by an engine in this process."""
    return answer_three({})


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ids_are_those_of_one_process(way, alone):
    assert [len(ids) > 3 for ids in alone] == [True] * 3
    assert run_script("answer_three.py", json.dumps(WAYS[way])) == alone


@pytest.mark.slow
def test_a_core_that_is_killed_ends_its_requests_and_the_engine():
    assert run_script("answer_after_kill.py") == {
        "failed": "EngineStoppedError",
        "ids": 3,
        "then": "EngineStoppedError",
    }
