"""bench checkpoint: what it writes is a checkpoint that the published package times, of a shape's sizes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="bench checkpoint needs torch")

from safetensors.torch import load_file

from mlx_zip.bench.engines.shape_table import SHAPES
from mlx_zip.bench.records import read_lines
from mlx_zip.errors import MlxZipError
from support import tiny_bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoint") / "made"
    assert tiny_bench.run("checkpoint", "--rehearse", "--precision", "float32", "--out", made) == 0
    return made


@pytest.mark.slow
def test_a_checkpoint_has_the_shapes_sizes_and_encoders(folder):
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("phi3", 192, 2)
    section = json.loads((folder / "zip2zip_config.json").read_text())
    assert section["compression"]["initial_vocab_size"] == config["vocab_size"]
    weights = load_file(folder / "zip2zip_encoders.safetensors")
    assert {name.split(".")[0] for name in weights} == {"input_encoder", "output_encoder"}
    assert weights["input_encoder.layers.1.mlp.fc1.weight"].shape == (768, 192)


@pytest.mark.slow
def test_a_folder_that_exists_is_left_as_it_is(folder):
    before = (folder / "config.json").read_bytes()
    with pytest.raises(MlxZipError, match="exists already"):
        tiny_bench.run("checkpoint", "--rehearse", "--out", folder)
    assert (folder / "config.json").read_bytes() == before


@pytest.mark.slow
def test_the_published_package_and_transformers_are_timed_beside_our_engines(folder, tmp_path, monkeypatch):
    for library in ("triton", "peft", "zip2zip"):
        pytest.importorskip(library, reason=f"the engine zip2zip needs {library}")
    tiny_bench.small(monkeypatch)
    try:
        flags = ["--engines", "torch-zip", "hf", "zip2zip", "--published", folder, "--parts", "others"]
        assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, *flags) == 0
    finally:
        SHAPES.pop("phi-3.5-mini-narrow", None)
    lines = read_lines(tmp_path / "others.jsonl")
    assert [one["engine"] for one in lines] == ["hf", "hf", "zip2zip", "zip2zip"]
    assert {one["model"]["name"] for one in lines} == {"phi-3.5-mini-narrow"}
