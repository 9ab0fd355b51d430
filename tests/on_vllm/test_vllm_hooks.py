"""The command that times our hooks on vLLM runs a whole engine, and leaves its classes as they were."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from mlx_zip.bench.steps.vllm_hooks import HOOKS, PRODUCTS, measure_hooks
from mlx_zip.vllm.state import Zip2ZipState
from support.on_vllm import CPU_ARGS


def test_steps_of_one_id_are_timed_hook_by_hook(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    before = {name: getattr(Zip2ZipState, name) for name in HOOKS}
    records = measure_hooks("stories", CPU_ARGS, tokens=5, rounds=1)
    assert {one["requests"] for one in records} == {1, 16}
    for one in records:
        assert one["rows"] in ("warm", "cold")
        assert one["hooks"].keys() == {*HOOKS, PRODUCTS}
        assert one["us"]["min"] > one["us_without_products"]["min"] > 0
        assert one["us"]["samples"]
    assert {name: getattr(Zip2ZipState, name) for name in HOOKS} == before
