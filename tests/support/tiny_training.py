"""Helpers for tests of training: samples and prepared folders by hand, tiny plain models, runs in process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from mlx_zip import Codebook, CodecParams
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.entries import Entry
from mlx_zip.training.prepare.shards import Sample, make_codec_record, write_index, write_shard
from mlx_zip.training.run import RunOptions
from mlx_zip.training.run_folder import read_metrics
from mlx_zip.training.settings import EncoderOptions, TrainSettings
from support.checkpoints import BASE, VOCAB, decoder_shapes, write_json, write_tokenizer
from support.tiny import base_ids

TOKENS = VOCAB - 8  # a plain base's embedding is longer than its tokenizer
CODEC = CodecParams(VOCAB, 48, 3, (0, 1, 2, 3), 2)
PLAIN = replace(CODEC, codebook_size=0)
ENCODER = EncoderOptions(kind="transformer", num_hidden_layers=1, num_heads=2, intermediate_size=16)
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}


def random_model(config: dict[str, Any], seed: int = 0, **encoder: Any) -> Model:
    """A tiny zip2zip model with changes to its encoder's config; its logits differ clearly."""
    section = config["zip2zip"]
    config = {**config, "zip2zip": {**section, "encoder": {**section["encoder"], **encoder}}}
    model = Model(ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    named = ((name, rng.normal(0, 0.3, v.shape) + ("norm" in name)) for name, v in tree_flatten(model.parameters()))
    model.load_weights([(name, mx.array(value.astype(np.float32))) for name, value in named])
    return model


def make_sample(
    params: CodecParams, ids: Sequence[int], start: tuple[Entry, ...] | None = None, masked: Sequence[int] = ()
) -> Sample:
    """A sample of base ids; the loss does not count the positions in `masked`."""
    own = params if start is None else replace(params, start=start)
    emitted = Codebook(own).compress(np.array(ids, np.uint32))
    mask = np.ones(len(emitted), np.bool_)
    mask[list(masked)] = False
    return Sample(emitted, mask, len(ids), 2 * len(ids), start)


def text_ids(length: int, seed: int) -> list[int]:
    """Base ids of CODEC with repeats."""
    return [int(i) + 2 for i in base_ids(length, seed)]


def write_shards(
    folder: Path, params: CodecParams = CODEC, samples: int = 24, seed: int = 0, alike: bool = False, **index: Any
) -> Path:
    """Writes a prepared folder with samples of 20 to 59 base ids; alike: all samples are equal."""
    folder.mkdir(parents=True)
    made = [
        make_sample(params, text_ids(20 + (i * 17) % 40, 1000 * seed + i), masked=[1 + i % 5])
        for i in ([0] * samples if alike else range(samples))
    ]
    shards = [write_shard(folder, "shard-00000", made)]
    record = {"codec": make_codec_record(params), "context": 64, "shards": shards, "pool": None, **index}
    write_index(folder, record)
    return folder


def write_plain(
    folder: Path, seed: int = 0, tensors: Mapping[str, np.ndarray | None] | None = None, **config: Any
) -> Path:
    """Writes a tiny plain model's folder; its weights are large enough that logits differ clearly.

    tensors: tensors to replace or add in the file; None removes one.
    """
    folder.mkdir(parents=True)
    config = {**BASE, **SMALL, **config}
    write_json(folder / "config.json", config)
    write_tokenizer(folder, TOKENS)
    rng = np.random.default_rng(seed)
    arrays = {
        name: (rng.normal(0, 0.3, shape) + ("norm" in name)).astype(np.float32)
        for name, shape in decoder_shapes(config).items()
    }
    kept = {name: value for name, value in {**arrays, **(tensors or {})}.items() if value is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


def options(out: Path, **changes: Any) -> RunOptions:
    """Trains into `out`, from the folders `plain` and `data` next to it, which are made if they are absent."""
    home = out.parent
    for name, make in (("plain", write_plain), ("data", write_shards)):
        if name not in changes.get("made", ()) and not (home / name).exists():
            make(home / name)
    changes.pop("made", None)
    values: dict[str, Any] = {"data": [home / "data"], "out": out, "model": str(home / "plain"), "encoder": ENCODER}
    values["valid_share"] = 0.0
    return RunOptions(**{**values, **changes})


def settings(**changes: Any) -> TrainSettings:
    """Settings of a few short steps, each of which is reported."""
    values = {
        "iters": 6,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "lora_rank": 2,
        "steps_per_report": 1,
        "save_every": 2,
        "keep": 3,
    }
    return TrainSettings(**{**values, **changes})


def losses(out: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of a run's training lines."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(out) if "loss" in line]


def arrays_of(module: Any) -> dict[str, np.ndarray]:
    """A module's parameters, by name."""
    return {
        name: np.array(value.astype(mx.float32)) if mx.issubdtype(value.dtype, mx.floating) else np.array(value)
        for name, value in tree_flatten(module.parameters())
    }


def saved_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
