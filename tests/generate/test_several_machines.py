"""A model split over two processes, on MLX's ring over loopback, writes the ids of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.several_machines import generated_ids, ids_on, write_model

GREEDY: dict[str, Any] = {"max_tokens": 48}
SAMPLED: dict[str, Any] = {"max_tokens": 48, "temp": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral"},
    "by base tokens": {"family": "llama", "position_mode": "base_token_end"},
    "quantized": {"family": "llama", "quantized": True},
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[dict[str, Any]]]]:
    home = tmp_path_factory.mktemp("models")
    return [(write_model(home / name, **options), [GREEDY, SAMPLED]) for name, options in MODELS.items()]


@pytest.fixture(scope="module")
def found(jobs, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ids_on(2, tmp_path_factory.mktemp("two"), jobs)


@pytest.mark.parametrize("name", MODELS)
def test_two_machines_write_the_ids_of_one(name, jobs, found):
    index = list(MODELS).index(name)
    alone = generated_ids(*jobs[index])
    assert max(max(ids) for ids in alone) >= 40  # hypertokens are among them
    assert found[0][index] == found[1][index] == alone
