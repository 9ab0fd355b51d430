"""Saves the result of training: a model folder, or only a LoRA adapter and the hyper-encoders.

A model that was quantized before training is quantized again. Layers with LoRA adapters are saved in 8 bits by default
(`--adapted-bits`): unquantized layers would make a 4-bit model several times larger; with the base's 4 bits, most
changes smaller than a rounding step would be lost. Measured once, with one seed and no saved record: `stories-base` in
4 bits, LoRA of rank 16, 40 steps on source code. Held-out bits per byte fell from 7.07 to 4.70 in training; the saved
model had 4.70 with unquantized layers, 8 and 6 bits, 4.94 with 5 bits, and 6.37 with 4 bits.

With `--save adapter`, the folder holds a PEFT adapter and the hyper-encoders (format 1), but not the base model:

    adapter_config.json, adapter_model.safetensors    LoRA layers of the decoder, named as PEFT does
    zip2zip_config.json, zip2zip_encoders.safetensors  codec and hyper-encoders (only for a zip2zip model)
    zip2zip_pack_rows.safetensors                      trained rows of the pack's entries, in pack order (--pack-rows)

`mlx_zip convert` merges the folder with its base model. zip2zip_config.json has two keys that the zip2zip package
refuses: `start`, the entries of the pack that the data were prepared with, and `canonical`, for canonical decoding.
Source: zip2zip 0.2.0, peft 0.21 (`LoraConfig`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import save_config, save_model

import mlx_zip
from mlx_zip.config import SIDES
from mlx_zip.errors import TrainingError, errors_as
from mlx_zip.files import atomic_folder, write_json
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, UPSTREAM_CONFIG_NAME, UPSTREAM_ENCODERS
from mlx_zip.models.rows.encoders import quantization_settings
from mlx_zip.models.rows.fingerprints import SideFingerprints, compute_model_fingerprint, host_bytes, named_arrays
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import IN_ADAPTER, IN_FOLDER, Pack, save_pack
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.training.settings import BASE, SAVE_DTYPES, UNQUANTIZED, TrainSettings
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")
_PYTORCH_METADATA = {"format": "pt"}
_GENERATION = "generation_config.json"
# keys not copied to config.json: dtype (another name of torch_dtype), custom code, and quantization (written anew)
_KEYS_LEFT_OUT = ("dtype", "auto_map", "quantization", "quantization_config")
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
Config = Mapping[str, Any]


def save_model_folder(
    folder: Path,
    model: nn.Module,
    config: Mapping[str, Any],
    tokenizer: Any,
    record: Mapping[str, Any],
    dtype: str,
    origin: Path | None,
    adapted_bits: str,
    pack_rows: Mapping[str, mx.array],
) -> None:
    """Writes the model folder atomically. Merges LoRA layers and casts weights to `dtype`, both in place in `model`.

    config: config.json of the model that training began with; hyper-encoder layers that `config` lists as quantized are
    quantized again with the same settings. record: origin of the model, to store in the new config.json. origin: folder
    of the model or tokenizer that training began with, from which generation_config.json is copied. adapted_bits: see
    `fuse_lora`. pack_rows: see `save_adapter_folder`. Raises `TrainingError` if the folder cannot be written.
    """
    fuse_lora(model, adapted_bits)
    _requantize_encoders(model, config)
    model.set_dtype(DTYPES[dtype])
    record = {**record, "dtype": dtype, "mlx_zip": mlx_zip.__version__}
    saved = {**{key: value for key, value in config.items() if key not in _KEYS_LEFT_OUT}, "torch_dtype": dtype}
    saved |= quantization_config(model, config)
    if config.get("model_type") == MODEL_TYPE:
        section = {key: value for key, value in config["zip2zip"].items() if key != "fingerprint"}
        saved["zip2zip"] = {**section, "source": record}
    else:
        saved["mlx_zip"] = {"source": record}
    with _fill_new_folder(folder) as partial:
        save_model(partial, model)
        if isinstance(model, Model):
            saved["zip2zip"]["fingerprint"] = _fingerprint_hyper_rows(model, saved)
        save_config(dict(saved), config_path=partial / "config.json")
        tokenizer.save_pretrained(partial)
        if pack_rows and isinstance(model, Model):
            _save_pack_rows(partial / IN_FOLDER, model, tokenizer, pack_rows, dtype)
        if origin is not None and (origin / _GENERATION).is_file():
            shutil.copyfile(origin / _GENERATION, partial / _GENERATION)


@contextmanager
def _fill_new_folder(folder: Path) -> Iterator[Path]:
    """Context manager: yields a temporary folder to fill, which becomes `folder` on success. Raises `TrainingError`."""
    fault, good = f"cannot write {folder}", "; the last checkpoint stays good"
    with errors_as(TrainingError, fault, OSError, RuntimeError, end=good), atomic_folder(folder) as partial:
        yield partial


def _save_pack_rows(file: Path, model: Model, tokenizer: Any, rows: Mapping[str, mx.array], dtype: str) -> None:
    kept = {
        name: np.array(value).astype("float32" if dtype == "float32" else "float16") for name, value in rows.items()
    }
    tuned = TunedRows(
        kept.get("input_rows", kept["output_rows"]), kept["output_rows"], compute_model_fingerprint(model)
    )
    save_pack(file, Pack(tuple(model.config.start or ()), tokenizer_fingerprint(tokenizer), rows=tuned))


def _fingerprint_hyper_rows(model: Model, config: Mapping[str, Any]) -> dict[str, str]:
    prints = SideFingerprints()
    for name, array in named_arrays(model.parameters()):
        prints.add(name, array, host_bytes(array))
    return prints.sides(model.config, config.get("quantization", {}))


def default_save_dtype(model: nn.Module) -> str:
    """Returns the name of the dtype in which a trained model's weights are saved by default.

    Returns "float32" for an unquantized model; for a quantized model, the dtype in which the model computes: that of
    the largest floating-point array outside of the hyper-encoders. model: the model as loaded, before training.
    """
    named = named_arrays(model.parameters())
    if not any(name.endswith(".scales") for name, _ in named):
        return "float32"
    old = [value for name, value in named if not name.startswith(SIDES) and mx.issubdtype(value.dtype, mx.floating)]
    largest = max(old, key=lambda value: value.size)
    return next((name for name in SAVE_DTYPES if largest.dtype == getattr(mx, name)), "float32")


def fuse_lora(model: nn.Module, bits: str = UNQUANTIZED) -> None:
    """Merges LoRA layers into the linear layers that they adapt, in place and in float32.

    bits: one of `ADAPTED_BITS`: bits per weight with which a layer that was quantized is quantized again. Computes one
    layer at a time, so that the float weights of only one layer are in memory.
    """
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "fuse")]
    for name, module in layers:
        module.set_dtype(mx.float32)
        fused = _requantize_layer(module.fuse(dequantize=True), module.linear, bits)
        mx.eval(fused.parameters())
        model.update_modules(tree_unflatten([(name, fused)]))


def _requantize_layer(fused: nn.Linear, base: nn.Module, bits: str) -> nn.Module:
    """Returns the layer `fused`, quantized to `bits`. base: the adapted layer without the adapter.

    `BASE` means the base layer's own quantization. Other numbers of bits use affine quantization in groups of the
    base's size, at least 32. If the group size does not divide the input width, the layer stays unquantized.
    """
    if bits == UNQUANTIZED or not isinstance(base, nn.QuantizedLinear):
        return fused
    if bits == BASE:
        return nn.QuantizedLinear.from_linear(fused, base.group_size, base.bits, mode=base.mode)
    group = max(base.group_size, 32)
    return nn.QuantizedLinear.from_linear(fused, group, int(bits)) if fused.weight.shape[-1] % group == 0 else fused


def _requantize_encoders(model: nn.Module, config: Config) -> None:
    before = config.get("quantization") or {}

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        is_float = path.startswith(SIDES) and isinstance(module, nn.Linear)
        return before.get(path, False) if is_float else False

    nn.quantize(model, class_predicate=chosen)


def quantization_config(model: nn.Module, config: Config) -> dict[str, Any]:
    """Returns the keys of config.json that tell mlx-lm's loader how the model's layers are quantized.

    config: config.json of the starting model, whose default quantization is kept. Returns {} if no layer is quantized.
    """
    layers = {path: found for path, module in model.named_modules() if (found := quantization_settings(module))}
    if not layers:
        return {}
    before = config.get("quantization") or next(iter(layers.values()))
    default = {name: value for name, value in before.items() if not isinstance(value, Mapping)}
    usual = {"mode": "affine", **default}
    own = {path: sizes for path, sizes in layers.items() if any(usual.get(name) != sizes[name] for name in sizes)}
    made = {**default, **own}
    return {"quantization": made, "quantization_config": made}


# ---- an adapter


def check_adapter_savable(
    model: nn.Module, config: Mapping[str, Any], settings: TrainSettings, from_scratch: bool
) -> None:
    """Raises `TrainingError` if the run's result cannot be saved as adapter and encoders. Call this before training.

    config: the model's config.json. from_scratch: whether training begins with random weights.
    """
    if settings.fine_tune_type == "full" or from_scratch:
        raise TrainingError("--save adapter is for LoRA or encoders on a base; this run trains all weights")
    if not isinstance(model, Model):
        return
    section = config["zip2zip"]
    if section.get("base_model_name_or_path") != "." or "source" in section:
        raise TrainingError("--save adapter needs a plain model to start from; this one is a zip2zip model already")


def save_adapter_folder(
    folder: Path,
    model: Any,
    base: str,
    settings: TrainSettings,
    dtype: str = "float32",
    pack_rows: Mapping[str, mx.array] | None = None,
) -> None:
    """Writes the adapter folder atomically. base: hub id or path of the plain model that was trained.

    dtype: floating-point type of the saved weights. pack_rows: trained rows of the data's pack, from
    `PackAndModelTrainee.trained_pack_rows`; None or empty for none. Raises `TrainingError` if writing fails.
    """
    pairs = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    with _fill_new_folder(folder) as partial:
        if pairs:
            write_json(partial / ADAPTER_CONFIG, _make_peft_config(pairs, base, settings, len(model.layers)))
            mx.save_safetensors(
                str(partial / ADAPTER_WEIGHTS), _to_peft_weights(pairs, DTYPES[dtype]), _PYTORCH_METADATA
            )
        if isinstance(model, Model):
            write_json(partial / UPSTREAM_CONFIG_NAME, _make_adapter_zip_config(model, base))
            named = named_arrays(model.parameters())
            encoders = {name: value for name, value in named if name.startswith(SIDES)}
            if encoders:
                cast = {name: value.astype(DTYPES[dtype]) for name, value in encoders.items()}
                mx.save_safetensors(str(partial / UPSTREAM_ENCODERS), cast, _PYTORCH_METADATA)
        if pack_rows:
            rows = {name: value.astype(DTYPES[dtype]) for name, value in pack_rows.items()}
            mx.save_safetensors(str(partial / IN_ADAPTER), rows, _PYTORCH_METADATA)


def _make_adapter_zip_config(model: Model, base: str) -> dict[str, Any]:
    found = replace(model.config, format_version=1, base_model=base).to_dict()
    del found["pad_token_id"]  # zip2zip reads it from the tokenizer and refuses unknown keys
    return found


def _make_peft_config(
    pairs: Mapping[str, LoRALinear], base: str, settings: TrainSettings, layers: int
) -> dict[str, Any]:
    """Returns adapter_config.json. pairs: the LoRA layers by name. layers: number of blocks in the model."""
    numbers = {int(found[1]) for name in pairs if (found := _LAYER_NUMBER.search(name))}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_scale * settings.lora_rank,
        "lora_dropout": settings.lora_dropout,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        "layers_to_transform": None if len(numbers) == layers else sorted(numbers),
        "inference_mode": True,
    }


def _to_peft_weights(pairs: Mapping[str, LoRALinear], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Returns the LoRA weights under PEFT's names: A [r, in] and B [out, r], transposed from mlx-lm's layout."""
    prefix, weights = "base_model.model.", {}
    for name, layer in pairs.items():
        weights[f"{prefix}{name}.lora_A.weight"] = mx.contiguous(layer.lora_a.T).astype(dtype)
        weights[f"{prefix}{name}.lora_B.weight"] = mx.contiguous(layer.lora_b.T).astype(dtype)
    return weights
