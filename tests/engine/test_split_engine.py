"""An engine on two machines answers as an engine on one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_zip.engine.mlx_engine import open_engine
from support import tiny
from support.several_machines import answered, serve_on, write_model

pytestmark = pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="MLX has no ring backend here")

TALK = tiny.base_ids(40, 5)
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


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("plain", [False, True])
def test_requests_on_two_machines_get_what_they_get_on_one(family, plain, tmp_path):
    folder = write_model(tmp_path / "model", family, plain=plain)
    with open_engine(folder) as engine:
        alone = answered(engine, REQUESTS)
    found = serve_on(2, tmp_path / "two", folder, REQUESTS)
    assert found == alone
    assert found[-1][2] >= len(TALK) - 4  # base tokens that were not read again


def test_requests_that_fail_or_are_cancelled_end_on_both_machines_and_the_next_is_answered(tmp_path):
    folder = write_model(tmp_path / "model", "llama")
    with open_engine(folder) as engine:
        (alone,) = answered(engine, FAILING[-1:])
    broken, empty, cancelled, last = serve_on(2, tmp_path / "two", folder, FAILING)
    assert "the constraint is broken" in broken[1]
    assert "allows no token" in empty[1]
    assert cancelled[1] == "cancelled"
    assert last == alone
