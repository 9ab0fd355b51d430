"""Converted GGUF files against transformers, run live on random weights: its own GGUF reader, and its decoders.

Source of the expected numbers: transformers 5, eager attention, float32. Its reader takes no rotary scaling, soft caps,
biases or windows from a file; those cases are compared with a decoder that is given the weights and settings that the
file was made of.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity with transformers needs torch")
pytest.importorskip("accelerate", reason="transformers' GGUF reader needs accelerate")
pytest.importorskip("gguf", reason="transformers' GGUF reader needs gguf")

import mlx.core as mx
import torch
from mlx_lm.utils import load_model

from support import gguf_files as files
from support import gguf_vocabularies as vocabularies
from support.converting import convert, loaded
from support.gguf_files import TYPES, tiny
from support.slow_cases import slow_but

TOLERANCE = 1e-3
READABLE: dict[str, dict[str, Any]] = {  # sizes that transformers' reader assumes, because it does not take them
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "phi3": {},
    "gemma2": {"head_dim": 256},
    "gemma3": {"head_dim": 256},
}
DETAILS: dict[str, dict[str, Any]] = {
    "llama tied with biases": {"tied": True, "bias": True},
    "llama wide heads": {"head_dim": 32},
    "llama llama3": {"rope": "llama3", "head_dim": 32},
    "llama linear": {"rope": "linear"},
    "llama yarn": {"rope": "yarn"},
    "llama window": {"window": 12},
    "qwen2 tied": {"tied": True},
    "qwen2 yarn": {"rope": "yarn"},
    "qwen3 wide heads": {"head_dim": 32},
    "phi3 longrope": {"rope": "longrope"},
    "phi3 partial": {"rope": "longrope", "partial": 0.5},
    "phi3 window": {"window": 12},
    "gemma": {"head_dim": 32},
    "gemma2 narrow heads": {"head_dim": 32},
    "gemma3 linear": {"head_dim": 32, "rope": "linear"},
}


def written(path: Path, architecture: str, kind: str = "F32", **changes: Any) -> files.Tiny:
    tokenizer = vocabularies.byte_level("qwen2" if architecture.startswith("qwen") else "gpt-2")
    model = tiny(architecture, vocab=len(tokenizer["tokenizer.ggml.tokens"]), **changes)
    files.save(path, model, tokenizer, kind)
    return model


def prompt(model: files.Tiny) -> list[int]:
    """Ids beyond every window, and of one length with the context that LongRoPE's short factors hold for."""
    length = 28 if "original_max_position_embeddings" in model.config else 60
    return np.random.default_rng(1).integers(0, model.config["vocab_size"], length).tolist()


def torch_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].numpy()


def by_reader(file: Path, ids: list[int]) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    options: Any = {"gguf_file": file.name, "dtype": torch.float32, "attn_implementation": "eager"}
    return torch_logits(AutoModelForCausalLM.from_pretrained(file.parent, **options), ids)


def by_decoder(model: files.Tiny, ids: list[int]) -> np.ndarray:
    """Logits of transformers' decoder, given the weights and the settings that a file is made of."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(model.config)
    if config["model_type"] == "llama" and "sliding_window" in config:
        config["model_type"] = "mistral"
    if config["model_type"] == "gemma3_text" and "rope_scaling" in config:  # the scaling is of full attention alone
        full = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").float()
    left = made.load_state_dict({name: torch.tensor(array) for name, array in model.state.items()}, strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"lm_head.weight"}
    made.tie_weights()
    return torch_logits(made, ids)


def our_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits of our decoder for a plain model's folder, as the base of a zip2zip model without hyper-encoders."""
    config = json.loads((folder / "config.json").read_text())
    rows = config["vocab_size"]
    section = {
        "base_model_type": config["model_type"],
        "position_mode": "compressed",
        "encoder_type": "averaging",
        "encoder": {"hidden_size": config["hidden_size"]},
        "compression": {
            "initial_vocab_size": rows,
            "max_codebook_size": 8,
            "max_subtokens": 2,
            "disabled_ids": list(range(rows)),
        },
        "pad_token_id": 0,
    }
    zipped = folder.with_name(f"{folder.name}-zip")
    shutil.copytree(folder, zipped)
    (zipped / "config.json").write_text(json.dumps({**config, "model_type": "zip2zip", "zip2zip": section}))
    model: Any = load_model(zipped)[0]
    return np.array(model(mx.array([ids]), cache=model.make_cache())[0])[:, :rows]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(expected).max() > 0.5  # else anything would be close
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("architecture", READABLE)
def test_logits_of_each_family_equal_those_of_transformers_reader(tmp_path, architecture):
    model = written(tmp_path / "model.gguf", architecture, **READABLE[architecture])
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    assert_close(our_logits(out, prompt(model)), by_reader(tmp_path / "model.gguf", prompt(model)))


@pytest.mark.parametrize("kind", slow_but(TYPES, "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"))
def test_logits_of_each_tensor_type_equal_those_of_transformers_reader(tmp_path, kind):
    model = written(tmp_path / "model.gguf", "llama", kind, width=256)
    out = convert(tmp_path / "model.gguf", tmp_path / "out", dtype="float32")
    expected = by_reader(tmp_path / "model.gguf", prompt(model))
    assert_close(our_logits(out, prompt(model)), expected)
    assert_close(np.array(loaded(out)[0](mx.array([prompt(model)]))[0]), expected)  # mlx-lm's own decoder


@pytest.mark.parametrize("name", DETAILS)
def test_logits_follow_the_settings_in_a_file(tmp_path, name):
    model = written(tmp_path / "model.gguf", name.split()[0], **DETAILS[name])
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    assert_close(our_logits(out, prompt(model)), by_decoder(model, prompt(model)))


@pytest.mark.parametrize("architecture", slow_but(sorted(READABLE.keys() - {"llama"}), "gemma3", "phi3"))
def test_logits_of_packed_files_of_each_family_equal_those_of_transformers_reader(tmp_path, architecture):
    model = written(tmp_path / "model.gguf", architecture, "Q4_1", **READABLE[architecture])
    out = convert(tmp_path / "model.gguf", tmp_path / "out", dtype="float32")
    assert_close(our_logits(out, prompt(model)), by_reader(tmp_path / "model.gguf", prompt(model)))
