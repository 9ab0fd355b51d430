"""`load`: what it opens, and how it refuses the rest."""

import json
import os
import shutil

import pytest

from mlx_zip.engine.mlx.generate import load
from mlx_zip.errors import ConfigError, ModelError
from mlx_zip.models.loading import rope_settings_for_mlx_lm
from support import tiny_text
from support.places import GOLDEN_MODELS

ZIP = "llama_transformer_tied_lora"


@pytest.fixture
def model(tmp_path):
    """A converted model folder of one's own."""
    return shutil.copytree(tiny_text.converted(ZIP), tmp_path / "model")


def change(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_converted_folder_gives_a_zip_model_and_its_tokenizer(model):
    loaded, tokenizer = load(str(model))
    assert (loaded.layout.vocab_size, len(tokenizer)) == (512, 512)


def test_a_plain_mlx_lm_model_is_loaded_as_it_is():
    loaded, _ = load(GOLDEN_MODELS / ZIP / "base")
    assert type(loaded).__module__ == "mlx_lm.models.llama"


def test_loading_a_zip_model_prints_no_warnings(model, capfd, recwarn):
    load(model)
    assert (capfd.readouterr().err, [w for w in recwarn if w.category is FutureWarning]) == ("", [])


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "nothing", "a/b/c"])
def test_a_path_that_does_not_exist_is_named(name):
    with pytest.raises(ModelError, match=f"{name}: no such model folder"):
        load(name)


def test_a_hub_id_that_cannot_be_reached_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="nobody/nothing is not a local folder"):
        load("nobody/nothing")


def test_a_name_too_long_for_a_file_is_no_model():
    with pytest.raises(ModelError, match="no such model folder"):
        load("x" * 5000)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "null"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(file, text, model):
    (model / file).write_text(text)
    with pytest.raises(ModelError, match="cannot"):
        load(model)


@pytest.mark.parametrize("value", [{"head_dim": ""}, {"hidden_size": 0}, {"vocab_size": -1}])
def test_a_plain_models_config_value_that_cannot_be_is_refused(value, tmp_path):
    folder = shutil.copytree(GOLDEN_MODELS / ZIP / "base", tmp_path / "plain")
    change(folder, **value)
    with pytest.raises(ModelError, match="cannot load"):
        load(folder)


def test_a_folder_without_config_is_no_model_folder(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_a_checkpoint_as_published_is_to_be_converted_first():
    with pytest.raises(ModelError, match="convert it first: mlx_zip convert --hf-path"):
        load(GOLDEN_MODELS / ZIP)


def test_a_self_contained_checkpoint_as_published_is_to_be_converted_first():
    with pytest.raises(ModelError, match="convert it first"):
        load(GOLDEN_MODELS / "phi3_reslatent_mean_untied_v2")


def test_a_pipe_in_place_of_the_config_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json: is a folder or device, not a file"):
        load(str(tmp_path))


def test_a_config_that_is_not_json_is_named(model):
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load(model)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"\xff" * 64])
def test_damaged_weights_are_an_error_that_names_the_folder(model, damage):
    file = next(model.glob("model*.safetensors"))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"cannot load .*model"):
        load(model)


def test_a_tokenizer_file_of_another_kind_is_an_error_that_names_what_it_lacks(model):
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="key 'added_tokens' is missing"):
        load(model)


def test_missing_weights_are_an_error_that_names_the_folder(model):
    for file in model.glob("model*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match="No safetensors found"):
        load(model)


def test_an_architecture_mlx_lm_does_not_know_is_named(model):
    change(model, model_type="nonesuch")
    with pytest.raises(ModelError, match="nonesuch"):
        load(model)


def test_a_tokenizer_with_more_ids_than_the_boundary_is_refused(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    extra = {"content": "<|more|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append({"id": 512, "normalized": False, **extra})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="hypertokens begin at 512"):
        load(model)


# ---- rope_parameters, which mlx-lm's classes ignore

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_theta_is_taken_out_of_rope_parameters():
    config = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert rope_settings_for_mlx_lm(config) == {"rope_theta": 5e5}


def test_scaling_is_taken_out_of_rope_parameters():
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    config = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **scaling}}
    assert rope_settings_for_mlx_lm(config) == {"rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}


def test_longrope_and_its_original_context_are_taken_out_of_rope_parameters():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0],
        "long_factor": [2.0],
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
    }
    filled = rope_settings_for_mlx_lm({"model_type": "phi3", "rope_parameters": rope})
    assert (filled["original_max_position_embeddings"], filled["partial_rotary_factor"]) == (4096, 0.75)


def test_gemma3s_two_sets_are_taken_out_of_rope_parameters():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert rope_settings_for_mlx_lm({"model_type": "gemma3_text", "rope_parameters": rope}) == {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 1e4,
    }


def test_fields_that_the_config_has_are_left_alone():
    config = {"model_type": "llama", "rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert rope_settings_for_mlx_lm(config) == {}


def test_a_class_that_reads_rope_parameters_itself_is_left_alone():
    config = {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert rope_settings_for_mlx_lm(config) == {}


def test_the_text_part_of_a_larger_model_is_filled_too():
    text = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    filled = rope_settings_for_mlx_lm({"model_type": "llava", "text_config": text})
    assert filled == {"text_config": {**text, "rope_theta": 5e5}}


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("gemma", {"rope_theta": 1e4, **LLAMA3}),
        ("llama", {"full_attention": {"rope_theta": 1e4}}),
    ],
)
def test_rope_parameters_that_a_class_cannot_take_are_refused(kind, rope):
    with pytest.raises(ModelError, match="rope_parameters"):
        rope_settings_for_mlx_lm({"model_type": kind, "rope_parameters": rope})


def test_a_plain_models_theta_reaches_its_rope(tmp_path):
    folder = shutil.copytree(GOLDEN_MODELS / ZIP / "base", tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_theta", None)
    config.pop("rope_scaling", None)
    rope = {"rope_type": "default", "rope_theta": 123456.0}
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert load(folder)[0].args.rope_theta == 123456.0


def test_an_adapter_path_may_begin_with_a_tilde(tmp_path, monkeypatch):
    seen = {}

    def look(*args, **options):
        seen.update(options)
        raise ValueError("seen enough")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("mlx_zip.models.loading.mlx_load", look)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="seen enough"):
        load(GOLDEN_MODELS / "llama_transformer_tied_lora" / "base", adapter_path="~/adapter")
    assert seen["adapter_path"] == str(tmp_path / "adapter")
