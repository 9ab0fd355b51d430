"""Requests on vLLM emit the ids that they emit on MLX, whatever vLLM's scheduler does with them meanwhile."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("vllm")

from mlx_zip.engine.interface import Submission
from mlx_zip.packs.pack import Pack
from mlx_zip.vllm.state import Zip2ZipState
from support.on_vllm import answer_all, dequantized, open_on_vllm, record, worker_state

# 200 were once compared in each way (docs/guides/vllm.md)
REQUESTS = int(os.environ.get("MLX_ZIP_VLLM_REQUESTS", "11"))
BEGINNINGS = (
    "Once upon a time there was a little",
    "Lily and Tom went to the park. They",
    "One day, a big dog saw a small",
    "The little girl had a red ball. She",
    'Mom said, "It is time to go to bed."',
    "Tim liked to play with his toy car.",
)
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "steps scheduled ahead": {"async_scheduling": True},
    "prompts in chunks of 16 ids, at most 4 at a time": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "no prefix cache, no chunks": {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    "blocks for four sequences, so that others are preempted": {"num_gpu_blocks_override": 9, "max_model_len": 256},
}


def submissions(tokenizer: Any, count: int) -> list[Submission]:
    """Requests with prompts of many lengths; half of them begin alike, for several blocks. Every fourth has a pack."""
    rng = random.Random(0)
    common, made = " ".join(BEGINNINGS * 3), []
    for number in range(count):
        text = " ".join(rng.choice(BEGINNINGS) for _ in range(rng.randint(1, 5)))
        ids = tokenizer.encode(f"{common} {text}" if number % 4 < 2 else text)
        pack = Pack(tuple(dict.fromkeys(pairwise(ids[2:12])))) if number % 4 == 3 else None
        made.append(Submission(ids, rng.randint(8, 24), pack=pack, top_logprobs=1))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return dequantized("stories", tmp_path_factory.mktemp("stories") / "stories")


@pytest.fixture(scope="module")
def on_mlx(folder):
    from mlx_zip.engine.mlx.mlx_engine import open_engine

    with open_engine(str(folder)) as engine:
        asked = submissions(engine.tokenizer, REQUESTS)
        return asked, [answer_all(engine, [one], 1)[0] for one in asked]


@pytest.fixture
def came(monkeypatch):
    """What the worker was told of each request: ids chosen before it came (back), and ids computed before."""
    found, real = [], Zip2ZipState.add_request

    def noted(self, index, data):
        found.append((len(data.prefill_token_ids) - data.prompt_len, data.num_computed_tokens))
        return real(self, index, data)

    monkeypatch.setattr(Zip2ZipState, "add_request", noted)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_ids_and_log_probabilities_are_those_of_mlx(folder, on_mlx, way, came):
    asked, expected = on_mlx
    cancelled, left = range(5, len(asked), 5), 0
    with open_on_vllm(folder, vllm_args=WAYS[way]) as engine:
        for concurrency in (1, 16) if way == "as it is" else (16,):
            watches = answer_all(engine, asked, concurrency, cancelled)
            for index, (ours, theirs) in enumerate(zip(watches, expected, strict=True)):
                if index in cancelled:
                    assert ours.ids == theirs.ids[: len(ours.ids)]
                    left += 0 < len(ours.ids) < len(theirs.ids)
                    continue
                assert (ours.ids, ours.base_ids, ours.end.reason) == (theirs.ids, theirs.base_ids, theirs.end.reason)
                likely = [[event.logprob for event in watch.emitted] for watch in (ours, theirs)]
                np.testing.assert_allclose(*likely, atol=1e-3)
        answer_all(engine, asked[:1])  # vLLM tells a worker of ended requests with the next step only
        assert len(worker_state(engine).requests) <= 1
    assert left
    assert any(chosen for chosen, _ in came) == ("preempted" in way)
    assert any(computed for _, computed in came) == ("no prefix cache" not in way)
    record("ids are MLX's, log-probabilities within 1e-3", way=way, requests=len(asked), cancelled=len(cancelled))
