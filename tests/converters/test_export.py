"""Export to upstream's format 2: the way back gives the same tensors, and what cannot go is refused by name."""

from __future__ import annotations

import json
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_zip import cli
from mlx_zip.config import ZipConfig
from mlx_zip.converters import export as module
from mlx_zip.converters import output
from mlx_zip.errors import ConfigError, ConversionError
from mlx_zip.models.decoder_options import FAMILIES
from support.checkpoints import (
    BASE,
    HEAD_DIM,
    HEADS,
    INNER,
    VOCAB,
    WIDTH,
    edit_json,
    write_adapter,
    write_checkpoint,
    write_tokenizer,
)
from support.converting import assert_same_tensors, config_of, convert, digests
from support.exporting import export
from support.places import GOLDEN_MODELS
from support.slow_cases import slow_but

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
MODULES = {Q: (WIDTH, HEADS * HEAD_DIM, 4), DOWN: (INNER, WIDTH, 4)}


def converted(tmp_path: Path, *args: Any, **options: Any) -> Path:
    write_checkpoint(tmp_path / "src", *args, **options)
    return convert(tmp_path / "src", tmp_path / "model")


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of an exported folder."""
    return load_file(folder / "model.safetensors") | load_file(folder / "zip2zip_encoders.safetensors")


# ---- there and back


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("transformer", {}),
    "tied with positions": (
        "transformer",
        {"tie_encoders": True, "position_encoding": "learnable", "num_hidden_layers": 2},
    ),
    "projected": (
        "res_latent_attn",
        {"hidden_size": 16, "model_hidden_size": WIDTH, "causal": True, "residual": False},
    ),
}
BASES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "phi3": {"num_key_value_heads": 4, "head_dim": None},
    "qwen2": {"head_dim": None},
    "qwen3": {},
}
QUICK = [  # each encoder and each family; a family's tensors are converted alike whatever the encoder is
    ("transformer", "llama"),
    ("tied with positions", "phi3"),
    ("projected", "qwen2"),
    ("transformer", "qwen3"),
]


@pytest.mark.parametrize(("encoder", "family"), slow_but(product(ENCODERS, BASES), *QUICK))
def test_converting_what_was_exported_gives_the_model_again(encoder: str, family: str, tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src", *ENCODERS[encoder], model_type=family, **BASES[family])
    edit_json(tmp_path / "src" / "zip2zip_config.json", position_mode="base_token_end")
    first = convert(tmp_path / "src", tmp_path / "first")
    second = convert(export(first, tmp_path / "exported"), tmp_path / "second")
    assert_same_tensors(second, arrays)
    before, after = config_of(first), config_of(second)
    sections = before.pop("zip2zip"), after.pop("zip2zip")
    after.pop("architectures")
    assert after == before
    for section in sections:
        del section["source"], section["base_model_name_or_path"], section["format_version"]
    assert sections[0] == sections[1]  # the fingerprints too


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN_MODELS.iterdir() if path.is_dir()))
def test_each_golden_model_goes_there_and_back(name: str, tmp_path: Path) -> None:
    first = convert(GOLDEN_MODELS / name, tmp_path / "first")
    second = convert(export(first, tmp_path / "exported"), tmp_path / "second")
    assert_same_tensors(second, load_file(first / "model.safetensors"))
    for folder in (tmp_path / "exported", second):
        assert (folder / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def test_a_large_decoder_is_split_into_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    model = convert(tmp_path / "src", tmp_path / "model")
    monkeypatch.setattr(output, "MAX_SHARD_BYTES", 20_000)
    out = export(model, tmp_path / "out")
    assert len(list(out.glob("model-*.safetensors"))) > 2
    monkeypatch.undo()
    assert_same_tensors(convert(out, tmp_path / "again"), arrays)


# ---- what is written


def test_mlx_lm_runs_the_exported_folder_as_the_plain_decoder(tmp_path: Path) -> None:
    out = export(convert(GOLDEN_MODELS / "llama_transformer_tied_lora", tmp_path / "model"), tmp_path / "out")
    model, tokenizer = mlx_lm.load(str(out))
    assert type(model).__module__ == "mlx_lm.models.llama"
    last = list(mlx_lm.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=4))[-1]
    assert last.generation_tokens >= 1


def test_the_folder_holds_what_the_package_reads_and_nothing_of_ours(tmp_path: Path) -> None:
    out = export(converted(tmp_path), tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "zip2zip_config.json",
        "zip2zip_encoders.safetensors",
    }
    made = json.loads((out / "zip2zip_config.json").read_text())
    assert (made["format_version"], made["base_model_name_or_path"]) == (2, ".")
    assert made.keys() == {
        "format_version",
        "base_model_name_or_path",
        "position_mode",
        "encoder_type",
        "encoder",
        "compression",
    }
    original = json.loads((tmp_path / "src" / "zip2zip_config.json").read_text())
    assert made["compression"] == original["compression"]
    assert ZipConfig.from_dict(made, pad_id=2).encoder == ZipConfig.from_dict(original, pad_id=2).encoder


def test_the_decoders_config_is_the_base_models_own(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = converted(tmp_path, rope_theta=None, rope_parameters=rope, architectures=["LlamaForCausalLM"])
    found = config_of(export(model, tmp_path / "out"))
    expected = json.loads((tmp_path / "src" / "base" / "config.json").read_text())
    assert found == {**expected, "torch_dtype": "float32"}


def test_encoders_and_decoder_lie_in_files_of_their_own_that_torch_accepts(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    out = export(convert(tmp_path / "src", tmp_path / "model"), tmp_path / "out")
    decoder, encoders = (out / name for name in ("model.safetensors", "zip2zip_encoders.safetensors"))
    assert all(name.startswith(("input_encoder.", "output_encoder.")) for name in load_file(encoders))
    assert load_file(decoder).keys() | load_file(encoders).keys() == arrays.keys()
    for path in (decoder, encoders):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert header["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_supported_decoder_has_its_name_in_transformers(kind: str) -> None:
    config = {**BASE, "zip2zip": {"base_model_type": kind}}
    made = module._decoder_config_json(config, "float32")
    assert (made["model_type"], made["architectures"]) == (kind, [FAMILIES[kind].architecture])


def test_two_exports_give_identical_files(tmp_path: Path) -> None:
    model = converted(tmp_path)
    assert digests(export(model, tmp_path / "a")) == digests(export(model, tmp_path / "b"))


def test_dtype_casts_decoder_and_encoders(tmp_path: Path) -> None:
    out = export(converted(tmp_path), tmp_path / "out", dtype="float16")
    assert {array.dtype for array in tensors(out).values()} == {np.dtype(np.float16)}
    assert config_of(out)["torch_dtype"] == "float16"


# ---- what has to be undone first


def test_a_quantized_model_is_dequantized_with_a_warning(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    quantized = convert(tmp_path / "src", tmp_path / "q", quantize=True, q_group_size=32, encoder_bits=8)
    with pytest.warns(UserWarning, match="q is quantized"):
        out = export(quantized, tmp_path / "out")
    assert "quantization" not in config_of(out)
    whole = convert(quantized, tmp_path / "whole", dequantize=True)
    assert_same_tensors(whole, tensors(out))


@pytest.mark.filterwarnings("ignore:kept is quantized")
@pytest.mark.parametrize("options", [{}, {"quantize": True, "q_group_size": 32}], ids=["plain", "quantized"])
def test_a_kept_adapter_is_merged_with_a_warning(options: dict[str, Any], tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    lora = write_adapter(tmp_path / "src", MODULES)
    kept = convert(tmp_path / "src", tmp_path / "kept", keep_adapter=True, **options)
    with pytest.warns(UserWarning, match="adapter in kept/adapters is merged"):
        found = tensors(export(kept, tmp_path / "out"))
    plain = tensors(_exported_without_adapter(kept, tmp_path)) if options else arrays
    for name, array in plain.items():
        expected = array.astype(np.float64)
        if name.removesuffix(".weight") in MODULES:
            module_name = name.removesuffix(".weight")
            expected = expected + 2.0 * lora[f"{module_name}.B"].astype(np.float64) @ lora[f"{module_name}.A"]
        np.testing.assert_allclose(found[name], expected, atol=1e-6, err_msg=name)


def _exported_without_adapter(kept: Path, tmp_path: Path) -> Path:
    (kept / "adapters").rename(tmp_path / "aside")
    with pytest.warns(UserWarning, match="quantized"):
        return export(kept, tmp_path / "plain")


def test_a_half_precision_model_gets_its_adapter_in_float32_before_it_is_cast(tmp_path: Path) -> None:
    arrays = write_checkpoint(tmp_path / "src")
    lora = write_adapter(tmp_path / "src", MODULES)
    kept = convert(tmp_path / "src", tmp_path / "kept", keep_adapter=True, dtype="float16")
    with pytest.warns(UserWarning, match="merged"):
        found = tensors(export(kept, tmp_path / "out"))[f"{Q}.weight"]
    half = mx.array(arrays[f"{Q}.weight"]).astype(mx.float16).astype(mx.float32)
    expected = half + 2.0 * (mx.array(lora[f"{Q}.B"]) @ mx.array(lora[f"{Q}.A"]))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, np.array(expected.astype(mx.float16)))


def test_a_damaged_adapter_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    write_adapter(tmp_path / "src", MODULES)
    kept = convert(tmp_path / "src", tmp_path / "kept", keep_adapter=True)
    (kept / "adapters" / "adapters.safetensors").write_bytes(b"torn")
    with pytest.raises(ConversionError, match="adapters cannot be merged"):
        export(kept, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_starting_codebook_is_refused_unless_it_is_dropped(tmp_path: Path) -> None:
    model = converted(tmp_path)
    config = config_of(model)
    config["zip2zip"]["start"] = [[7, 8], [9, 10, 11]]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=r"pack of 2 entries.*--drop-start"):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.warns(UserWarning, match="pack of 2 entries that the model begins with is left out"):
        out = export(model, tmp_path / "out", drop_start=True)
    assert "start" not in json.loads((out / "zip2zip_config.json").read_text())


# ---- refused


@pytest.mark.parametrize(("kind", "reason"), [("averaging", "knows no such kind"), ("attention", "fails as soon")])
def test_an_encoder_that_the_package_cannot_run_is_refused(kind: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=f"{kind}.*{reason}"):
        export(converted(tmp_path, kind), tmp_path / "out")


def test_a_policy_that_the_package_does_not_know_is_refused(tmp_path: Path) -> None:
    """Nor is the folder written; the converter has kept the policy that stood in the checkpoint's config."""
    write_checkpoint(tmp_path / "src")
    edited = json.loads((tmp_path / "src" / "zip2zip_config.json").read_text())
    edited["compression"]["policy"] = "lru"
    (tmp_path / "src" / "zip2zip_config.json").write_text(json.dumps(edited))
    model = convert(tmp_path / "src", tmp_path / "model")
    assert config_of(model)["zip2zip"]["compression"]["policy"] == "lru"
    with pytest.raises(ConversionError, match="policy 'lru'"):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_codebook_is_refused(tmp_path: Path) -> None:
    model = converted(tmp_path)
    config = config_of(model)
    config["zip2zip"]["compression"]["max_codebook_size"] = 0
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="max_codebook_size 0"):
        export(model, tmp_path / "out")


