"""Folders that the PyTorch engine reads, and the one line that it says of those it cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_zip.errors import ConfigError, ModelError
from support.torch_folders import make_model, pack, save

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

from safetensors.torch import load_file, save_file  # noqa: E402

from mlx_zip.cuda import devices  # noqa: E402
from mlx_zip.cuda.kernels.packed import Packed, dequantize, unpack  # noqa: E402
from mlx_zip.cuda.model import CudaModel, open_model  # noqa: E402
from mlx_zip.cuda.network.checkpoint import read_tensor_folder  # noqa: E402
from mlx_zip.cuda.network.decoder import Decoder, make_kv_cache  # noqa: E402
from mlx_zip.cuda.network.decoder_config import DecoderConfig  # noqa: E402
from mlx_zip.cuda.network.linear import Linear, join_by_rows  # noqa: E402

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(make_model("llama"), tmp_path / "model")


@pytest.fixture
def packed_folder(tmp_path: Path) -> Path:
    model = make_model("llama", intermediate_size=96)
    return save(model, tmp_path / "model", quantization=pack(model, 4, 32, {DOWN: {"bits": 8, "group_size": 32}}))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors, or removes those whose new value is None; `__` in a name stands for a dot."""
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(file), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


def error_of(folder: Path, kind: type[Exception] = ModelError, **options: Any) -> str:
    """Returns the one line that opening the folder ends with."""
    with pytest.raises(kind) as caught:
        Decoder(read_tensor_folder(folder, "cpu", **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is read


@pytest.mark.parametrize("name", DTYPES)
def test_a_folder_keeps_its_own_dtype_and_its_decoder_runs_in_it(name, tmp_path):
    folder = read_tensor_folder(save(make_model("qwen3"), tmp_path / "model", dtype=DTYPES[name]), "cpu")
    assert str(folder.dtype) == f"torch.{name}"
    assert run(Decoder(folder)).dtype == folder.dtype


@pytest.mark.parametrize("name", DTYPES)
def test_a_folder_is_read_in_the_dtype_that_is_asked_for(name, packed_folder):
    folder = read_tensor_folder(packed_folder, "cpu", dtype=name)
    weight = folder.tensors["model.embed_tokens.weight"]
    assert isinstance(weight, Packed)
    assert str(weight.scales.dtype) == f"torch.{name}"
    exact = run(Decoder(read_tensor_folder(packed_folder, "cpu", dtype=torch.float32)))
    found = run(Decoder(folder))
    assert found.dtype == folder.dtype
    torch.testing.assert_close(found.float(), exact, atol=0.1, rtol=0.1)


def run(decoder: Decoder) -> torch.Tensor:
    """Returns the output of two ids that are read and one that is stepped."""
    kv, h = decoder.make_kv_cache(1, 8), torch.ones((1, 2, decoder.config.width), dtype=decoder.dtype)
    at = torch.arange(2)[None]
    decoder.prefill(h, at, at, kv)
    out = decoder.step(h[:, 0], torch.tensor([2]), kv)
    assert kv.lengths.tolist() == [3]
    assert out.isfinite().all()
    return out


def test_a_plain_model_s_folder_is_read(tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = config.pop("zip2zip")["base_model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    read = read_tensor_folder(folder, "cpu")
    assert read.zip is None
    run(Decoder(read))


def test_a_converted_model_s_folder_keeps_embedding_head_and_encoders(tmp_path):
    folder = read_tensor_folder(save(make_model("llama", encoder="attention"), tmp_path / "model"), "cpu")
    assert folder.zip is not None
    Decoder(folder)
    assert {name.split(".")[0] for name in folder.tensors} == {"model", "lm_head", "input_encoder", "output_encoder"}
    assert [name for name in folder.tensors if name.startswith("model.")] == ["model.embed_tokens.weight"]


def test_tensors_can_be_left_out(tmp_path):
    path = save(make_model("llama", encoder="attention"), tmp_path / "model")
    folder = read_tensor_folder(path, "cpu", skipped_prefixes=("input_encoder.", "output_encoder."))
    assert not any("encoder" in name for name in folder.tensors)


def test_a_tied_head_s_second_copy_is_not_read(tmp_path):
    path = save(make_model("llama", tie_word_embeddings=True), tmp_path / "model")
    edit_tensors(path, lm_head__weight=torch.zeros(3))
    assert "lm_head.weight" not in read_tensor_folder(path, "cpu").tensors


# ---- packed matrices


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_packed_matrix_has_the_values_that_mlx_gives_it(group, bits):
    matrix = mx.random.normal((24, 256))
    words, scales, biases = mx.quantize(matrix, group, bits)
    parts = [torch.from_numpy(np.array(part)) for part in (words.view(mx.int32), scales, biases)]
    packed = Packed(parts[0], parts[1], parts[2], bits, group)
    expected = torch.from_numpy(np.array(mx.dequantize(words, scales, biases, group, bits)))
    torch.testing.assert_close(unpack(packed, torch.float32), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(dequantize(packed), expected, atol=1e-6, rtol=0)


def random_packed(rows: int, bits: int, group: int) -> Packed:
    words = torch.randint(-(2**31), 2**31 - 1, (rows, 128 * bits // 32), dtype=torch.int32)
    return Packed(words, torch.rand(rows, 128 // group), torch.rand(rows, 128 // group), bits, group)


def test_matrices_packed_in_different_ways_are_joined_without_loss():
    parts = [random_packed(3, 4, 64), random_packed(5, 8, 128), random_packed(2, 4, 32)]
    whole = join_by_rows([Linear(parts[0]), Linear(parts[1], torch.arange(5.0)), Linear(parts[2])])
    assert isinstance(whole.weight, Packed)
    whole.weight.check()
    assert (whole.weight.bits, whole.weight.group_size) == (8, 32)
    assert torch.equal(unpack(whole.weight, torch.float32), torch.cat([unpack(p, torch.float32) for p in parts]))
    assert whole.bias is not None
    assert whole.bias.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 0, 0]


def test_a_dense_and_a_packed_matrix_are_joined_as_a_dense_one():
    packed, dense = random_packed(3, 4, 64), torch.rand(2, 128)
    whole = join_by_rows([Linear(packed), Linear(dense)])
    assert isinstance(whole.weight, torch.Tensor)
    assert torch.equal(whole.weight, torch.cat([unpack(packed, torch.float32), dense]))


# ---- what is refused


def test_a_missing_folder_is_named(tmp_path):
    assert f"{tmp_path / 'none'}: no such model folder" in error_of(tmp_path / "none")


def test_a_folder_without_weights_is_named(folder):
    (folder / "model.safetensors").unlink()
    assert error_of(folder) == f"{folder}: there is no model*.safetensors"


def test_a_missing_shard_is_named(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert error_of(folder).endswith("index.json names files that are missing: model-2.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_cannot_be_read_is_named(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json cannot be read" in error_of(folder)


def test_a_damaged_file_is_named(folder):
    (folder / "model.safetensors").write_bytes(b"\x01")
    assert f"{folder / 'model.safetensors'} cannot be read" in error_of(folder)


def test_a_tensor_in_two_files_is_named(folder):
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "model-extra.safetensors")
    assert error_of(folder).endswith("model.norm.weight is in model-extra.safetensors too")


@pytest.mark.parametrize("name", ["model.norm.weight", f"{DOWN}.weight"])
def test_a_missing_tensor_is_named(folder, name):
    edit_tensors(folder, **{name: None})
    assert error_of(folder) == f"{folder}: the tensor {name} is missing"


def test_a_tensor_of_a_wrong_shape_is_named_with_both_shapes(folder):
    edit_tensors(folder, **{f"{DOWN}.weight": torch.zeros(64, 47)})
    expected = f"{folder / 'model.safetensors'}: {DOWN}.weight has shape [64, 47], expected [64, 48]"
    assert error_of(folder) == expected


def test_a_tensor_that_no_layer_has_is_named(folder):
    edit_tensors(folder, **{"model.layers.1.extra.weight": torch.zeros(2)})
    assert error_of(folder).endswith("model.safetensors: model.layers.1.extra.weight belongs to no layer of a llama")


@pytest.mark.parametrize("name", ["extra.weight", "input_encoder.layers.2.w1.weight"])
def test_a_tensor_that_no_part_of_the_model_has_is_named(folder, name):
    edit_tensors(folder, **{name: torch.zeros(2)})
    with pytest.raises(ModelError, match=f"model.safetensors: {name} is no part of this model"):
        open_model(folder, "cpu")


def test_encoders_are_ignored_where_a_model_is_used_without_hypertokens(tmp_path):
    read = read_tensor_folder(save(make_model("llama", encoder="attention"), tmp_path / "model"), "cpu")
    assert not CudaModel(read, None).has_hypertokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_supported_is_named(folder, dtype):
    edit_tensors(folder, **{f"{DOWN}.weight": torch.zeros(64, 48, dtype=dtype)})
    assert f"{folder / 'model.safetensors'}: {DOWN}.weight has the dtype" in error_of(folder)


def test_a_norm_of_another_dtype_is_named(folder):
    edit_tensors(folder, **{"model.norm.weight": torch.zeros(64, dtype=torch.float64)})
    assert "model.norm.weight has the dtype F64; supported: BF16, F16, F32" in error_of(folder)


@pytest.mark.parametrize("dtype", ["int8", torch.float64])
def test_a_dtype_that_cannot_be_asked_for_is_named(folder, dtype):
    assert error_of(folder, dtype=dtype) == f"dtype {dtype} is not supported; supported: bfloat16, float16, float32"


@pytest.mark.parametrize("kind", ["gemma", "mamba", None])
def test_an_architecture_that_is_not_supported_is_named(folder, kind):
    edit_config(folder, zip2zip={"base_model_type": kind})
    expected = f"model_type {kind!r} is not supported on PyTorch; supported: llama, mistral, phi3, qwen2, qwen3"
    assert error_of(folder, ConfigError) == expected


def test_a_converted_model_without_its_section_is_refused(folder):
    edit_config(folder, zip2zip=None)
    assert "config.json has no zip2zip section" in error_of(folder, ConfigError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type 'dynamic' is not supported for llama"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear': factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_type 'linear': a parameter is not a number"),
        ({"partial_rotary_factor": 3.0}, "partial_rotary_factor rotates 48 of 16 dimensions"),
        ({"hidden_act": "gelu"}, "hidden activation 'gelu' is not supported for llama"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number of at least 0, got 'x'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number of at least 0, got nan"),
        ({"layer_types": 1}, "layer_types other than full_attention are not supported for llama"),
        ({"layer_types": [[]]}, "layer_types other than full_attention are not supported for llama"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf"),
    ],
)
def test_an_option_that_is_not_supported_is_named(folder, changes, message):
    edit_config(folder, **changes)
    assert message in error_of(folder, ConfigError)


def test_long_factors_of_a_wrong_number_are_named(tmp_path):
    folder = save(make_model("phi3"), tmp_path / "model")
    edit_config(folder, rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]})
    assert error_of(folder, ConfigError) == "rope short_factor has 1 factors, the heads need 8"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "is quantized, but config.json has no quantization section"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "is quantized in the mode 'mxfp4'; supported: affine"),
        ({"bits": 3, "group_size": 32}, "is quantized to 3 bits in groups of 32; supported: 4 or 8 bits"),
        ({"bits": 4.0, "group_size": 32}, "is quantized to 4.0 bits in groups of 32; supported: 4 or 8 bits"),
        ({"bits": 4, "group_size": 16}, "is quantized to 4 bits in groups of 16; supported: 4 or 8 bits"),
        ({"bits": 4, "group_size": 64}, "scales has shape"),
    ],
)
def test_a_quantization_that_is_not_supported_is_named_with_file_and_tensor(packed_folder, record, message):
    edit_config(packed_folder, quantization=record)
    found = error_of(packed_folder)
    assert message in found
    assert found.startswith(f"{packed_folder / 'model.safetensors'}: ")
    assert ".weight" in found


def test_a_packed_matrix_without_scales_is_named(packed_folder):
    edit_tensors(packed_folder, **{f"{DOWN}.scales": None})
    assert f"{DOWN}.weight is quantized, but its scales or biases are missing" in error_of(packed_folder)


@pytest.mark.parametrize("shape", [(), (8,), (1, 64, 8)])
def test_a_packed_tensor_that_is_no_matrix_is_named(packed_folder, shape):
    edit_tensors(packed_folder, **{f"{DOWN}.weight": torch.zeros(shape, dtype=torch.uint32)})
    assert f"{packed_folder / 'model.safetensors'}: {DOWN}.weight: words" in error_of(packed_folder)


@pytest.mark.parametrize("ends", ["x", 0.5, True, [1, "x"], {"a": 1}])
def test_ids_that_end_a_text_and_are_no_ids_are_named(folder, ends):
    edit_config(folder, eos_token_id=ends)
    with pytest.raises(ConfigError, match="eos_token_id must be an id, a list of ids or null"):
        open_model(folder, "cpu")


def test_a_packed_norm_is_refused(packed_folder):
    name = "model.layers.0.input_layernorm"
    packed = {"weight": torch.zeros(1, 8, dtype=torch.uint32), "scales": torch.zeros(1, 2), "biases": torch.zeros(1, 2)}
    edit_tensors(packed_folder, **{f"{name}.{part}": value for part, value in packed.items()})
    assert f"{name}.weight has shape [1, 64], expected [64]" in error_of(packed_folder)


# ---- devices and memory


def test_a_machine_without_a_card_says_so():
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    with pytest.raises(ModelError, match=r"^device cuda: no usable CUDA card here: "):
        devices.find_device("cuda")
    assert devices.find_device() == torch.device("cpu")


def test_an_old_driver_is_named_in_one_line(monkeypatch):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 1).\nPlease update it")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(
        ModelError, match=r"^device cuda:0: no usable CUDA card here: The NVIDIA driver .* \(found version 1\).$"
    ):
        devices.find_device("cuda:0")


def test_a_card_needs_triton(monkeypatch):
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    with pytest.raises(ModelError, match=r"^device cuda:0: triton is not installed: pip install 'mlx-zip\[cuda\]'$"):
        devices.find_device("cuda:0")
    assert devices.find_device("cpu") == torch.device("cpu")


def test_bfloat16_on_a_card_without_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ModelError, match=r"device cuda has compute capability 7.5; bfloat16 needs 8.0"):
        devices.raise_if_dtype_unsupported(torch.bfloat16, torch.device("cuda"))
    devices.raise_if_dtype_unsupported(torch.float16, torch.device("cuda"))
    devices.raise_if_dtype_unsupported(torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:x"])
def test_a_device_that_is_not_supported_is_named(name):
    with pytest.raises(ModelError, match=f"^device '{name}'"):
        devices.find_device(name)


def test_weights_that_do_not_fit_are_refused_before_any_is_read(folder, monkeypatch):
    monkeypatch.setattr(devices, "free_gpu_bytes", lambda device: 1000)
    monkeypatch.setattr("mlx_zip.cuda.network.checkpoint._read_tensors", lambda *_: pytest.fail("tensors were read"))
    whole = sum(value.numel() for value in load_file(folder / "model.safetensors").values())
    layers = sum(v.numel() for n, v in load_file(folder / "model.safetensors").items() if ".layers." in n)
    needed = 2 * whole + layers  # two bytes each, and one of two layers once more
    expected = f"{folder}: weights: {needed} bytes needed on cpu, 1000 bytes are free"
    assert error_of(folder, dtype="bfloat16") == expected


def test_packed_weights_are_counted_as_they_are_stored(packed_folder, monkeypatch):
    monkeypatch.setattr(devices, "free_gpu_bytes", lambda device: 1000)
    tensors = load_file(packed_folder / "model.safetensors")
    bytes_of = {name: value.numel() * (4 if value.dtype == torch.uint32 else 2) for name, value in tensors.items()}
    needed = sum(bytes_of.values()) + sum(n for name, n in bytes_of.items() if "model.layers." in name) // 2
    assert f": {needed} bytes needed" in error_of(packed_folder, dtype="float16")


def test_caches_that_do_not_fit_are_refused(folder, monkeypatch):
    config, device = DecoderConfig.from_dict(json.loads((folder / "config.json").read_text())), torch.device("cpu")
    needed = 2 * 2 * 3 * 2 * 100 * 16 * 2  # keys and values, layers, sequences, heads, ids, columns, bytes
    assert 300 * config.kv_bytes_per_id(torch.bfloat16) == needed
    monkeypatch.setattr(devices, "free_gpu_bytes", lambda device: needed - 1)
    expected = f"KV caches of 3 x 100 ids: {needed} bytes needed on cpu, {needed - 1} bytes are free"
    with pytest.raises(ModelError, match=expected):
        make_kv_cache(config, 3, 100, torch.bfloat16, device)
    monkeypatch.setattr(devices, "free_gpu_bytes", lambda device: needed)
    assert make_kv_cache(config, 3, 100, torch.bfloat16, device).capacity == 100
