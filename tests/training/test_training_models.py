"""What a run trains, what it leaves alone, and the folder it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import ConfigError, load
from mlx_zip.layout import has_hypertokens
from mlx_zip.training.run import train
from support.checkpoints import edit_json, write_json
from support.slow_cases import slow_but
from support.tiny_training import (
    PLAIN,
    losses,
    options,
    saved_config,
    settings,
    text_ids,
)
from support.trained import assert_saved_as_trained, scratch


@pytest.mark.parametrize("kind", slow_but(["lora", "full", "encoders"], "lora", "full"))
def test_a_plain_model_becomes_zip_capable_and_its_folder_gives_what_was_trained(kind, tmp_path, in_memory):
    run = options(tmp_path / "run")
    train(run, settings(fine_tune_type=kind, lora_dropout=0.1 if kind == "lora" else 0.0), quiet=True)
    assert_trained_only_what_was_asked(kind, tmp_path / "plain", in_memory["weights"])
    assert_saved_as_trained(run.out, in_memory)
    assert losses(run.out)[-1][1] < losses(run.out)[0][1]
    config = saved_config(run.out / "model")
    assert config["model_type"] == "zip2zip"
    assert config["zip2zip"]["base_model_type"] == "llama"
    assert config["zip2zip"]["source"]["settings"]["fine_tune_type"] == kind


def assert_trained_only_what_was_asked(kind: str, plain: Path, weights: dict[str, np.ndarray]) -> None:
    """Full training moves every weight of the base; what is frozen stays as it was bit by bit."""
    base: Any = mx.load(str(plain / "model.safetensors"))
    trained = {name.replace(".linear.", "."): value for name, value in weights.items()}
    assert base
    for name, value in base.items():
        assert (trained[name] == np.array(value)).all() == (kind != "full"), name
    adapters = [value for name, value in trained.items() if name.endswith("lora_b")]
    assert bool(adapters) == (kind == "lora")
    assert all(np.abs(value).max() > 0 for value in adapters)


@pytest.mark.parametrize("layers", [1, -1])
def test_lora_goes_into_as_many_of_the_last_blocks_as_asked(layers, tmp_path, in_memory):
    run = options(tmp_path / "run")
    train(run, settings(lora_layers=layers, iters=1), quiet=True)
    adapted = {name.split(".")[2] for name in in_memory["weights"] if name.endswith("lora_a")}
    assert adapted == ({"1"} if layers == 1 else {"0", "1"})


@pytest.mark.slow
def test_a_trained_model_can_be_trained_further(tmp_path, in_memory):
    run = options(tmp_path / "run")
    train(run, settings(), quiet=True)
    before = in_memory["logits"]
    again = options(tmp_path / "again", model=str(run.out / "model"))
    train(again, settings(learning_rate=1e-9, min_learning_rate=0.0), quiet=True)
    assert_saved_as_trained(again.out, in_memory)
    np.testing.assert_allclose(in_memory["logits"], before, atol=1e-3)


def test_a_zip_model_from_scratch_learns_and_loads(tmp_path, in_memory):
    run = scratch(tmp_path)
    train(run, settings(fine_tune_type="full", optimizer="muon", iters=7), quiet=True)
    assert losses(run.out)[-1][1] < losses(run.out)[0][1]
    assert_saved_as_trained(run.out, in_memory)


def test_a_plain_model_from_scratch_learns_and_loads(tmp_path, in_memory):
    run = scratch(tmp_path, codec=PLAIN)
    train(run, settings(fine_tune_type="full", iters=7), quiet=True)
    assert losses(run.out)[-1][1] < losses(run.out)[0][1]
    model, _ = load(run.out / "model")
    assert not has_hypertokens(model)
    ids = mx.array([text_ids(20, 1)])
    np.testing.assert_allclose(np.array(model(ids)), np.array(in_memory["model"](ids)), atol=2e-5)


def test_a_new_plain_model_has_the_rope_settings_of_its_config_as_when_it_is_loaded(tmp_path, in_memory):
    run = scratch(tmp_path, codec=PLAIN)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    edit_json(tmp_path / "new.json", rope_theta=None, rope_parameters=rope)
    train(run, settings(fine_tune_type="full", iters=1), quiet=True)
    ids = mx.array([text_ids(40, 1)])
    found, expected = (np.array(model(ids)) for model in (load(run.out / "model")[0], in_memory["model"]))
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(("key", "value"), [("model_type", None), ("hidden_size", None), ("hidden_size", "wide")])
def test_a_new_models_config_that_lacks_what_is_needed_is_refused_by_name(key, value, tmp_path):
    run = scratch(tmp_path)
    edit_json(tmp_path / "new.json", **{key: value})
    with pytest.raises(ConfigError, match=key):
        train(run, settings(fine_tune_type="full"), quiet=True)
    assert not run.out.exists()


def test_saved_types_are_as_asked_and_further_ends_of_text_are_kept(tmp_path):
    run = options(tmp_path / "run", save_dtype="bfloat16")
    write_json(tmp_path / "plain" / "generation_config.json", {"eos_token_id": [1, 9]})
    edit_json(tmp_path / "plain" / "config.json", dtype="float32", auto_map={"AutoModel": "x"})
    train(run, settings(iters=1), quiet=True)
    saved: Any = mx.load(str(run.out / "model" / "model.safetensors"))
    assert {value.dtype for value in saved.values()} == {mx.bfloat16}
    config = saved_config(run.out / "model")
    assert config["torch_dtype"] == "bfloat16"
    assert config.keys().isdisjoint({"dtype", "auto_map"})
    assert load(run.out / "model")[1].eos_token_ids == {1, 9}
