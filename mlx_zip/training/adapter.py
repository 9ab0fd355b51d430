"""Saves what LoRA training changed, without the base model: a PEFT adapter and the hyper-encoders (format 1).

    adapter_config.json, adapter_model.safetensors    LoRA layers of the decoder, named as PEFT does
    zip2zip_config.json, zip2zip_encoders.safetensors  codec and hyper-encoders (only for a zip2zip model)
    zip2zip_pack_rows.safetensors                      trained rows of the pack's entries, in its order (--pack-rows)

`mlx_zip convert` puts the folder and its base model together. A pack that the data were prepared with and canonical
decoding are the keys `start` and `canonical` of zip2zip_config.json, which zip2zip does not know and refuses.
Source: zip2zip 0.2.0, peft 0.21 (`LoraConfig`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from mlx_zip.config import SIDES
from mlx_zip.errors import TrainingError, reason
from mlx_zip.files import whole_folder, write_json
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import IN_ADAPTER
from mlx_zip.training.saving import DTYPES
from mlx_zip.training.settings import TrainSettings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ZIP_CONFIG, ENCODERS = "zip2zip_config.json", "zip2zip_encoders.safetensors"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PT = {"format": "pt"}


def check_savable(model: nn.Module, config: Mapping[str, Any], settings: TrainSettings, from_scratch: bool) -> None:
    """Raises `TrainingError` if the run's result cannot be saved as an adapter and encoders. Called before training.

    config: the model's config.json. from_scratch: whether the weights began random.
    """
    if settings.fine_tune_type == "full" or from_scratch:
        raise TrainingError("--save adapter is for LoRA or encoders on a base; this run trains all weights")
    if not isinstance(model, Model):
        return
    section = config["zip2zip"]
    if section.get("base_model_name_or_path") != "." or "source" in section:
        raise TrainingError("--save adapter needs a plain model to start from; this one is a zip2zip model already")


def save_adapter(
    folder: Path,
    model: Any,
    base: str,
    settings: TrainSettings,
    dtype: str = "float32",
    pack_rows: Mapping[str, mx.array] | None = None,
) -> None:
    """Writes the adapter folder, whole or not at all. base: hub id or path of the plain model that was trained.

    dtype: floating-point type of the saved weights. pack_rows: trained rows of the pack that the data were
    prepared with, as `PackAndModelTrainee` returns them; None or empty for none.

    Raises `TrainingError` when it cannot be written.
    """
    pairs = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    try:
        with whole_folder(folder) as partial:
            if pairs:
                write_json(partial / CONFIG, _peft_config(pairs, base, settings, len(model.layers)))
                mx.save_safetensors(str(partial / WEIGHTS), _peft_weights(pairs, DTYPES[dtype]), _PT)
            if isinstance(model, Model):
                write_json(partial / ZIP_CONFIG, _zip_config(model, base))
                named: Any = tree_flatten(model.parameters())
                encoders = {name: value for name, value in named if name.startswith(SIDES)}
                if encoders:
                    cast = {name: value.astype(DTYPES[dtype]) for name, value in encoders.items()}
                    mx.save_safetensors(str(partial / ENCODERS), cast, _PT)
            if pack_rows:
                rows = {name: value.astype(DTYPES[dtype]) for name, value in pack_rows.items()}
                mx.save_safetensors(str(partial / IN_ADAPTER), rows, _PT)
    except (OSError, RuntimeError) as error:
        raise TrainingError(f"cannot write {folder}: {reason(error)}; the last checkpoint stays good") from error


def _zip_config(model: Model, base: str) -> dict[str, Any]:
    """Returns zip2zip_config.json for the trained model. base: as in `save_adapter`."""
    found = replace(model.config, format_version=1, base_model=base).to_dict()
    del found["pad_token_id"]  # the package takes it from the tokenizer, and refuses keys it does not know
    return found


def _peft_config(pairs: Mapping[str, LoRALinear], base: str, settings: TrainSettings, layers: int) -> dict[str, Any]:
    """Returns adapter_config.json. pairs: the LoRA layers by name. layers: number of blocks in the model."""
    numbers = {int(found[1]) for name in pairs if (found := _LAYER.search(name))}
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


def _peft_weights(pairs: Mapping[str, LoRALinear], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Returns the LoRA weights under PEFT's names: A [r, in] and B [out, r], which mlx-lm keeps transposed."""
    prefix, weights = "base_model.model.", {}
    for name, layer in pairs.items():
        weights[f"{prefix}{name}.lora_A.weight"] = mx.contiguous(layer.lora_a.T).astype(dtype)
        weights[f"{prefix}{name}.lora_B.weight"] = mx.contiguous(layer.lora_b.T).astype(dtype)
    return weights
