"""Training on a quantized base, with LoRA or new encoders, and what is quantized again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.convert import convert as mlx_convert

from mlx_zip import load
from mlx_zip.errors import TrainingError
from mlx_zip.training.run import train
from mlx_zip.training.settings import EncoderOptions
from support.converting import convert
from support.slow_cases import slow_but
from support.tiny_training import (
    PLAIN,
    options,
    saved_config,
    settings,
    write_plain,
    write_shards,
)
from support.trained import assert_saved_as_trained

QUANTIZABLE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


WIDE = EncoderOptions(kind="res_latent_attn", num_hidden_layers=1, num_heads=2, size=16, intermediate_size=16)


def test_lora_on_a_quantized_base_leaves_what_was_trained(tmp_path, in_memory):
    write_plain(tmp_path / "float", **QUANTIZABLE)
    mlx_convert(str(tmp_path / "float"), str(tmp_path / "plain"), quantize=True, q_group_size=32, q_bits=4)
    assert saved_config(tmp_path / "plain")["quantization"]["bits"] == 4
    run = options(tmp_path / "run", encoder=WIDE, adapted_bits="none")
    train(run, settings(iters=2, lora_layers=1), quiet=True)
    assert "scales" in in_memory["model"].model.embed_tokens
    assert_saved_as_trained(run.out, in_memory, atol=1e-4)
    saved: Any = mx.load(str(run.out / "model" / "model.safetensors"))
    assert "model.layers.0.self_attn.q_proj.scales" in saved
    assert "model.layers.1.self_attn.q_proj.scales" not in saved  # rounding again would undo what was learnt


def quantized_plain(home: Path, bits: int = 4, dtype: str | None = None) -> None:
    """Writes `plain`, a quantized model, next to the runs of a test."""
    write_plain(home / "float", **QUANTIZABLE)
    mlx_convert(
        str(home / "float"), str(home / "plain"), quantize=True, q_group_size=32, q_bits=bits, dtype=dtype or "float32"
    )


def layer_bits(folder: Path) -> dict[str, int]:
    """Bits per weight of the quantized layers of a saved model, as mlx-lm loads them."""
    model: Any = load(folder)[0]
    return {name: module.bits for name, module in model.named_modules() if hasattr(module, "bits")}


@pytest.mark.parametrize(
    ("bits", "found", "atol"), slow_but([(None, 8, 0.2), ("6", 6, 1.0), ("base", 4, 5.0)], ("6", 6, 1.0))
)
def test_layers_that_had_adapters_are_quantized_again_on_a_quantized_base(bits, found, atol, tmp_path, in_memory):
    quantized_plain(tmp_path)
    run = options(tmp_path / "run", encoder=WIDE, **({} if bits is None else {"adapted_bits": bits}))
    train(run, settings(iters=2, lora_layers=1), quiet=True)
    assert_saved_as_trained(run.out, in_memory, atol=atol)
    bits_of = layer_bits(run.out / "model")
    assert {bits_of[name] for name in bits_of if name.startswith("model.layers.1.")} == {found}
    assert {bits_of[name] for name in bits_of if not name.startswith("model.layers.1.")} == {4}
    assert {name.removesuffix(".linear") for name in bits_of} >= {"model.embed_tokens", "model.layers.1.mlp.up_proj"}


def test_a_model_trained_on_a_quantized_base_is_saved_in_the_type_it_had(tmp_path):
    quantized_plain(tmp_path, dtype="bfloat16")
    size = (tmp_path / "plain" / "model.safetensors").stat().st_size
    run = options(tmp_path / "run", data=[write_shards(tmp_path / "data", PLAIN)], adapted_bits="base")
    train(run, settings(iters=1), quiet=True)
    saved: Any = mx.load(str(run.out / "model" / "model.safetensors"))
    assert {value.dtype for value in saved.values()} == {mx.uint32, mx.bfloat16}
    assert saved_config(run.out / "model")["torch_dtype"] == "bfloat16"
    assert (run.out / "model" / "model.safetensors").stat().st_size == pytest.approx(size, rel=0.05)


@pytest.mark.slow
def test_quantized_encoders_are_trained_as_floats_and_quantized_again(tmp_path, in_memory):
    first = options(tmp_path / "first", encoder=replace(WIDE, size=64, intermediate_size=64))
    write_plain(tmp_path / "other", **QUANTIZABLE)
    train(replace(first, model=str(tmp_path / "other")), settings(iters=1), quiet=True)
    small = convert(first.out / "model", tmp_path / "small", quantize=True, q_group_size=32)
    encoders = {name: bits for name, bits in layer_bits(small).items() if "encoder" in name}
    assert set(encoders.values()) == {8}
    run = options(tmp_path / "run", model=str(small))
    train(run, settings(fine_tune_type="encoders"), quiet=True)
    before = load(small)[0]
    for name, module in before.named_modules():
        if name in encoders:
            trained = in_memory["weights"][f"{name}.weight"]
            assert trained.dtype == np.float32
            old = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
            assert np.abs(trained - np.array(old.astype(mx.float32))).max() > 1e-4, name
    assert {name: bits for name, bits in layer_bits(run.out / "model").items() if "encoder" in name} == encoders
    assert_saved_as_trained(run.out, in_memory, atol=0.5)


def test_a_quantized_model_is_not_trained_in_full(tmp_path):
    write_plain(tmp_path / "float", **QUANTIZABLE)
    mlx_convert(str(tmp_path / "float"), str(tmp_path / "plain"), quantize=True, q_group_size=32, q_bits=4)
    with pytest.raises(TrainingError, match="quantized"):
        train(options(tmp_path / "run", encoder=WIDE), settings(fine_tune_type="full"), quiet=True)
