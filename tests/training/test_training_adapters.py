"""The folder of an adapter and its encoders, which is read back onto its base."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import load
from mlx_zip.errors import TrainingError
from mlx_zip.training.prepare.shards import make_codec_record
from mlx_zip.training.run import train
from mlx_zip.training.saving import save_adapter_folder
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.starting_model import make_starting_model
from support.converting import convert
from support.tiny_training import (
    CODEC,
    ENCODER,
    PLAIN,
    options,
    settings,
    write_plain,
    write_shards,
)
from support.trained import logits, scratch


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora_layers": 1, "lora_scale": 1.7}, {"fine_tune_type": "encoders"}],
    ids=["lora", "one block", "encoders"],
)
def test_an_adapter_folder_is_read_back_onto_its_base(changes, tmp_path, in_memory):
    run = options(tmp_path / "run", save="adapter")
    train(run, settings(iters=2, **changes), quiet=True)
    assert not (run.out / "model").exists()
    section = json.loads((run.out / "adapter" / "zip2zip_config.json").read_text())
    assert section["format_version"] == 1
    assert section["base_model_name_or_path"] == str((tmp_path / "plain").resolve())
    model, _ = load(convert(run.out / "adapter", tmp_path / "back"))
    np.testing.assert_allclose(logits(model), in_memory["logits"], atol=2e-5)


def test_an_adapter_folder_keeps_the_pack_of_its_data_and_canonical_decoding(tmp_path, in_memory):
    start = ((5, 6), (6, 7, 8))
    params = replace(CODEC, start=start)
    write_shards(tmp_path / "data", params, codec={**make_codec_record(params), "start": start})
    run = options(tmp_path / "run", save="adapter", canonical=True)
    train(run, settings(iters=2), quiet=True)
    model, _ = load(convert(run.out / "adapter", tmp_path / "back"))
    assert (model.config.start, model.config.canonical) == (start, True)
    np.testing.assert_allclose(logits(model), in_memory["logits"], atol=2e-5)


def test_an_adapter_folder_holds_no_tensor_of_the_base(tmp_path):
    run = options(tmp_path / "run", save="adapter", save_dtype="bfloat16")
    train(run, settings(iters=2, lora_layers=1), quiet=True)
    adapter: Any = mx.load(str(run.out / "adapter" / "adapter_model.safetensors"))
    encoders: Any = mx.load(str(run.out / "adapter" / "zip2zip_encoders.safetensors"))
    assert adapter
    assert all(name.startswith("base_model.model.model.layers.1.") and ".lora_" in name for name in adapter)
    assert encoders
    assert all(name.startswith(("input_encoder.", "output_encoder.")) for name in encoders)
    assert {value.dtype for value in [*adapter.values(), *encoders.values()]} == {mx.bfloat16}
    config = json.loads((run.out / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["layers_to_transform"]) == (2, 2.0, [1])


def test_a_plain_models_adapter_has_nothing_of_zip2zip(tmp_path):
    write_shards(tmp_path / "data", PLAIN)
    run = options(tmp_path / "run", save="adapter")
    train(run, settings(iters=1), quiet=True)
    assert sorted(path.name for path in (run.out / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    convert(run.out / "adapter", tmp_path / "back", lora_only=True)


def test_a_run_whose_result_is_no_adapter_is_refused_before_it_begins(tmp_path):
    with pytest.raises(TrainingError, match="all weights"):
        train(options(tmp_path / "run", save="adapter"), settings(fine_tune_type="full"), quiet=True)
    (tmp_path / "new").mkdir()
    with pytest.raises(TrainingError, match="all weights"):
        train(scratch(tmp_path / "new", save="adapter"), settings(), quiet=True)
    train(options(tmp_path / "first"), settings(iters=1), quiet=True)
    further = options(tmp_path / "run", save="adapter", model=str(tmp_path / "first" / "model"))
    with pytest.raises(TrainingError, match="zip2zip model already"):
        train(further, settings(), quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_adapter_that_cannot_be_written_is_one_clear_error(tmp_path):
    model, _ = make_starting_model(write_plain(tmp_path / "plain"), None, CODEC, ENCODER)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot write"):
        save_adapter_folder(tmp_path / "file" / "adapter", model, "base", TrainSettings())
