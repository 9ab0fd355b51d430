"""GGUF files to plain model folders: values, packings, settings, flags, and what is refused."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import yaml

from mlx_zip.converters import source
from mlx_zip.converters.gguf import gguf_file
from mlx_zip.errors import ConversionError, MlxZipError
from mlx_zip.models.loading import load
from support import gguf_files as files
from support import gguf_vocabularies as vocabularies
from support.converting import config_of, convert, loaded
from support.gguf_files import BLOCKS, Stored, Tiny, tiny

PACKED = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases, tied": {"bias": True, "tied": True},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3": {"head_dim": 32},
}


def vocabulary(architecture: str) -> dict[str, Any]:
    if architecture.startswith("gemma"):
        return vocabularies.pieces(gemma=True)
    return vocabularies.byte_level("qwen2" if architecture.startswith("qwen") else "gpt-2")


def written(path: Path, name: str = "llama", kind: str = "F32", **changes: Any) -> Tiny:
    """Writes a file and returns the model that it was made of."""
    architecture = name.split()[0]
    tokenizer = vocabulary(architecture)
    model = tiny(architecture, vocab=len(tokenizer["tokenizer.ggml.tokens"]), **{**FAMILIES.get(name, {}), **changes})
    files.save(path, model, tokenizer, kind)
    return model


def tensors(folder: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(folder / "model.safetensors")))


def unpacked(folder: Path) -> dict[str, np.ndarray]:
    """All tensors in float32, packed ones as MLX unpacks them."""
    found, section = tensors(folder), config_of(folder).get("quantization", {})
    made = {}
    for name, array in found.items():
        path = name.removesuffix(".weight")
        if f"{path}.scales" in found and name != path:
            how = section.get(path, section)
            scales, biases = (found[f"{path}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            array = mx.dequantize(array, scales, biases, how["group_size"], how["bits"])
        if not name.endswith((".scales", ".biases")):
            made[name] = np.array(array.astype(mx.float32))
    return made


def by_library(stored: Stored) -> np.ndarray:
    """The values of a packed tensor as the library gguf computes them."""
    gguf = pytest.importorskip("gguf", reason="the values of packed blocks need gguf")
    rows = np.frombuffer(stored.data, np.uint8).reshape(stored.shape[0], -1)
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[stored.kind])


def model_rows(model: Tiny, name: str, stored: np.ndarray) -> np.ndarray:
    """Rows of a file's tensor in the order of the model: Llama's q and k have the halves of a head in alternation."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if model.architecture != "llama" or heads is None:
        return stored
    return stored.reshape(heads, -1, 2, stored.shape[-1]).swapaxes(1, 2).reshape(stored.shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_each_family_gives_the_weights_that_it_was_made_of_under_their_names(tmp_path, name):
    model = written(tmp_path / "model.gguf", name)
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    found = tensors(out)
    assert found.keys() == model.state.keys()
    for key, array in model.state.items():
        assert found[key].dtype == mx.float32
        np.testing.assert_allclose(np.array(found[key]), array, atol=2e-7, err_msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_converted_folder_loads_and_its_config_says_what_the_file_says(tmp_path, name):
    model = written(tmp_path / "model.gguf", name)
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    found = config_of(out)
    said = {key: value for key, value in model.config.items() if key not in ("pad_token_id", "hidden_activation")}
    assert {key: found.get(key) for key in said} == said
    loaded_model, tokenizer = load(str(out))
    assert loaded_model(mx.array([[1, 2, 3]])).shape == (1, 3, model.config["vocab_size"])
    assert len(tokenizer) == model.config["vocab_size"]


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_sixteen_bit_matrices_keep_their_type_and_values(tmp_path, kind):
    model = written(tmp_path / "model.gguf", kind=kind)
    found = tensors(convert(tmp_path / "model.gguf", tmp_path / "out"))
    name, dtype = "model.layers.1.mlp.up_proj.weight", mx.float16 if kind == "F16" else mx.bfloat16
    stored = model.tensors(kind)["blk.1.ffn_up.weight"]
    assert {array.dtype for array in found.values()} == {dtype}
    assert bytes(memoryview(found[name].view(mx.uint16))) == stored.data


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_matrices_keep_their_values_exactly(tmp_path, kind, dtype):
    model = written(tmp_path / "model.gguf", kind=kind)
    out = convert(tmp_path / "model.gguf", tmp_path / "out", dtype=dtype)
    stored, found = model.tensors(kind, np.random.default_rng(7)), unpacked(out)
    for name in model.state:
        tensor = stored[files.gguf_name("llama", name)]
        if tensor.kind == kind:
            np.testing.assert_array_equal(found[name], model_rows(model, name, by_library(tensor)), err_msg=name)
    section = config_of(out)["quantization"]
    assert section == {"group_size": 32, "bits": PACKED[kind], "mode": "affine"}
    assert tensors(out)["lm_head.scales"].dtype == (mx.float32 if dtype else mx.float16)


@pytest.mark.parametrize("kind", sorted(BLOCKS.keys() - PACKED.keys()))
def test_other_packed_types_become_floats_of_sixteen_bits(tmp_path, kind):
    model = written(tmp_path / "model.gguf", kind=kind, width=256)
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    stored = model.tensors(kind, np.random.default_rng(7))
    for name, array in tensors(out).items():
        assert array.dtype == mx.float16
        if array.ndim == 2:
            expected = by_library(stored[files.gguf_name("llama", name)])
            np.testing.assert_array_equal(np.array(array), model_rows(model, name, expected).astype(np.float16))
    assert "quantization" not in config_of(out)


def test_a_tensor_that_is_read_in_parts_is_held_once(tmp_path, monkeypatch):
    values = np.random.default_rng(0).random((100, 2048), np.float32)
    (tmp_path / "model.gguf").write_bytes(files.encode({}, {"x": files.dense(values)}))
    file = gguf_file.read_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_file, "_CHUNK", 3 * 2048)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = file.dense_values(file.tensors["x"], mx.float32, np.arange(100)[::-1])
    np.testing.assert_array_equal(found, values[::-1])
    assert mx.get_peak_memory() - before < 1.5 * values.nbytes


def mixed(path: Path) -> Tiny:
    """A file as llama.cpp's Q4_1 files are: an embedding in Q8_0, all else packed to 4 bits, one matrix in F16."""
    tokenizer = vocabularies.byte_level()
    model = tiny("llama", vocab=len(tokenizer["tokenizer.ggml.tokens"]), tied=True)
    rng = np.random.default_rng(3)
    stored = model.tensors("Q4_1", rng)
    stored["token_embd.weight"] = files.blocks(rng, stored["token_embd.weight"].shape, "Q8_0")
    stored["blk.1.ffn_down.weight"] = files.dense(model.state["model.layers.1.mlp.down_proj.weight"], "F16")
    path.write_bytes(files.encode({**model.metadata, **tokenizer}, stored))
    return model


def test_each_matrix_of_a_mixed_file_keeps_its_own_packing(tmp_path):
    mixed(tmp_path / "model.gguf")
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    section = config_of(out)["quantization"]
    assert (section["bits"], section["model.embed_tokens"]["bits"]) == (4, 8)
    assert "model.layers.1.mlp.down_proj.scales" not in tensors(out)
    model, _ = loaded(out)
    assert model.model.embed_tokens.bits == 8
    assert model.model.layers[0].mlp.down_proj.bits == 4
    assert not hasattr(model.model.layers[1].mlp.down_proj, "bits")


def test_a_mixed_file_gives_the_same_logits_packed_and_dequantized(tmp_path):
    mixed(tmp_path / "model.gguf")
    ids = mx.array([[5, 6, 7, 8, 9]])
    packed, dense = (
        np.array(loaded(convert(tmp_path / "model.gguf", tmp_path / name, dtype="float32", **options))[0](ids))
        for name, options in (("packed", {}), ("dense", {"dequantize": True}))
    )
    assert np.abs(dense).max() > 0.05
    np.testing.assert_allclose(packed, dense, atol=1e-5)


def test_the_torch_engine_opens_a_folder_with_packings_of_four_and_eight_bits(tmp_path):
    pytest.importorskip("torch", reason="the engine needs torch")
    from mlx_zip.cuda.kernels.packed import unpack
    from mlx_zip.cuda.network.checkpoint import read_tensor_folder

    mixed(tmp_path / "model.gguf")
    out = convert(tmp_path / "model.gguf", tmp_path / "out", dtype="float32")
    folder, expected = read_tensor_folder(out, "cpu"), unpacked(out)
    for name, tensor in folder.tensors.items():
        values = unpack(tensor, folder.dtype) if hasattr(tensor, "bits") else tensor
        np.testing.assert_allclose(values.numpy(), expected[name], atol=1e-6, err_msg=name)


def test_quantizing_packs_every_matrix_as_asked(tmp_path):
    written(tmp_path / "model.gguf", kind="Q8_0")
    with pytest.warns(UserWarning, match="rounded again"):
        out = convert(tmp_path / "model.gguf", tmp_path / "out", quantize=True, q_group_size=32, q_bits=4)
    dense = unpacked(convert(tmp_path / "model.gguf", tmp_path / "dense", dequantize=True))
    assert config_of(out)["quantization"]["bits"] == 4
    for name, array in unpacked(out).items():
        assert np.abs(array - dense[name]).max() < 0.03, name  # a sixteenth of the range of a group's values
    assert "lm_head.scales" in tensors(out)
    loaded(out)


def test_quantizing_a_k_type_rounds_it_as_quantizing_its_floats_does(tmp_path):
    pytest.importorskip("gguf", reason="the values of packed blocks need gguf")
    written(tmp_path / "model.gguf", kind="Q4_K", width=256)
    floats = tensors(convert(tmp_path / "model.gguf", tmp_path / "floats"))
    found = tensors(convert(tmp_path / "model.gguf", tmp_path / "out", quantize=True, q_bits=8))
    for part, expected in zip(
        ("weight", "scales", "biases"), mx.quantize(floats["lm_head.weight"], 64, 8), strict=True
    ):
        assert mx.array_equal(found[f"lm_head.{part}"], expected)


def test_quantizing_to_a_float_format_has_no_biases(tmp_path):
    written(tmp_path / "model.gguf", kind="F16")
    out = convert(tmp_path / "model.gguf", tmp_path / "out", quantize=True, q_mode="mxfp4")
    assert tensors(out)["lm_head.scales"].dtype == mx.uint8
    assert "lm_head.biases" not in tensors(out)
    loaded(out)


def test_types_that_need_the_library_are_refused_in_one_line_without_it(tmp_path, monkeypatch):
    written(tmp_path / "model.gguf", kind="Q5_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MlxZipError, match=r"needs gguf, which is not installed.*\[gguf\]"):
        convert(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_types_that_mlx_packs_need_no_library(tmp_path, monkeypatch):
    mixed(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert (convert(tmp_path / "model.gguf", tmp_path / "out") / "config.json").is_file()


def test_a_scale_too_large_for_sixteen_bits_is_refused_and_held_by_float32(tmp_path):
    tokenizer = vocabularies.byte_level()
    model = tiny("llama", vocab=len(tokenizer["tokenizer.ggml.tokens"]))
    stored = model.tensors("Q8_0", np.random.default_rng(0))
    head = stored["output.weight"]
    head.data = np.float16(600).tobytes() + head.data[2:]
    (tmp_path / "model.gguf").write_bytes(files.encode({**model.metadata, **tokenizer}, stored))
    with pytest.raises(
        ConversionError, match=r"output.weight has a scale that is not finite in float16 \(--dtype float32"
    ):
        convert(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert tensors(convert(tmp_path / "model.gguf", tmp_path / "out", dtype="float32"))["lm_head.biases"].min() < -70000


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_the_scaling_of_rotary_positions_is_that_of_the_file(tmp_path, kind):
    model = written(tmp_path / "model.gguf", rope=kind, head_dim=32)
    found = config_of(convert(tmp_path / "model.gguf", tmp_path / "out"))["rope_scaling"]
    assert {**found, "type": kind} == {**model.config["rope_scaling"], "type": kind}


def test_the_factors_of_phi3_are_those_of_the_files_tensors(tmp_path):
    model = written(tmp_path / "model.gguf", "phi3", rope="longrope", partial=0.5)
    found = config_of(convert(tmp_path / "model.gguf", tmp_path / "out"))
    for key in ("original_max_position_embeddings", "partial_rotary_factor"):
        assert found[key] == model.config[key]
    for key in ("long_factor", "short_factor"):
        np.testing.assert_allclose(found["rope_scaling"][key], model.config["rope_scaling"][key], rtol=1e-7)


def test_llama_factors_of_no_known_rule_are_refused(tmp_path):
    tokenizer = vocabularies.byte_level()
    model = tiny("llama", vocab=len(tokenizer["tokenizer.ggml.tokens"]), rope="llama3", head_dim=32)
    model.extra["rope_freqs.weight"] = files.dense(np.linspace(1, 8, 16))
    files.save(tmp_path / "model.gguf", model, tokenizer)
    with pytest.raises(ConversionError, match=r"rope_freqs.weight holds factors that do not follow"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("architecture", "rope", "keys", "told"),
    [
        ("llama", "linear", {"attn_factor": 1.7}, "attn_factor is 1.7; expected 1"),
        ("llama", "llama3", {"attn_factor": 1.7}, "attn_factor is 1.7; expected 1"),
        ("llama", None, {"attn_factor": 1.7}, "attn_factor is 1.7; expected 1"),
        ("phi3", "longrope", {"attn_factor": 1.7}, "attn_factor is 1.7; expected 1.26491"),
        ("phi3", "longrope", {"attn_factor": 1.0}, "attn_factor is 1.0; expected 1.26491"),
        ("phi3", "longrope", {"type": "longrope", "factor": 4.0}, "factor 4.0 is not supported with the type"),
        ("llama", "llama3", {"type": "yarn", "factor": 4.0}, "rope_freqs.weight beside .* type 'yarn'"),
        ("llama", "llama3", {"factor": 4.0}, "rope_freqs.weight beside .* type 'linear'"),
    ],
)
def test_a_scaling_that_the_model_would_not_have_is_refused(tmp_path, architecture, rope, keys, told):
    tokenizer = vocabularies.byte_level()
    width = 32 if rope == "llama3" else None
    model = tiny(architecture, vocab=len(tokenizer["tokenizer.ggml.tokens"]), rope=rope, head_dim=width)
    model.metadata |= {f"{architecture}.rope.scaling.{key}": one for key, one in keys.items()}
    files.save(tmp_path / "model.gguf", model, tokenizer)
    with pytest.raises(ConversionError, match=told):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_a_factor_without_a_type_is_linear_and_yarn_keeps_its_own(tmp_path):
    tokenizer = vocabularies.byte_level()
    model = tiny("llama", vocab=len(tokenizer["tokenizer.ggml.tokens"]))
    model.metadata["llama.rope.scaling.factor"] = 4.0
    files.save(tmp_path / "linear.gguf", model, tokenizer)
    found = config_of(convert(tmp_path / "linear.gguf", tmp_path / "linear"))["rope_scaling"]
    assert (found["rope_type"], found["factor"]) == ("linear", 4.0)
    model.metadata |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1.7}
    files.save(tmp_path / "yarn.gguf", model, tokenizer)
    assert config_of(convert(tmp_path / "yarn.gguf", tmp_path / "yarn"))["rope_scaling"]["attention_factor"] == 1.7


def test_a_sliding_window_of_a_llama_file_makes_it_a_mistral(tmp_path):
    written(tmp_path / "model.gguf", window=12)
    found = config_of(convert(tmp_path / "model.gguf", tmp_path / "out"))
    assert (found["model_type"], found["sliding_window"]) == ("mistral", 12)


@pytest.mark.parametrize("licence", ["apache-2.0", '["a: b" # c'])
def test_the_folder_records_the_file_and_what_it_says_of_itself(tmp_path, licence):
    model = written(tmp_path / "model.gguf", kind="Q8_0")
    files.save(tmp_path / "model.gguf", model, vocabularies.byte_level(), "Q8_0", general__license=licence)
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    source = config_of(out)["mlx_zip"]["source"]
    assert source["sha256"] == hashlib.sha256((tmp_path / "model.gguf").read_bytes()).hexdigest()
    assert (source["path"], source["name"], source["license"]) == ("model.gguf", "tiny", licence)
    assert source["types"] == {"F32": 5, "Q8_0": 16}
    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == licence
    assert "model.gguf" in card


def test_ids_and_chat_template_are_those_of_the_file(tmp_path):
    written(tmp_path / "model.gguf")
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    _, tokenizer = load(str(out))
    assert tokenizer.eos_token_ids == {2, 0}  # the file's own, and <|endoftext|>, which ends texts too
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (1, 0)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"


# ---- where a file is found


def test_a_file_is_known_by_its_first_bytes_whatever_its_name(tmp_path):
    written(tmp_path / "sha256-0123")
    assert config_of(convert(tmp_path / "sha256-0123", tmp_path / "out"))["mlx_zip"]["source"]["path"] == "sha256-0123"


@pytest.mark.skipif(sys.platform == "darwin", reason="file names on a Mac are UTF-8")
def test_a_file_whose_name_is_not_utf8_is_converted_and_its_name_recorded(tmp_path):
    path = tmp_path / "mod\udcffel.gguf"
    written(path)
    out = convert(path, tmp_path / "out")
    assert config_of(out)["mlx_zip"]["source"]["path"] == path.name
    assert "mod\\udcffel.gguf" in (out / "README.md").read_text()


def test_a_folder_with_one_file_stands_for_the_file(tmp_path):
    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder" / "model.gguf")
    (tmp_path / "folder" / "README.md").write_text("hello")
    assert config_of(convert(tmp_path / "folder", tmp_path / "out"))["model_type"] == "llama"


def test_a_folder_with_several_files_is_refused_with_their_names(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("b.gguf", "a.gguf"):
        written(tmp_path / "folder" / name)
    with pytest.raises(ConversionError, match=r"2 GGUF files; name one of them, .*/FILE: a\.gguf, b\.gguf"):
        convert(tmp_path / "folder", tmp_path / "out")


def test_another_file_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"PK" * 20)
    with pytest.raises(ConversionError, match="neither a folder nor a GGUF file"):
        convert(tmp_path / "model.bin", tmp_path / "out")


@pytest.fixture
def repository(tmp_path, monkeypatch) -> dict[str, Any]:
    """A hub repository `owner/name` with these files; records what is downloaded."""
    folder, state = tmp_path / "snapshot", {"files": ["model.gguf", "README.md"], "fetched": []}
    folder.mkdir()

    def download(name: str, patterns: list[str], revision: str | None = None, error: Any = None) -> Path:
        state["fetched"].append((name, tuple(patterns), revision))
        for file in {*patterns} & {*state["files"]}:
            written(folder / file)
        return folder

    monkeypatch.setattr(source.hub, "download_files", download)
    monkeypatch.setattr(source, "list_hub_files", lambda place: state["files"])
    return state


def test_a_hub_repository_with_one_file_stands_for_the_file(tmp_path, repository):
    source = config_of(convert(Path("owner/name"), tmp_path / "out"))["mlx_zip"]["source"]
    assert (source["path"], source["revision"]) == ("owner/name/model.gguf", "snapshot")
    assert repository["fetched"][-1] == ("owner/name", ("model.gguf",), "snapshot")


def test_a_hub_repository_with_several_files_is_refused_before_one_is_fetched(tmp_path, repository):
    repository["files"] = ["b.gguf", "a.gguf"]
    with pytest.raises(ConversionError, match=r"owner/name/FILE: a\.gguf, b\.gguf"):
        convert(Path("owner/name"), tmp_path / "out")
    assert not [one for one in repository["fetched"] if one[1][0].endswith(".gguf")]


def test_a_file_on_the_hub_can_be_named(tmp_path, repository):
    repository["files"] = ["b.gguf", "a.gguf"]
    out = convert(Path("owner/name/a.gguf"), tmp_path / "out", revision="v1")
    assert config_of(out)["mlx_zip"]["source"]["path"] == "owner/name/a.gguf"
    assert repository["fetched"] == [("owner/name", ("a.gguf",), "v1")]
    with pytest.raises(ConversionError, match=r"owner/name has no file c\.gguf"):
        convert(Path("owner/name/c.gguf"), tmp_path / "other")


# ---- flags


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--keep-adapter", {"keep_adapter": True}),
        ("--lora-only", {"lora_only": True}),
        ("--encoder-bits", {"encoder_bits": 8}),
        ("--canonical", {"canonical": False}),
        ("--pack", {"pack": "my.npz"}),
        ("--policy", {"policy": "lru"}),
        ("--trust-remote-code", {"trust_remote_code": True}),
        ("--revision", {"revision": "main"}),
    ],
)
def test_flags_for_other_sources_are_refused(tmp_path, flag, options):
    written(tmp_path / "model.gguf")
    with pytest.raises(ConversionError, match=flag):
        convert(tmp_path / "model.gguf", tmp_path / "out", **options)


def test_quantizing_a_width_that_no_group_fits_is_refused(tmp_path):
    tokenizer = vocabularies.byte_level()
    model = tiny("llama", vocab=len(tokenizer["tokenizer.ggml.tokens"]), width=48)
    files.save(tmp_path / "model.gguf", model, tokenizer)
    with pytest.raises(ConversionError, match="choose --q-group-size 32"):
        convert(tmp_path / "model.gguf", tmp_path / "out", quantize=True)


def test_the_same_file_gives_the_same_bytes_every_time(tmp_path):
    mixed(tmp_path / "model.gguf")
    one, two = (convert(tmp_path / "model.gguf", tmp_path / name) for name in ("one", "two"))
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name


def test_generation_settings_name_the_ids_that_end_a_text(tmp_path):
    written(tmp_path / "model.gguf")
    out = convert(tmp_path / "model.gguf", tmp_path / "out")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
