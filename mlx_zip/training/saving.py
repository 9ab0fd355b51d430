"""Saves a trained model as an ordinary model folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config, save_model

import mlx_zip
from mlx_zip.errors import TrainingError, reason
from mlx_zip.files import whole_folder
from mlx_zip.hyper import Fingerprints, host_bytes
from mlx_zip.hyper.model_fingerprint import model_fingerprint
from mlx_zip.models import Model
from mlx_zip.register import MODEL_TYPE
from mlx_zip.training.requantize import fuse, quantization, quantize_encoders_again
from mlx_zip.training.settings import UNQUANTIZED
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.packs import IN_FOLDER, Pack, save_pack
from mlx_zip.vocab.tuned import TunedRows

GENERATION = "generation_config.json"
# left out of config.json: an older name of torch_dtype; code that is not copied; layers that are quantized no more
STALE = ("dtype", "auto_map", "quantization", "quantization_config")
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def save_trained(
    folder: Path,
    model: nn.Module,
    config: Mapping[str, Any],
    tokenizer: Any,
    record: Mapping[str, Any],
    dtype: str = "float32",
    origin: Path | None = None,
    adapted_bits: str = UNQUANTIZED,
    pack_rows: Mapping[str, mx.array] | None = None,
) -> None:
    """Writes the model folder, whole or not at all. Merges LoRA layers and casts weights to `dtype`, in place.

    config: config.json of the model that training began with; hyper-encoders that were quantized then are quantized
    again as they were. record: what it was trained from, which config.json keeps. origin: folder of the model or
    tokenizer that training began with, whose generation_config.json is copied. adapted_bits: as in `fuse`.
    pack_rows: as in `save_adapter`. Raises `TrainingError` when the folder cannot be written.
    """
    fuse(model, adapted_bits)
    quantize_encoders_again(model, config)
    model.set_dtype(DTYPES[dtype])
    record = {**record, "dtype": dtype, "mlx_zip": mlx_zip.__version__}
    saved = {**{key: value for key, value in config.items() if key not in STALE}, "torch_dtype": dtype}
    saved |= quantization(model, config)
    if config.get("model_type") == MODEL_TYPE:
        section = {key: value for key, value in config["zip2zip"].items() if key != "fingerprint"}
        saved["zip2zip"] = {**section, "source": record}
    else:
        saved["mlx_zip"] = {"source": record}
    try:
        with whole_folder(folder) as partial:
            save_model(partial, model)
            if isinstance(model, Model):
                saved["zip2zip"]["fingerprint"] = _fingerprint(model, saved)
            save_config(dict(saved), config_path=partial / "config.json")
            tokenizer.save_pretrained(partial)
            if pack_rows and isinstance(model, Model):
                _save_pack(partial / IN_FOLDER, model, tokenizer, pack_rows, dtype)
            if origin is not None and (origin / GENERATION).is_file():
                shutil.copyfile(origin / GENERATION, partial / GENERATION)
    except (OSError, RuntimeError) as error:
        raise TrainingError(f"cannot write {folder}: {reason(error)}; the last checkpoint stays good") from error


def _save_pack(file: Path, model: Model, tokenizer: Any, rows: Mapping[str, mx.array], dtype: str) -> None:
    """Writes the pack that the model begins with, with its trained rows."""
    kept = {
        name: np.array(value).astype("float32" if dtype == "float32" else "float16") for name, value in rows.items()
    }
    tuned = TunedRows(kept.get("input_rows", kept["output_rows"]), kept["output_rows"], model_fingerprint(model))
    save_pack(file, Pack(tuple(model.config.start or ()), tokenizer_fingerprint(tokenizer), rows=tuned))


def _fingerprint(model: Model, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fingerprints of what makes hyper rows, which config.json keeps; config: that of the saved model."""
    prints = Fingerprints()
    named: Any = tree_flatten(model.parameters())
    for name, array in named:
        prints.add(name, array, host_bytes(array))
    return prints.sides(model.config, config.get("quantization", {}))
