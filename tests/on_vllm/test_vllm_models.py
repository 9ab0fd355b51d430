"""Models of each architecture that we run on vLLM choose the ids that they choose on MLX."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("vllm")

import mlx.core as mx
from mlx_lm.models import llama

from mlx_zip import load, stream_generate
from mlx_zip.converters import convert
from mlx_zip.converters.export import export
from mlx_zip.engine.interface import Submission
from mlx_zip.errors import ConfigError
from mlx_zip.named import resolve_model_name
from mlx_zip.vllm.config import Zip2ZipConfig, config_of_export
from mlx_zip.vllm.engine import load_on_vllm
from mlx_zip.vllm.model import Zip2ZipForCausalLM
from support import tiny
from support.on_vllm import answer_all, open_on_vllm
from support.serving import ENDLESS
from support.torch_folders import save, save_weights

SMALL = {"initial_vocab_size": tiny.VOCAB, "max_codebook_size": 6, "max_subtokens": 4, "disabled_ids": [0, 1, 2]}
# no averaging encoder: an entry of one repeated id has that id's row there, and which of two equal logits wins is open
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one encoder": ("llama", {"encoder": "res_latent_attn", "tie_encoders": True}),
    "mistral, entries evicted": ("mistral", {"encoder": "transformer", "compression": {**SMALL, "policy": "lru"}}),
    "phi3, positions of base tokens": ("phi3", {"encoder": "res_latent_attn", "position_mode": "base_token_end"}),
    "qwen2, start entries": ("qwen2", {"encoder": "attention", "compression": SMALL, "start": [[5, 6], [7, 8, 9]]}),
    "qwen3, canonical": ("qwen3", {"encoder": "attention", "canonical": True}),
}


def made_config(case: str) -> dict[str, Any]:
    """Returns the config of a case, whose heads are as wide as vLLM's attention on a CPU wants them."""
    family, changes = CASES[case]
    changes = dict(changes)
    config = tiny.tiny_config(family, changes.pop("encoder"), hidden=256, **changes)
    config["torch_dtype"] = "float32"  # else vLLM looks into the file, which MLX writes without metadata
    if family == "phi3":  # its heads are 128 wide, and so are its factors
        del config["rope_scaling"]
    else:
        config["head_dim"] = 64
    return config


