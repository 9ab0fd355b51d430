"""Quantizing: as mlx_lm.convert does, encoders to 8 bits, and every choice replayed by mlx-lm's loader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_zip.errors import ConversionError
from support.checkpoints import VOCAB, write_adapter, write_checkpoint
from support.converting import config_of, convert, loaded

QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)
IDS = mx.array([[7, 8, 7, 8, VOCAB, 9]])


def kinds(model: nn.Module) -> dict[str, type]:
    kinds = (nn.Linear, nn.Embedding, *QUANTIZED)
    return {name: type(module) for name, module in model.named_modules() if isinstance(module, kinds)}


def quantized(model: nn.Module) -> set[str]:
    return {name for name, kind in kinds(model).items() if kind in QUANTIZED}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "src", num_attention_heads=4, head_dim=16, intermediate_size=64)
    return tmp_path / "src"


@pytest.mark.parametrize(
    ("options", "group", "bits"),
    [
        ({"q_group_size": 32}, 32, 4),
        ({"q_group_size": 32, "q_bits": 8}, 32, 8),
        ({"q_mode": "mxfp4"}, 32, 4),
        ({"q_mode": "nvfp4"}, 16, 4),
        ({"q_mode": "mxfp8"}, 32, 8),
    ],
    ids=str,
)
def test_decoder_embedding_and_head_are_quantized_and_encoders_are_kept_on_request(
    options: dict[str, Any], group: int, bits: int, checkpoint: Path, tmp_path: Path
) -> None:
    out = convert(checkpoint, tmp_path / "out", quantize=True, encoder_bits="none", **options)
    model, _ = loaded(out)
    names = kinds(model)
    assert quantized(model) == {name for name in names if not name.startswith(("input_encoder", "output_encoder"))}
    module = model.model.layers[0].self_attn.q_proj
    assert (module.group_size, module.bits, module.mode) == (group, bits, options.get("q_mode", "affine"))
    assert mx.isfinite(model(IDS)[0, -1, :VOCAB]).all()
    assert config_of(out)["quantization"] == config_of(out)["quantization_config"]


def test_a_mixed_recipe_gives_layers_different_bits(checkpoint: Path, tmp_path: Path) -> None:
    out = convert(checkpoint, tmp_path / "out", quantize=True, q_group_size=32, quant_predicate="mixed_3_6")
    model, _ = loaded(out)
    bits = {name: module.bits for name, module in model.named_modules() if isinstance(module, QUANTIZED)}
    assert bits["lm_head"] == 6
    assert bits["model.layers.0.self_attn.q_proj"] == 3
    assert {bits[name] for name in bits if name.startswith(("input_encoder", "output_encoder"))} == {8}


def test_a_callers_predicate_decides_within_the_decoder(checkpoint: Path, tmp_path: Path) -> None:
    out = convert(
        checkpoint, tmp_path / "out", quantize=True, q_group_size=32, quant_predicate=lambda path, _: "mlp" in path
    )
    model, _ = loaded(out)
    decoder = {name for name in quantized(model) if name.startswith(("model.", "lm_head"))}
    assert decoder == {name for name in kinds(model) if "mlp" in name and name.startswith("model.")}


@pytest.mark.parametrize("options", [{}, {"q_bits": 8}, {"q_mode": "mxfp4"}], ids=str)
def test_the_encoders_are_quantized_to_8_bits_with_the_decoder(
    options: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    out = convert(checkpoint, tmp_path / "out", quantize=True, **{"q_group_size": 32, **options})
    model, _ = loaded(out)
    assert quantized(model) == set(kinds(model))
    layer = model.output_encoder.layers[0].mlp.fc2
    assert (layer.bits, layer.group_size, layer.mode) == (8, 64, "affine")
    assert mx.isfinite(model(IDS)[0, -1, : VOCAB + 1]).all()


def test_the_default_is_8_bits_by_weights_and_by_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    options = {"quantize": True, "q_group_size": 32}
    found = {
        bits: convert(checkpoint, tmp_path / str(bits), encoder_bits=bits, **options) for bits in (None, 8, "none")
    }
    weights = {bits: (folder / "model.safetensors").read_bytes() for bits, folder in found.items()}
    names = {bits: config_of(folder)["zip2zip"]["fingerprint"] for bits, folder in found.items()}
    assert (weights[None], names[None]) == (weights[8], names[8])
    assert names[None]["input"] != names["none"]["input"]
    assert names[None]["output"] != names["none"]["output"]


def test_encoders_are_kept_when_nothing_else_is_quantized(checkpoint: Path, tmp_path: Path) -> None:
    model, _ = loaded(convert(checkpoint, tmp_path / "out"))
    assert quantized(model) == set()


@pytest.mark.parametrize("bits", [4, 8])
def test_encoder_bits_quantize_the_encoders_linear_layers_alone(bits: int, checkpoint: Path, tmp_path: Path) -> None:
    out = convert(checkpoint, tmp_path / "out", encoder_bits=bits)
    model, _ = loaded(out)
    assert quantized(model) == {name for name in kinds(model) if name.startswith(("input_encoder", "output_encoder"))}
    assert model.input_encoder.layers[0].mlp.fc1.bits == bits
    assert mx.isfinite(model(IDS)[0, -1, : VOCAB + 1]).all()


def test_encoders_and_decoder_can_be_quantized_differently(checkpoint: Path, tmp_path: Path) -> None:
    out = convert(checkpoint, tmp_path / "out", quantize=True, q_group_size=32, q_bits=4, encoder_bits=8)
    model, _ = loaded(out)
    assert quantized(model) == set(kinds(model))
    assert (model.lm_head.bits, model.output_encoder.layers[0].mlp.fc2.bits) == (4, 8)
    record = config_of(out)["quantization"]
    assert (record["bits"], record["group_size"]) == (4, 32)
    assert record["output_encoder.layers.0.mlp.fc2"] == {"group_size": 64, "bits": 8, "mode": "affine"}


def test_encoder_layers_no_group_size_divides_stay_as_they_are(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", "res_latent_attn")  # intermediate 40: w2 reads 40 columns
    with pytest.warns(UserWarning, match=r"encoder layers are not quantized, .* multiple of 32: .*input_encoder"):
        out = convert(tmp_path / "src", tmp_path / "out", encoder_bits=8)
    model, _ = loaded(out)
    names = quantized(model)
    assert "input_encoder.layers.0.w1" in names
    assert "input_encoder.layers.0.w2" not in names
    assert not any("pos_embed" in name for name in names)


def test_quantization_follows_the_merge_of_an_adapter(checkpoint: Path, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    write_adapter(checkpoint, {module: (32, 64, 4)})
    plain, _ = loaded(convert(checkpoint, tmp_path / "plain"))
    small, _ = loaded(convert(checkpoint, tmp_path / "small", quantize=True, q_group_size=32, q_bits=8))
    layer = small.model.layers[0].self_attn.q_proj
    back = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=8)
    weight = plain.model.layers[0].self_attn.q_proj.weight
    assert np.abs(np.array(back - weight)).max() < 0.004


def test_a_kept_adapter_works_on_a_quantized_base(checkpoint: Path, tmp_path: Path) -> None:
    import mlx_lm

    write_adapter(checkpoint, {"model.layers.0.self_attn.q_proj": (32, 64, 4)})
    out = convert(checkpoint, tmp_path / "out", quantize=True, q_group_size=32, q_bits=8, keep_adapter=True)
    model, _ = mlx_lm.load(str(out), adapter_path=str(out / "adapters"))
    assert mx.isfinite(model(IDS)[0, -1, :VOCAB]).all()


# ---- a folder that is converted already


def test_a_converted_folder_can_be_quantized_to_the_same_weights(checkpoint: Path, tmp_path: Path) -> None:
    options = {"quantize": True, "q_group_size": 32, "encoder_bits": 8}
    direct = convert(checkpoint, tmp_path / "direct", **options)
    again = convert(convert(checkpoint, tmp_path / "plain"), tmp_path / "again", **options)
    assert (again / "model.safetensors").read_bytes() == (direct / "model.safetensors").read_bytes()
    assert config_of(again)["zip2zip"]["fingerprint"] == config_of(direct)["zip2zip"]["fingerprint"]


def test_a_quantized_folder_can_be_dequantized(checkpoint: Path, tmp_path: Path) -> None:
    small = convert(checkpoint, tmp_path / "small", quantize=True, q_group_size=32, q_bits=8, encoder_bits=8)
    out = convert(small, tmp_path / "out", dequantize=True)
    model, _ = loaded(out)
    assert quantized(model) == set()
    assert "quantization" not in config_of(out)
    assert np.abs(np.array(model(IDS) - loaded(small)[0](IDS))[0, -1, :VOCAB]).max() < 1e-4


def test_a_converted_folder_can_be_cast(checkpoint: Path, tmp_path: Path) -> None:
    out = convert(convert(checkpoint, tmp_path / "plain"), tmp_path / "out", dtype="bfloat16")
    assert {array.dtype for array in mx.load(str(out / "model.safetensors")).values()} == {mx.bfloat16}
    assert config_of(out)["zip2zip"]["source"]["dtype"] == "bfloat16"


def test_a_folder_with_a_kept_adapter_is_not_converted_again(checkpoint: Path, tmp_path: Path) -> None:
    write_adapter(checkpoint, {"model.layers.0.self_attn.q_proj": (32, 64, 4)})
    kept = convert(checkpoint, tmp_path / "kept", keep_adapter=True)
    with pytest.raises(ConversionError, match="keeps an adapter"):
        convert(kept, tmp_path / "out", quantize=True)


# ---- refused


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"quantize": True, "dequantize": True}, "exclude each other"),
        ({"quantize": True, "q_mode": "int4"}, "q_mode 'int4'"),
        ({"quantize": True, "q_bits": 7}, "cannot quantize"),
        ({"quantize": True, "quant_predicate": "mixed_9_9"}, "mixed_9_9"),
        ({"quantize": True, "quant_predicate": "mixed_3_6", "q_mode": "mxfp4"}, "affine"),
        ({"encoder_bits": 5}, "encoder_bits 5"),
        ({"encoder_bits": "all"}, "encoder_bits all is not one of 4, 8, none"),
        ({"q_bits": 8}, "--q-bits has no effect without -q"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
    ids=str,
)
def test_impossible_options_are_refused_by_name(
    options: dict[str, Any], culprit: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match=culprit):
        convert(checkpoint, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"q_group_size": 128},
            "no layer's width (32, 64) is a multiple of the group size 128; choose --q-group-size 64",
        ),
        ({"quant_predicate": lambda *_: False, "q_group_size": 32}, "quant_predicate refuses every layer"),
    ],
    ids=["group size", "predicate"],
)
def test_quantizing_nothing_is_an_error_that_says_what_to_do(
    options: dict[str, Any], said: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match=re.escape(said)):
        convert(checkpoint, tmp_path / "out", quantize=True, **options)
    assert not (tmp_path / "out").exists()


def test_layers_that_no_group_fits_are_named_in_a_warning(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="layers are not quantized, because their width is not a multiple of the group"
    ):
        convert(checkpoint, tmp_path / "out", quantize=True)


@pytest.mark.parametrize("bits", [None, 8])
def test_encoders_that_no_group_fits_are_kept_by_default_and_an_error_when_asked_for(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "src", num_attention_heads=4, head_dim=16, intermediate_size=64)
    monkeypatch.setattr("mlx_zip.converters.quantization._GROUPS", (96, 80))
    options: dict[str, Any] = {"quantize": True, "q_group_size": 32, "encoder_bits": bits}
    if bits is not None:
        with pytest.raises(ConversionError, match="no encoder layer's width is a multiple of 80"):
            convert(tmp_path / "src", tmp_path / "out", **options)
        return
    with pytest.warns(UserWarning, match="encoder layers are not quantized"):
        out = convert(tmp_path / "src", tmp_path / "out", **options)
    assert not any(name.startswith(("input_encoder", "output_encoder")) for name in quantized(loaded(out)[0]))


def test_dequantizing_a_model_that_is_not_quantized_warns(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is not quantized: -d"):
        convert(checkpoint, tmp_path / "out", dequantize=True)


def test_a_quantized_base_model_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", quantization={"group_size": 64, "bits": 4})
    with pytest.raises(ConversionError, match="is quantized"):
        convert(tmp_path / "src", tmp_path / "out")


def test_a_quantized_folder_is_not_quantized_again(checkpoint: Path, tmp_path: Path) -> None:
    small = convert(checkpoint, tmp_path / "small", quantize=True, q_group_size=32)
    with pytest.raises(ConversionError, match="quantized already"):
        convert(small, tmp_path / "out", quantize=True, q_group_size=32)
