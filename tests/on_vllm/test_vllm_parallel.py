"""Two processes that share a model, and vLLM's core in a process of its own, give the ids that one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

WAYS = {"tensor parallel": {"tensor_parallel_size": 2}, "pipeline parallel": {"pipeline_parallel_size": 2}}
TESTS = Path(__file__).parents[1]


def answers(**args: int) -> list[list[int]]:
    """Returns the ids of three requests, from a process that has vLLM's core in another one."""
    script = Path(__file__).with_name("answer_three.py")
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(args)], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return answers()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ids_are_those_of_one_process(way, alone):
    assert [len(ids) > 3 for ids in alone] == [True] * 3
    assert answers(**WAYS[way]) == alone
