"""Converting whole checkpoints: every tensor arrives, under its name, in a folder that mlx-lm loads."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

import mlx_zip.converters as converters
from mlx_zip.converters import output
from support.checkpoints import (
    BASE,
    ENCODERS,
    VOCAB,
    WIDTH,
    edit_json,
    edit_tensors,
    write_checkpoint,
    write_json,
    write_tokenizer,
)
from support.converting import assert_same_tensors, config_of, convert, digests, loaded
from support.places import GOLDEN_MODELS


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN_MODELS.iterdir() if path.is_dir()))
def test_each_golden_checkpoint_converts_to_a_folder_that_mlx_lm_loads(name: str, tmp_path: Path) -> None:
    model, tokenizer = loaded(convert(GOLDEN_MODELS / name, tmp_path / "out"))
    prompt = json.loads((GOLDEN_MODELS / name / "expected.json").read_text())["prompts"][0]
    assert tokenizer.encode(prompt["text"], add_special_tokens=False) == prompt["base_ids"][1:]
    assert model(mx.array([prompt["compressed_ids"]])).shape[-1] == model.layout.width


@pytest.mark.parametrize("kind", sorted(ENCODERS))
@pytest.mark.parametrize("tie_encoders", [False, True])
def test_tensors_of_every_encoder_kind_arrive_unchanged(kind: str, tie_encoders: bool, tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", kind, {"tie_encoders": tie_encoders})
    assert_same_tensors(convert(tmp_path / "src", tmp_path / "out"), arrays)


@pytest.mark.parametrize(
    ("kind", "encoder"),
    [
        ("transformer", {"position_encoding": "learnable", "num_hidden_layers": 2}),
        ("res_latent_attn", {"hidden_size": 16, "model_hidden_size": WIDTH, "causal": True, "residual": False}),
    ],
)
def test_positions_and_projections_arrive_and_run(kind: str, encoder: dict[str, Any], tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", kind, encoder, merge_size=4)
    out = convert(tmp_path / "src", tmp_path / "out")
    assert_same_tensors(out, arrays)
    model, _ = loaded(out)
    assert mx.isfinite(model(mx.array([[7, 8, 7, 8, VOCAB]]))[0, -1, :VOCAB]).all()


@pytest.mark.parametrize(
    "base",
    [
        {"model_type": "llama", "tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "phi3", "num_key_value_heads": 4, "head_dim": None},
        {"model_type": "qwen2", "head_dim": None},
        {"model_type": "qwen3"},
        {"model_type": "gemma", "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    ],
    ids=lambda base: base["model_type"],
)
def test_every_base_kind_arrives_unchanged(base: dict[str, Any], tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", **base)
    assert_same_tensors(convert(tmp_path / "src", tmp_path / "out"), arrays)


def test_a_self_contained_sharded_checkpoint_arrives_unchanged(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", self_contained=True, shards=3)
    assert_same_tensors(convert(tmp_path / "src", tmp_path / "out"), arrays)


def test_the_encoder_file_may_have_its_other_name(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", alias=True)
    assert_same_tensors(convert(tmp_path / "src", tmp_path / "out"), arrays)


def test_a_partial_decoder_in_the_checkpoint_overrides_the_base(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = write_checkpoint(tmp_path / "src")
    changed = {"model.layers.1.mlp.down_proj.weight": arrays["model.layers.1.mlp.down_proj.weight"] + 1}
    save_file(changed, tmp_path / "src" / "model.safetensors")
    out = convert(tmp_path / "src", tmp_path / "out")
    assert_same_tensors(out, {**arrays, **changed})
    assert config_of(out)["zip2zip"]["source"]["override"] == list(changed)


def test_output_encoder_tensors_of_tied_encoders_are_dropped_and_counted(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", encoder={"tie_encoders": True})
    stray = {"output_encoder.layers.0.mlp.fc1.weight": np.ones((3, 3), np.float32)}
    edit_tensors(tmp_path / "src" / "zip2zip_encoders.safetensors", stray)
    out = convert(tmp_path / "src", tmp_path / "out")
    assert_same_tensors(out, arrays)
    assert config_of(out)["zip2zip"]["source"]["dropped"] == {"output_encoder of tied encoders": 1}


def test_rotary_buffers_of_old_checkpoints_are_dropped(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    edit_tensors(tmp_path / "src" / "base" / "model.safetensors", buffer)
    assert_same_tensors(convert(tmp_path / "src", tmp_path / "out"), arrays)


def test_a_tied_base_saved_under_the_heads_name_alone_gets_its_embedding(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", tie_word_embeddings=True)
    matrix = arrays["model.embed_tokens.weight"]
    edit_tensors(
        tmp_path / "src" / "base" / "model.safetensors",
        {"model.embed_tokens.weight": None, "lm_head.weight": matrix},
    )
    assert_same_tensors(convert(tmp_path / "src", tmp_path / "out"), arrays)


def test_an_equal_head_of_a_tied_base_is_dropped(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", tie_word_embeddings=True)
    edit_tensors(
        tmp_path / "src" / "base" / "model.safetensors", {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    )
    assert_same_tensors(convert(tmp_path / "src", tmp_path / "out"), arrays)


def test_an_override_of_a_tied_embedding_leaves_the_bases_equal_head_behind(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    name = "model.embed_tokens.weight"
    arrays = write_checkpoint(tmp_path / "src", tie_word_embeddings=True)
    edit_tensors(tmp_path / "src" / "base" / "model.safetensors", {"lm_head.weight": arrays[name]})
    save_file({name: arrays[name] * 2}, tmp_path / "src" / "model.safetensors")
    assert_same_tensors(convert(tmp_path / "src", tmp_path / "out"), {**arrays, name: arrays[name] * 2})


def test_two_conversions_give_identical_files(tmp_path: Path) -> None:
    source = GOLDEN_MODELS / "llama_transformer_tied_lora"
    first, second = convert(source, tmp_path / "a"), convert(source, tmp_path / "b")
    assert digests(first) == digests(second)


def test_large_models_are_split_into_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_SHARD_BYTES", 20_000)
    arrays = write_checkpoint(tmp_path / "src")
    out = convert(tmp_path / "src", tmp_path / "out")
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    found = {name: load_file(out / file)[name] for name, file in weight_map.items()}
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    loaded(out)


def test_the_default_dtype_is_the_source_decoders(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", torch_dtype="bfloat16")
    weights = tmp_path / "src" / "base" / "model.safetensors"
    halves = {name: array.astype(np.float16) for name, array in load_file(weights).items()}
    edit_tensors(weights, halves)
    out = convert(tmp_path / "src", tmp_path / "out")
    assert {array.dtype for array in load_file(out / "model.safetensors").values()} == {np.dtype(np.float16)}
    assert config_of(out)["torch_dtype"] == "float16"


def test_dtype_casts_decoder_and_encoders(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    out = convert(tmp_path / "src", tmp_path / "out", dtype="bfloat16")
    found = mx.load(str(out / "model.safetensors"))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert mx.array_equal(found[name], mx.array(array).astype(mx.bfloat16)), name


def test_the_config_records_where_the_model_came_from(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", auto_map={"AutoModel": "code.Model"}, _name_or_path="/home/someone/base")
    config = config_of(convert(tmp_path / "src", tmp_path / "out"))
    assert config["model_type"] == "zip2zip"
    assert config["eos_token_id"] == BASE["eos_token_id"]
    assert config.keys().isdisjoint({"auto_map", "_name_or_path"})
    assert config["zip2zip"]["base_model_type"] == "llama"
    record = config["zip2zip"]["source"]
    assert (record["path"], record["base"], record["revision"], record["adapter"]) == ("src", "base", None, None)
    assert str(tmp_path) not in json.dumps(config)


def test_an_absolute_base_path_is_followed_but_not_recorded(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    (tmp_path / "src" / "base").rename(tmp_path / "elsewhere")
    edit_json(tmp_path / "src" / "zip2zip_config.json", base_model_name_or_path=str(tmp_path / "elsewhere"))
    out = convert(tmp_path / "src", tmp_path / "out")
    assert_same_tensors(out, arrays)
    assert config_of(out)["zip2zip"]["base_model_name_or_path"] == "elsewhere"


# ---- fingerprints


def fingerprint(source: Path, out: Path, **options: Any) -> dict[str, str]:
    return config_of(convert(source, out, **options))["zip2zip"]["fingerprint"]


def test_the_fingerprint_does_not_depend_on_tensors_that_rows_do_not_read(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    before = fingerprint(tmp_path / "src", tmp_path / "a")
    changed = {"model.norm.weight": arrays["model.norm.weight"] + 1}
    edit_tensors(tmp_path / "src" / "base" / "model.safetensors", changed)
    assert fingerprint(tmp_path / "src", tmp_path / "b") == before


@pytest.mark.parametrize(
    ("file", "tensor", "sides"),
    [
        ("base/model.safetensors", "lm_head.weight", {"output"}),
        ("base/model.safetensors", "model.embed_tokens.weight", {"input"}),
        ("zip2zip_encoders.safetensors", "input_encoder.layers.0.mlp.fc1.weight", {"input"}),
        ("zip2zip_encoders.safetensors", "output_encoder.layers.0.mlp.fc1.weight", {"output"}),
    ],
)
def test_a_changed_tensor_changes_the_fingerprint_of_its_side(
    file: str, tensor: str, sides: set[str], tmp_path: Path
) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    before = fingerprint(tmp_path / "src", tmp_path / "a")
    edit_tensors(tmp_path / "src" / file, {tensor: arrays[tensor] + 1})
    after = fingerprint(tmp_path / "src", tmp_path / "b")
    assert {side for side in before if before[side] != after[side]} == sides


@pytest.mark.parametrize(
    "options", [{"dtype": "float16"}, {"quantize": True, "q_group_size": 32}, {"encoder_bits": 8}], ids=str
)
def test_another_storage_changes_both_fingerprints(options: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    before = fingerprint(tmp_path / "src", tmp_path / "a")
    after = fingerprint(tmp_path / "src", tmp_path / "b", **options)
    assert before["input"] != after["input"]
    assert before["output"] != after["output"]


def test_another_pad_id_changes_both_fingerprints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    before = fingerprint(tmp_path / "src", tmp_path / "a")
    write_tokenizer(tmp_path / "src" / "base", pad_token="<unk>")
    after = fingerprint(tmp_path / "src", tmp_path / "b")
    assert before["input"] != after["input"]
    assert before["output"] != after["output"]


# ---- tokenizer


AS_DICT = {"__type": "AddedToken", "content": "<unk>", "special": True, "lstrip": False, "rstrip": False}


@pytest.mark.parametrize(
    ("special", "pad_id"),
    [({}, 2), ({"pad_token": AS_DICT}, 3), ({"pad_token": None}, 1)],
    ids=["pad", "pad as a dict", "eos without a pad"],
)
def test_the_pad_id_is_the_tokenizers_pad_else_its_eos(special: dict[str, Any], pad_id: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    write_tokenizer(tmp_path / "src" / "base", **special)
    assert config_of(convert(tmp_path / "src", tmp_path / "out"))["zip2zip"]["pad_token_id"] == pad_id


def test_tokenizer_files_are_copied_as_they_are(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    base = tmp_path / "src" / "base"
    (base / "chat_template.jinja").write_text("{{ messages }}")
    write_json(base / "generation_config.json", {"eos_token_id": [1, 3]})
    out = convert(tmp_path / "src", tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    assert loaded(out)[1].eos_token_ids == {1, 3}


def test_a_missing_tokenizer_class_is_written_so_that_mlx_lm_can_load(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    edit_json(tmp_path / "src" / "base" / "tokenizer_config.json", tokenizer_class=None)
    out = convert(tmp_path / "src", tmp_path / "out")
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert loaded(out)[1].encode("w7 w9", add_special_tokens=False) == [7, 9]


def test_a_tokenizer_class_that_depends_on_the_model_type_is_pinned(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", model_type="phi3", num_key_value_heads=4, head_dim=None)
    edit_json(tmp_path / "src" / "base" / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    out = convert(tmp_path / "src", tmp_path / "out")
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] != "LlamaTokenizer"
    assert loaded(out)[1].encode("w7 w9", add_special_tokens=False) == [7, 9]


def test_code_files_are_copied_only_when_trusted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    (tmp_path / "src" / "base" / "tokenization_own.py").write_text("raise SystemExit\n")
    assert not list(convert(tmp_path / "src", tmp_path / "a").glob("*.py"))
    assert list(convert(tmp_path / "src", tmp_path / "b", trust_remote_code=True).glob("*.py"))


@pytest.mark.parametrize("boundary", [VOCAB - 6, VOCAB])
def test_a_tokenizer_shorter_than_the_boundary_is_fine(boundary: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", boundary=boundary)
    write_tokenizer(tmp_path / "src" / "base", size=VOCAB - 6)
    assert loaded(convert(tmp_path / "src", tmp_path / "out"))[0].layout.vocab_size == boundary


# ---- the rest


def test_a_terminal_shows_progress_on_stderr_with_the_count_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    arrays = write_checkpoint(tmp_path / "src")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    converters.convert(str(tmp_path / "src"), tmp_path / "out")
    assert f"{len(arrays)}/{len(arrays)}" in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_without_a_terminal_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "src")
    converters.convert(str(tmp_path / "src"), tmp_path / "out")
    assert capsys.readouterr() == ("", "")


def test_the_command_prints_the_folder_and_its_warnings_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    from mlx_zip.converters import cli
    from support.checkpoints import pickled_args, write_meta

    write_checkpoint(tmp_path / "src", "res_latent_attn")
    write_meta(tmp_path / "src" / "meta.pt", pickled_args(encoder_causal=True))
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(["--hf-path", str(tmp_path / "src"), "--mlx-path", str(tmp_path / "out")])
    assert cli.run(args) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'out'}\n"
    assert "warning: meta.pt overrides encoder.causal" in captured.err


def test_listing_the_flags_imports_no_mlx() -> None:
    import subprocess

    code = (
        "import argparse, sys\nfrom mlx_zip.converters import cli\n"
        "cli.add_arguments(argparse.ArgumentParser())\n"
        "print([m for m in ('mlx', 'mlx_lm', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
