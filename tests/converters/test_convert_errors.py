"""Bad input: one line that names the culprit, and nothing left on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.checkpoints import (
    VOCAB,
    WIDTH,
    edit_json,
    edit_tensors,
    write_base,
    write_checkpoint,
    write_json,
    write_tokenizer,
)
from support.refusing import assert_refused

# ---- tensors


def ones(*shape: Any) -> np.ndarray:
    return np.ones(*shape, np.float32)


BASE_FILE, ENCODER_FILE = "base/model.safetensors", "zip2zip_encoders.safetensors"


def rewrite_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def entry(name: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header[name].update(changes)


@pytest.mark.parametrize("file", [BASE_FILE, ENCODER_FILE])
@pytest.mark.parametrize("keep", [0, 5, 8, 300, -1], ids=lambda keep: f"first {keep} bytes")
def test_a_truncated_safetensors_file_is_refused(file: str, keep: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    path = tmp_path / "src" / file
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(tmp_path, rf"{path.name} is no whole safetensors file: ")


@pytest.mark.parametrize(
    ("edit", "culprit"),
    [
        (entry("lm_head.weight", dtype="F31"), "unknown variant `F31`"),
        (entry("lm_head.weight", shape=[-96, -32]), "integer `-96`"),
        (entry("lm_head.weight", shape=[96, 31]), "invalid shape, data type, or offset"),
        (entry("lm_head.weight", data_offsets=[0, 12288, 3]), "invalid length 3"),
        (entry("lm_head.weight", data_offsets=[4, 12292]), "invalid offset for tensor `lm_head.weight`"),
        (entry("lm_head.weight", data_offsets=[1 << 40, (1 << 40) + 12288]), "invalid offset for tensor"),
        (lambda header: header.update({"lm_head.weight": 7}), "integer `7`"),
        (lambda header: header.pop("model.norm.weight"), "invalid offset|not fully covered"),
    ],
)
def test_a_corrupt_header_is_refused(edit: Callable[[dict[str, Any]], Any], culprit: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    rewrite_header(tmp_path / "src" / BASE_FILE, edit)
    assert_refused(tmp_path, culprit)


@pytest.mark.parametrize("metadata", [[5], {"a": 5}])
def test_metadata_that_is_no_map_of_texts_is_refused(metadata: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    rewrite_header(tmp_path / "src" / BASE_FILE, lambda header: header.update(__metadata__=metadata))
    assert_refused(tmp_path, "model.safetensors is no whole safetensors file")


@pytest.mark.parametrize("junk", [b"\xff" * 64, (4).to_bytes(8, "little") + b"[1] ", (2).to_bytes(8, "little") + b"{]"])
def test_a_file_that_is_not_safetensors_is_refused(junk: bytes, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    (tmp_path / "src" / BASE_FILE).write_bytes(junk)
    assert_refused(tmp_path, "model.safetensors")


@pytest.mark.parametrize(
    ("file", "changes", "culprit"),
    [
        (BASE_FILE, {"model.layers.0.mlp.up_proj.weight": None}, r"missing: model\.layers\.0\.mlp\.up_proj"),
        (BASE_FILE, {"lm_head.weight": None}, r"missing: lm_head"),
        (BASE_FILE, {"model.layers.9.mlp.up_proj.weight": ones(2)}, r"unknown: model\.layers\.9"),
        (BASE_FILE, {"model.norm.weight": ones(3)}, r"misshapen: model\.norm\.weight \[3\] instead of \[32\]"),
        (BASE_FILE, {"model.norm.weight": np.ones(WIDTH, np.int32)}, r"model\.norm\.weight int32"),
        (BASE_FILE, {"model.norm.weight": np.ones(WIDTH, np.float64)}, r"model\.norm\.weight F64"),
        (ENCODER_FILE, {"input_encoder.layers.0.mlp.fc1.weight": None}, r"missing: input_encoder\.layers\.0\.mlp\.fc1"),
        (ENCODER_FILE, {"output_encoder.layers.0.mlp.fc1.weight": None}, r"missing: output_encoder"),
        (ENCODER_FILE, {"input_encoder.surprise": ones(2)}, r"unknown: input_encoder\.surprise"),
        (ENCODER_FILE, {"encoder.w": ones(2)}, r"unknown: encoder\.w"),
        (ENCODER_FILE, {"input_encoder.layers.0.mlp.fc1.weight": ones((4, 4))}, r"misshapen: input_encoder"),
        (ENCODER_FILE, {"model.norm.weight": ones(WIDTH)}, r"encoders tensors .* unknown: model\.norm\.weight"),
    ],
)
def test_tensors_that_do_not_match_the_config_are_listed(
    file: str, changes: dict[str, np.ndarray | None], culprit: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "src")
    edit_tensors(tmp_path / "src" / file, changes)
    assert_refused(tmp_path, culprit)


def test_a_tied_bases_two_matrices_must_be_equal(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", tie_word_embeddings=True)
    edit_tensors(tmp_path / "src" / BASE_FILE, {"lm_head.weight": np.ones((VOCAB, WIDTH), np.float32)})
    assert_refused(tmp_path, "lm_head.weight differs")


def test_an_override_of_unknown_tensors_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    save_file({"model.layers.0.typo.weight": np.ones(2, np.float32)}, tmp_path / "src" / "model.safetensors")
    assert_refused(tmp_path, r"model\.safetensors .* unknown: model\.layers\.0\.typo")


@pytest.mark.parametrize(
    ("edit", "culprit"),
    [
        (
            lambda m: m.update({"model.norm.weight": "../secret.safetensors"}),
            "not a safetensors file in the same folder",
        ),
        (lambda m: m.update(dict.fromkeys(m, "model-00009-of-00009.safetensors")), "which is missing"),
        (lambda m: m.pop("model.norm.weight"), "holds model.norm.weight, which"),
        (lambda m: m.update({"ghost": "model-00001-of-00002.safetensors"}), "no shard holds: ghost"),
        (lambda m: m.clear(), "no weight_map"),
        (lambda m: m.update(dict.fromkeys(m, "x" * 300 + ".safetensors")), "which is missing"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(
    edit: Callable[[dict[str, str]], Any], culprit: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "src", self_contained=True, shards=2)
    index = tmp_path / "src" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    edit(data["weight_map"])
    write_json(index, data)
    assert_refused(tmp_path, culprit)


# ---- configs


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"surprise": 1}, "unknown key surprise"),
        ({"encoder_type": "mamba"}, "encoder_type 'mamba'"),
        ({"format_version": 3}, "format_version 3"),
        ({"position_mode": "random"}, "position_mode 'random'"),
        ({"base_model_name_or_path": 7}, "base_model_name_or_path"),
        ({"base_model_name_or_path": "x" * 5000}, "no such model folder"),
        ({"base_model_name_or_path": "no/such/folder"}, "no/such/folder is neither a folder nor a hub id"),
        ({"compression": {"initial_vocab_size": VOCAB}}, "max_codebook_size"),
    ],
)
def test_a_bad_zip2zip_config_is_refused_by_key(changes: dict[str, Any], culprit: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    edit_json(tmp_path / "src" / "zip2zip_config.json", **changes)
    assert_refused(tmp_path, culprit)


@pytest.mark.parametrize(
    ("kind", "encoder", "culprit"),
    [
        ("transformer", {"surprise": 1}, "encoder: unknown key surprise"),
        ("transformer", {"num_heads": 5}, "num_heads 5"),
        ("transformer", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("transformer", {"hidden_size": 16}, "encoder hidden_size is 16, the base model's hidden_size 32"),
        ("res_latent_attn", {"hidden_size": 16, "model_hidden_size": 48}, "encoder model_hidden_size is 48"),
    ],
)
def test_a_bad_encoder_config_is_refused_by_key(
    kind: str, encoder: dict[str, Any], culprit: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "src", kind)
    config = json.loads((tmp_path / "src" / "zip2zip_config.json").read_text())
    edit_json(tmp_path / "src" / "zip2zip_config.json", encoder={**config["encoder"], **encoder})
    assert_refused(tmp_path, culprit)


@pytest.mark.parametrize("text", ["{", '{"a": 1, "a": 2}', '{"a": NaN}', "[]", "\udcff"], ids=repr)
def test_json_that_is_not_an_object_is_refused(text: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    (tmp_path / "src" / "zip2zip_config.json").write_text(text, errors="surrogateescape")
    assert_refused(tmp_path, "zip2zip_config.json")


def test_a_merge_size_that_does_not_match_the_learnt_positions_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", encoder={"position_encoding": "learnable"}, merge_size=4)
    config = json.loads((tmp_path / "src" / "zip2zip_config.json").read_text())
    edit_json(tmp_path / "src" / "zip2zip_config.json", compression={**config["compression"], "max_subtokens": 2})
    assert_refused(tmp_path, r"max_subtokens is 2 but input_encoder\.pos_embed\.weight has positions for 4")


def test_a_boundary_above_the_embedding_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", boundary=VOCAB + 1)
    assert_refused(tmp_path, f"initial_vocab_size {VOCAB + 1}")


def test_a_boundary_inside_the_tokenizer_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", boundary=VOCAB - 6)
    write_tokenizer(tmp_path / "src" / "base", size=VOCAB)
    assert_refused(tmp_path, f"tokenizer has {VOCAB} ids")


def test_a_tokenizer_without_pad_and_eos_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    write_tokenizer(tmp_path / "src" / "base", VOCAB - 8, pad_token=None, eos_token=None)
    assert_refused(tmp_path, "no pad id")


def test_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    edit_json(tmp_path / "src" / "base" / "config.json", model_type="mamba2")
    assert_refused(tmp_path, "model_type 'mamba2'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", ["llama"]),
        ("hidden_size", True),
        ("num_hidden_layers", 10**9),
        ("head_dim", "16"),
        ("head_dim", 10**9),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", -1),
        ("attention_bias", "no"),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", "half"),
    ],
)
def test_a_base_config_value_that_cannot_be_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    edit_json(tmp_path / "src" / "base" / "config.json", **{key: value})
    assert_refused(tmp_path, f"{key}|heads of width|a parameter is not a number")


def test_a_config_value_that_transformers_refuses_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    edit_json(tmp_path / "src" / "base" / "config.json", initializer_range="x")
    assert_refused(tmp_path, "initializer_range")


def test_a_tokenizer_that_cannot_encode_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    edit_json(tmp_path / "src" / "base" / "tokenizer_config.json", model_max_length="x")
    assert_refused(tmp_path, "the tokenizer in base cannot be loaded")


# ---- files


@pytest.mark.parametrize(
    ("file", "culprit"),
    [
        ("zip2zip_encoders.safetensors", "zip2zip_encoders.safetensors or encoders.safetensors"),
        ("base/model.safetensors", "no model.safetensors"),
        ("base/config.json", "has no config.json"),
        ("base/tokenizer.json", "tokenizer"),
    ],
)
def test_a_missing_file_is_named(file: str, culprit: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    (tmp_path / "src" / file).unlink()
    assert_refused(tmp_path, culprit)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    (tmp_path / "src" / BASE_FILE).rename(tmp_path / "src" / "base" / "pytorch_model.bin")
    assert_refused(tmp_path, "only safetensors weights are read")


def test_a_plain_model_is_sent_to_mlx_lm(tmp_path: Path) -> None:
    write_base(tmp_path / "src")
    assert_refused(tmp_path, r"mlx_lm\.convert")


def test_an_empty_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    assert_refused(tmp_path, "not a zip2zip checkpoint")


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path, "src is neither a folder nor a hub id")


def test_a_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    assert_refused(tmp_path, "--revision hf", revision="hf")
