"""PEFT adapters: merged exactly, kept next to the base, or converted on their own; unsupported options are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_zip.errors import ConversionError
from support.checkpoints import (
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    WIDTH,
    edit_json,
    edit_tensors,
    write_adapter,
    write_checkpoint,
)
from support.converting import config_of, convert
from support.places import GOLDEN_MODELS

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
MODULES = {Q: (WIDTH, HEADS * HEAD_DIM, 4), DOWN: (INNER, WIDTH, 4)}


def merged(weight: np.ndarray, lora: dict[str, np.ndarray], module: str, scale: float) -> np.ndarray:
    delta = lora[f"{module}.B"].astype(np.float64) @ lora[f"{module}.A"].astype(np.float64)
    return weight.astype(np.float64) + scale * delta


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_the_golden_adapter_is_merged_into_the_weights_it_names_and_no_others(tmp_path: Path) -> None:
    source = GOLDEN_MODELS / "llama_transformer_tied_lora"
    base, adapter = load_file(source / "base" / "model.safetensors"), load_file(source / "adapter_model.safetensors")
    found = tensors(convert(source, tmp_path / "out"))
    prefix = "base_model.model."
    changed = {n.removeprefix(prefix).removesuffix(".lora_A.weight") for n in adapter if n.endswith("lora_A.weight")}
    assert len(changed) == 4
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module in changed:
            a, b = (adapter[f"{prefix}{module}.lora_{s}.weight"].astype(np.float64) for s in "AB")
            np.testing.assert_allclose(found[name], weight + 2.0 * (b @ a), atol=1e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_a_merge_is_computed_in_float32_before_it_is_cast(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    lora = write_adapter(tmp_path / "src", MODULES)
    out = convert(tmp_path / "src", tmp_path / "out", dtype="bfloat16")
    expected = merged(arrays[f"{Q}.weight"], lora, Q, 2.0).astype(np.float32)
    found = mx.load(str(out / "model.safetensors"))[f"{Q}.weight"].astype(mx.float32)
    assert np.mean(np.array(found) == np.array(mx.array(expected).astype(mx.bfloat16).astype(mx.float32))) > 0.999


@pytest.mark.parametrize(
    ("changes", "q_scale", "down_scale"),
    [
        ({}, 2.0, 2.0),
        ({"use_rslora": True}, 8 / math.sqrt(4), 8 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 3}}, 0.75, 2.0),
        ({"alpha_pattern": {"layers.1.mlp.down_proj": 3, "down_proj": 5}}, 2.0, 0.75),
        ({"r": 9, "rank_pattern": {".*_proj": 4}}, 2.0, 2.0),
    ],
    ids=["plain", "rslora", "alpha by name", "first pattern wins", "rank by pattern"],
)
def test_the_scale_is_pefts(changes: dict[str, Any], q_scale: float, down_scale: float, tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    lora = write_adapter(tmp_path / "src", MODULES, **changes)
    found = tensors(convert(tmp_path / "src", tmp_path / "out"))
    for module, scale in ((Q, q_scale), (DOWN, down_scale)):
        expected = merged(arrays[f"{module}.weight"], lora, module, scale)
        np.testing.assert_allclose(found[f"{module}.weight"], expected, atol=1e-6, err_msg=module)


def test_fused_phi3_layers_are_merged(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", model_type="phi3", num_key_value_heads=HEADS, head_dim=None)
    module = "model.layers.0.self_attn.qkv_proj"
    lora = write_adapter(tmp_path / "src", {module: (WIDTH, 3 * WIDTH, 2)})
    found = tensors(convert(tmp_path / "src", tmp_path / "out"))
    np.testing.assert_allclose(
        found[f"{module}.weight"], merged(arrays[f"{module}.weight"], lora, module, 4.0), atol=1e-6
    )


def test_an_adapter_is_preferred_to_a_decoder_override(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    write_adapter(tmp_path / "src", MODULES)
    from safetensors.numpy import save_file

    save_file({"model.norm.weight": arrays["model.norm.weight"] + 9}, tmp_path / "src" / "model.safetensors")
    found = tensors(convert(tmp_path / "src", tmp_path / "out"))
    np.testing.assert_array_equal(found["model.norm.weight"], arrays["model.norm.weight"])


# ---- kept and alone


def assert_adapter_gives(model: Any, expected: dict[str, np.ndarray]) -> None:
    """The linear layers with their adapters act like the merged weights."""
    for module, weight in expected.items():
        layer = model
        for part in module.split("."):
            layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
        x = np.random.default_rng(5).standard_normal((3, weight.shape[1])).astype(np.float32)
        np.testing.assert_allclose(np.array(layer(mx.array(x))), x @ weight.T, atol=2e-5, err_msg=module)


def test_a_kept_adapter_works_through_mlx_lm_on_the_unmerged_base(tmp_path: Path) -> None:
    import mlx_lm

    arrays = write_checkpoint(tmp_path / "src")
    lora = write_adapter(tmp_path / "src", MODULES)
    out = convert(tmp_path / "src", tmp_path / "out", keep_adapter=True)
    np.testing.assert_array_equal(tensors(out)[f"{Q}.weight"], arrays[f"{Q}.weight"])
    assert config_of(out)["zip2zip"]["source"]["adapter"] == "kept"
    model, _ = mlx_lm.load(str(out), adapter_path=str(out / "adapters"))
    assert_adapter_gives(model, {m: merged(arrays[f"{m}.weight"], lora, m, 2.0) for m in MODULES})


def test_the_kept_golden_adapter_gives_the_merged_models_logits(tmp_path: Path) -> None:
    import mlx_lm

    source = GOLDEN_MODELS / "llama_transformer_tied_lora"
    kept = convert(source, tmp_path / "kept", keep_adapter=True)
    model, _ = mlx_lm.load(str(kept), adapter_path=str(kept / "adapters"))
    other, _ = mlx_lm.load(str(convert(source, tmp_path / "merged")))
    ids = mx.array([[0, 40, 41, 40, 41, 512]])
    assert np.abs(np.array(model(ids)[..., :512]) - np.array(other(ids)[..., :512])).max() < 1e-5


def test_ranks_and_scales_that_differ_survive_in_a_kept_adapter(tmp_path: Path) -> None:
    import mlx_lm

    arrays = write_checkpoint(tmp_path / "src")
    modules = {Q: (WIDTH, HEADS * HEAD_DIM, 2), DOWN: (INNER, WIDTH, 4)}
    lora = write_adapter(tmp_path / "src", modules, r=4, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 5})
    out = convert(tmp_path / "src", tmp_path / "out", keep_adapter=True)
    model, _ = mlx_lm.load(str(out), adapter_path=str(out / "adapters"))
    scales = {Q: 2.5, DOWN: 2.0}
    assert_adapter_gives(model, {m: merged(arrays[f"{m}.weight"], lora, m, s) for m, s in scales.items()})


def test_a_plain_adapter_becomes_an_mlx_lm_adapter_folder(tmp_path: Path) -> None:
    import mlx_lm

    arrays = write_checkpoint(tmp_path / "src")
    lora = write_adapter(tmp_path / "adapter", MODULES, use_rslora=True, lora_dropout=0.05)
    adapters = convert(tmp_path / "adapter", tmp_path / "out", lora_only=True)
    assert sorted(path.name for path in adapters.iterdir()) == ["adapter_config.json", "adapters.safetensors"]
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert config["lora_parameters"] == {"rank": 4, "scale": 4.0, "dropout": 0.05, "keys": [Q, DOWN]}
    base = convert(tmp_path / "src", tmp_path / "base")
    model, _ = mlx_lm.load(str(base), adapter_path=str(adapters))
    assert_adapter_gives(model, {m: merged(arrays[f"{m}.weight"], lora, m, 4.0) for m in MODULES})


def test_a_plain_adapter_fits_a_plain_mlx_lm_model_too(tmp_path: Path) -> None:
    import mlx_lm

    from support.checkpoints import write_base

    arrays = write_base(tmp_path / "base")
    lora = write_adapter(tmp_path / "adapter", MODULES)
    adapters = convert(tmp_path / "adapter", tmp_path / "out", lora_only=True)
    model, _ = mlx_lm.load(str(tmp_path / "base"), adapter_path=str(adapters))
    assert_adapter_gives(model, {m: merged(arrays[f"{m}.weight"], lora, m, 2.0) for m in MODULES})


def test_the_dtype_of_a_plain_adapter_can_be_chosen(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", MODULES)
    out = convert(tmp_path / "adapter", tmp_path / "out", lora_only=True, dtype="float16")
    assert {a.dtype for a in load_file(out / "adapters.safetensors").values()} == {np.dtype(np.float16)}


# ---- refused


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"use_dora": True}, "use_dora"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"an_option_of_tomorrow": 1}, "an_option_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 5}, "rank 5"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(": 1}}, "invalid pattern"),
        ({"rank_pattern": "q_proj"}, "rank_pattern must be an object"),
        ({"use_rslora": "no"}, "use_rslora must be true or false"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_option_that_changes_the_result_is_refused_by_name(
    changes: dict[str, Any], culprit: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", MODULES, **changes)
    with pytest.raises(ConversionError, match=culprit.replace("(", r"\(")):
        convert(tmp_path / "adapter", tmp_path / "out", lora_only=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]


@pytest.mark.parametrize(
    ("modules", "culprit"),
    [
        ({"lm_head": (WIDTH, 96, 2)}, "lm_head"),
        ({"model.layers.7.self_attn.q_proj": (WIDTH, WIDTH, 2)}, r"layers\.7"),
        ({"model.layers.0.self_attn.v_proj": (WIDTH, KV_HEADS * HEAD_DIM + 1, 2)}, r"v_proj is \[17, 32\]"),
    ],
)
def test_a_target_that_the_decoder_layers_do_not_have_is_refused(
    modules: dict[str, tuple[int, int, int]], culprit: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "src")
    write_adapter(tmp_path / "src", modules)
    with pytest.raises(ConversionError, match=culprit):
        convert(tmp_path / "src", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({f"base_model.model.{Q}.lora_B.weight": None}, "only one of lora_A and lora_B"),
        ({f"base_model.model.{Q}.lora_A.weight": np.zeros((3, WIDTH), np.float32)}, "do not fit"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 96), np.float32)}, "lora_embedding_A"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": np.zeros(32, np.float32)}, "lora_magnitude_vector"),
    ],
    ids=["half", "ranks", "embedding", "dora"],
)
def test_adapter_tensors_that_are_not_lora_pairs_are_refused(
    changes: dict[str, np.ndarray | None], culprit: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", MODULES)
    edit_tensors(tmp_path / "adapter" / "adapter_model.safetensors", changes)
    with pytest.raises(ConversionError, match=culprit):
        convert(tmp_path / "adapter", tmp_path / "out", lora_only=True)


def test_keep_adapter_without_an_adapter_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    with pytest.raises(ConversionError, match="no adapter to keep"):
        convert(tmp_path / "src", tmp_path / "out", keep_adapter=True)


@pytest.mark.parametrize("options", [{"quantize": True}, {"base": "nowhere"}], ids=str)
def test_lora_only_takes_no_options_of_a_model(options, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", MODULES)
    with pytest.raises(ConversionError, match="--lora-only writes an adapter alone"):
        convert(tmp_path / "adapter", tmp_path / "out", lora_only=True, **options)


def test_an_adapter_folder_without_lora_only_says_so(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", MODULES)
    with pytest.raises(ConversionError, match="--lora-only"):
        convert(tmp_path / "adapter", tmp_path / "out")


def test_harmless_options_of_newer_peft_change_nothing(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", MODULES)
    before = mx.load(str(convert(tmp_path / "adapter", tmp_path / "out", lora_only=True) / "adapters.safetensors"))
    newer = {"layers_to_transform": [0, 1], "peft_version": "9.9", "inference_mode": True, "target_parameters": []}
    edit_json(tmp_path / "adapter" / "adapter_config.json", **newer)
    found = mx.load(str(convert(tmp_path / "adapter", tmp_path / "again", lora_only=True) / "adapters.safetensors"))
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in before.items()}