def test_the_ids_that_the_model_s_settings_name_end_a_text_too(tmp_path, monkeypatch):
    shutil.copytree(resolve_model_name("stories"), folder := tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    monkeypatch.setattr("mlx_zip.vllm.engine.LLMEngine", SimpleNamespace(from_engine_args=lambda args: None))
    monkeypatch.setattr("mlx_zip.vllm.engine.VllmServed", lambda llm, tokenizer, *others: tokenizer)
    assert load_on_vllm(str(folder), {"trust_remote_code": False}, None, {}, None).eos_token_ids > {7, 9}


@pytest.mark.parametrize("case", CASES)
def test_a_model_chooses_the_ids_that_it_chooses_on_mlx(case, tmp_path, monkeypatch):
    model = tiny.random_model(made_config(case), 0, 0.1)
    monkeypatch.setattr("mlx_zip.vllm.engine.load_model_tokenizer", lambda *given, **options: ENDLESS)
    prompts = [tiny.base_ids(length, seed) for seed, length in enumerate((3, 20, 45))]
    expected = [list(stream_generate(model, ENDLESS, prompt, 10)) for prompt in prompts]
    with open_on_vllm(save(model, tmp_path / "m"), 4, {"max_num_batched_tokens": 32}) as engine:
        watches = answer_all(engine, [Submission(prompt, 10, top_logprobs=0) for prompt in prompts])
        for watch, responses in zip(watches, expected, strict=True):
            assert watch.ids == [one.token for one in responses]
            likely = [float(one.logprobs[one.token]) for one in responses]
            np.testing.assert_allclose([event.logprob for event in watch.emitted], likely, atol=1e-3)
        assert any(one >= tiny.VOCAB for watch in watches for one in watch.ids)


def test_a_plain_model_answers_as_on_mlx_and_its_chat_goes_on(tmp_path, monkeypatch):
    config = {**made_config("llama, one encoder"), "model_type": "llama", "vocab_size": 40}
    del config["zip2zip"]
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    monkeypatch.setattr("mlx_zip.vllm.engine.load_model_tokenizer", lambda *given, **options: ENDLESS)
    prompt = [one % 40 for one in tiny.base_ids(20)]
    expected = [one.token for one in stream_generate(model, ENDLESS, prompt, 10)]
    with open_on_vllm(save_weights(model, tmp_path / "m", config), 4) as engine:
        [first] = answer_all(engine, [Submission(prompt, 10)])
        assert (first.ids, first.base_ids) == (expected, expected)
        [second] = answer_all(engine, [Submission([*prompt, *expected, 7], 5)])
        assert second.events[0].cached_tokens == len(prompt) + len(expected) - 1
        assert len(second.ids) == 5
        [session] = engine.sessions()
        assert (session.base_tokens, session.ids) == (35, 35)


def test_an_exported_checkpoint_is_read_as_it_is(tmp_path):
    exported = export("stories", tmp_path / "export", dtype="float32", drop_start=True, progress=False)
    model, tokenizer = load(str(convert(str(exported), tmp_path / "converted", progress=False)))
    prompt = tokenizer.encode("Once upon a time there was a little girl. The little girl had a")
    expected = [one.token for one in stream_generate(model, ENDLESS, prompt, 12)]
    with open_on_vllm(exported, 2) as engine:
        assert answer_all(engine, [Submission(prompt, 12)])[0].ids == expected
        assert engine.info.codebook_size == model.config.codebook_size


def test_folders_that_hold_no_decoder_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "zip2zip_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not hold its decoder; convert it first"):
        config_of_export(tmp_path)
    (tmp_path / "zip2zip_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"zip2zip_config\.json cannot be read"):
        config_of_export(tmp_path)
    assert config_of_export(tmp_path / "nowhere") is None


@pytest.mark.parametrize("changes", [{"zip2zip": [1]}, {"vocab_size": None}])
def test_a_damaged_config_is_refused(changes):
    with pytest.raises(ConfigError, match=r"config\.json: its zip2zip section must be an object, and vocab_size an"):
        Zip2ZipConfig(**{**tiny.tiny_config("llama"), **changes})


def test_a_decoder_that_is_none_of_ours_is_refused():
    config = tiny.tiny_config("llama")
    config["zip2zip"] = {**config["zip2zip"], "base_model_type": "gpt2"}
    with pytest.raises(ConfigError, match="base_model_type 'gpt2' is not supported on vLLM; supported: llama, mistral"):
        Zip2ZipConfig(**config)


USUAL: dict[str, Any] = {
    "use_v2_model_runner": True,
    "lora_config": None,
    "speculative_config": None,
    "quant_config": None,
}
REFUSED = {
    "first model runner": {"use_v2_model_runner": False},
    "LoRA": {"lora_config": object()},
    "speculative decoding": {"speculative_config": object()},
    "its own quantizations": {"quant_config": object()},
}


@pytest.mark.parametrize("what", REFUSED)
def test_options_of_vllm_that_do_not_go_with_hypertokens_are_refused_at_the_start(what):
    parallel = SimpleNamespace(
        enable_batch_sharded_sampling=False, prefill_context_parallel_size=1, decode_context_parallel_size=1
    )
    common = {
        "model_config": SimpleNamespace(enable_prompt_embeds=False),
        "parallel_config": parallel,
        "load_config": SimpleNamespace(load_format="auto"),
    }
    with pytest.raises(ConfigError, match=what):
        Zip2ZipForCausalLM(vllm_config=SimpleNamespace(**common, **{**USUAL, **REFUSED[what]}))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"max_model_len": 1_000_000}, "max_model_len"),
        ({"nonsense": 1}, "nonsense"),
        ({"block_size": "x"}, "block_size"),
    ],
)
def test_arguments_that_vllm_does_not_take_are_refused_in_one_line(args, told):
    with pytest.raises(ConfigError, match=r"^vLLM's arguments: ") as refused:
        open_on_vllm("stories", vllm_args=args)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
