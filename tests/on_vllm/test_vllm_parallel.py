"""Two processes that share a model, and vLLM's core in a process of its own, give the ids that MLX gives."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("vllm")

from mlx_zip.engine.interface import Engine, Failed, Submission
from mlx_zip.errors import EngineStoppedError
from support.on_vllm import TEXTS, answer_all, dequantized, open_on_vllm
from support.serving import Watch

WAYS = {"tensor parallel": {"tensor_parallel_size": 2}, "pipeline parallel": {"pipeline_parallel_size": 2}}


@pytest.fixture(autouse=True)
def core_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has vLLM start its core, and the core its workers, in processes of their own, as it does for its users."""
    from vllm import envs

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    envs.disable_envs_cache()  # an engine that was opened in this process before may have filled it
    yield
    envs.disable_envs_cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dequantized("stories", tmp_path_factory.mktemp("stories") / "stories")


@pytest.fixture(scope="module")
def on_mlx(folder: Path) -> list[list[int]]:
    """The ids of three requests on MLX, which one process on vLLM gives too (`test_vllm_answers.py`)."""
    from mlx_zip.engine.mlx.mlx_engine import open_engine

    with open_engine(str(folder)) as engine:
        return ids_of_three(engine)


def ids_of_three(engine: Engine) -> list[list[int]]:
    asked = [Submission(engine.tokenizer.encode(text), 10) for text in TEXTS]
    return [watch.ids for watch in answer_all(engine, asked)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ids_are_those_of_mlx(folder, way, on_mlx):
    assert [len(ids) > 3 for ids in on_mlx] == [True] * 3
    with open_on_vllm(folder, 4, WAYS[way]) as engine:
        assert ids_of_three(engine) == on_mlx
        assert multiprocessing.active_children()


class Killing(Watch):
    """Receives the events of a request and kills the other processes after its third id."""

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if len(self.emitted) == 3:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_core_that_is_killed_ends_its_requests_and_the_engine():
    with open_on_vllm("stories", 2) as engine:
        prompt = engine.tokenizer.encode("Once upon a time")
        answer_all(engine, [Submission(prompt, 2)])
        watch = Killing()
        engine.submit(Submission(prompt, 300), watch)
        watch.wait()
        assert isinstance(watch.end, Failed)
        assert isinstance(watch.end.error, EngineStoppedError)
        assert len(watch.ids) == 3
        with pytest.raises(EngineStoppedError):
            engine.submit(Submission(prompt, 2), Watch())