def test_a_pad_id_that_the_tokenizer_does_not_give_is_refused(tmp_path: Path) -> None:
    model = converted(tmp_path)
    write_tokenizer(model, VOCAB - 8, pad_token="<unk>")
    with pytest.raises(ConversionError, match=r"pad id is 2, but .*: 3"):
        export(model, tmp_path / "out")


def test_a_tokenizer_longer_than_the_boundary_is_refused(tmp_path: Path) -> None:
    model = converted(tmp_path)
    write_tokenizer(model, VOCAB + 1)
    with pytest.raises(ConfigError, match=f"{VOCAB + 1} ids but hypertokens begin at {VOCAB}"):
        export(model, tmp_path / "out")


def test_what_is_no_mlx_zip_model_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    for folder in (tmp_path / "src", tmp_path / "src" / "base"):
        with pytest.raises(ConversionError, match=f"{folder.name} is not an mlx_zip model"):
            export(folder, tmp_path / "out")


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    model = converted(tmp_path)
    with pytest.raises(ConversionError, match=r"already exists.*--out"):
        export(model, model)
    with pytest.raises(ConversionError, match="dtype 'int8'"):
        export(model, tmp_path / "out", dtype="int8")


@pytest.mark.parametrize("scaled", [False, True], ids=["llama", "gemma"])
def test_gemma_comes_with_a_warning_about_the_package(scaled: bool, tmp_path: Path) -> None:
    base = {"model_type": "gemma", "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"} if scaled else {}
    model = converted(tmp_path, **base)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(model, tmp_path / "out")
    assert any("embedding scale" in str(w.message) for w in caught) == scaled


# ---- the command


def test_the_command_prints_the_folder_and_its_warnings_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "src")
    model = convert(tmp_path / "src", tmp_path / "q", quantize=True, q_group_size=32)
    capsys.readouterr()
    out = tmp_path / "out"
    assert cli.main(["export", "--model", str(model), "--out", str(out), "--dtype", "float32"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    assert "warning: q is quantized" in captured.err
    assert cli.main(["export", "--model", str(model), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out} already exists; delete it or choose another --out\n"


def test_without_out_the_folder_has_the_published_packages_name() -> None:
    parser = cli.command_parser("export", "x")
    assert parser.parse_args(["--model", "m"]).out == "zip2zip_model"
