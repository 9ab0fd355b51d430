"""The engines on vLLM in `bench generate`: what they refuse, and how a run is counted, with a vLLM that is played."""

from __future__ import annotations

import sys
import types
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_zip.bench.__main__ import main
from mlx_zip.bench.engines import choice
from mlx_zip.engine.interface import Counts, Emitted, Failed, Finished, Started
from mlx_zip.errors import GenerationError, InstallationError, MlxZipError
from mlx_zip.text.tokenizers import load_tokenizer

MODULE = "mlx_zip.bench.engines.vllm_engines"


def refusal(capsys, *flags):
    """The one line with which `bench generate` refuses flags, on a machine that has vLLM."""
    assert main(["generate", "--model", "stories", *flags]) == 2
    return capsys.readouterr().err


def test_without_vllm_its_engines_name_it(monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(InstallationError, match="engine vllm-zip needs vllm, which is not installed"):
        choice.check_engine_names(["vllm-zip"])


def test_they_replay_no_text_and_drop_no_rows(monkeypatch, capsys):
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    assert "vllm-base emits the ids that vLLM chooses" in refusal(capsys, "--engines", "vllm-base")
    cold = ("--engines", "vllm-zip", "--mode", "free", "--rows", "cold")
    assert "vllm-zip keeps its rows in vLLM's workers" in refusal(capsys, *cold)


@pytest.mark.parametrize(
    ("given", "expected"), [("{", "--vllm-args is not valid JSON"), ("3", "--vllm-args must be a JSON map")]
)
def test_arguments_of_vllm_are_a_json_map(capsys, given, expected):
    assert expected in refusal(capsys, "--vllm-args", given)


def test_they_do_without_mlx():
    assert not choice.engines_need_mlx(["vllm-zip", "vllm-base", "torch-zip"])


# ---- a run


class PlayedEngine:
    """An engine that gives the same events to every request, and notes what it is asked."""

    def __init__(self, events, tokenizer):
        self.events, self.tokenizer, self.asked = events, tokenizer, []
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "decoder_config": lambda: "plain"}
        config = SimpleNamespace(
            dtype=sys.modules["torch"].float32,
            hf_config=SimpleNamespace(**sizes),
            get_total_num_kv_heads=lambda: 2,
            get_head_size=lambda: 4,
        )
        self._llm = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=config, device_config=SimpleNamespace(device_type="cpu")),
        )

    def purge_sessions(self):
        self.asked.append("forget")

    def sessions(self):
        return [SimpleNamespace(ids=11)]

    def submit(self, submission, deliver):
        self.asked.append(submission.base_ids)
        for event in self.events:
            deliver(event)


@pytest.fixture
def bench_engine(monkeypatch):
    """Makes the bench's engine `vllm-zip` over a played one. events: of every request."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    played_vllm: Any = types.ModuleType("mlx_zip.vllm.engine")
    played_vllm.open_vllm_engine = None
    for name, module in (("mlx_zip.vllm.engine", played_vllm), (MODULE, None)):
        monkeypatch.setitem(sys.modules, name, module)  # both are gone after the test
    del sys.modules[MODULE]
    engines = import_module(MODULE)

    def make(*events, name="vllm-zip", **folders):
        played = PlayedEngine(events, load_tokenizer("stories"))
        monkeypatch.setattr(engines, "open_vllm_engine", lambda folder, **options: played)
        monkeypatch.setattr(engines, "_step_weight_bytes", lambda config, dtype: 1234)
        models = SimpleNamespace(**{"zip_folder": "some", "folder": None, **folders})
        return engines.VllmBenchEngine(name, models, {}), played

    return make


EVENTS = (Started(4, 0, 3), Emitted(2050, (300, 301)), Emitted(302, (302,)), Finished("length", Counts(entries=5)))


def test_a_run_counts_steps_rows_and_what_the_cache_holds(bench_engine):
    engine, _ = bench_engine(*EVENTS)
    run = engine.run([5, 6, 7, 8], 3)
    assert (run.prompt_ids, run.ids, run.base_ids, run.first_base) == (3, [[2050], [302]], [300, 301, 302], 2)
    assert (run.kv_ids, run.row_bytes) == (11, 5 * 8 * 4)
    assert (engine.weight_bytes, engine.kv_bytes, engine.kv_dtype) == (1234, 2 * 2 * 2 * 4 * 4, "float32")
    assert run.text_bytes == len(engine.tokenizer.decode([300, 301, 302]).encode())
    assert run.times == sorted(run.times)


def test_a_request_of_its_own_begins_without_cached_prompts_and_a_conversation_goes_on(bench_engine):
    engine, played = bench_engine(*EVENTS)
    engine.run([5], 3)
    engine.run([5], 3)
    assert played.asked == ["forget", [5], "forget", [5]]
    played.asked.clear()
    held = engine.start_conversation()
    engine.run([5], 3, None, held)
    engine.run([6], 3, None, held)
    assert played.asked == ["forget", [5], [5, 300, 301, 302, 6]]


def test_a_failed_request_ends_the_bench(bench_engine):
    engine, _ = bench_engine(Started(4, 0, 3), Failed(GenerationError("no")))
    with pytest.raises(GenerationError, match="no"):
        engine.run([5], 3)


def test_a_model_that_is_not_named_is_asked_for(bench_engine):
    with pytest.raises(MlxZipError, match="vllm-base needs a model as a folder: --base"):
        bench_engine(*EVENTS, name="vllm-base")
    with pytest.raises(MlxZipError, match="vllm-zip needs a model as a folder: --model"):
        bench_engine(*EVENTS, zip_folder=None)
