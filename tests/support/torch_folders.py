"""Folders of tiny random models, saved by MLX, for the tests of the PyTorch engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.utils
import numpy as np

from mlx_zip.models.zip_model import Model
from support.tiny import VOCAB, random_model, tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_model(family: str, seed: int = 0, encoder: str = "averaging", **changes: Any) -> Model:
    """Returns a tiny random model; changes: keys of config.json outside its zip2zip section."""
    return random_model({**tiny_config(family, encoder), **changes}, seed, 0.15)


def pack(model: Model, bits: int, group: int, own: dict[str, Any]) -> dict[str, Any]:
    """Quantizes a model with MLX; own: settings, or False, of modules by the end of their path. Returns the record."""
    record: dict[str, Any] = {"bits": bits, "group_size": group, "mode": "affine"}

    def settings(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        found = next((value for end, value in own.items() if path.endswith(end)), True)
        if found is not True:
            record[path] = found
        return found

    nn.quantize(model, group, bits, class_predicate=settings)
    return record


def save(model: Model, folder: Path, shards: int = 1, dtype: Any = None, **changes: Any) -> Path:
    """Saves a model as a converted folder without tokenizer; changes: keys of config.json."""
    return save_weights(model, folder, {**model.args.config, **changes}, shards, dtype)


def save_weights(model: Any, folder: Path, config: dict[str, Any], shards: int = 1, dtype: Any = None) -> Path:
    """Saves any model as a folder without tokenizer. config: its config.json."""
    weights = dict(mlx.utils.tree_flatten(model.parameters()))
    if dtype is not None:
        weights = {n: w if w.dtype == mx.uint32 else w.astype(dtype) for n, w in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(weights)
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mx.save_safetensors(str(folder / name), {n: weights[n] for n in names[shard::shards]})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def random_ids(length: int, seed: int = 0, below: int = VOCAB) -> list[int]:
    """Returns base ids."""
    return np.random.default_rng(seed).integers(3, below, length).tolist()
