"""Random weights of a shape make a model that runs as any other."""

from __future__ import annotations

import pytest

from support.tiny import tiny_config

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from mlx_zip.bench.engines.random_folder import decoder_matrix_bytes, random_folder  # noqa: E402
from mlx_zip.bench.engines.shape_table import SHAPES  # noqa: E402
from mlx_zip.cuda import devices  # noqa: E402
from mlx_zip.cuda.kernels.packed import Packed, unpack  # noqa: E402
from mlx_zip.cuda.model import CudaModel  # noqa: E402
from mlx_zip.cuda.network.decoder_config import DecoderConfig  # noqa: E402
from mlx_zip.errors import ModelError  # noqa: E402


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "qwen3"])
def test_a_model_of_random_weights_runs(family, bits):
    folder = random_folder(tiny_config(family, "attention"), "cpu", torch.float32, bits, group=32)
    model = CudaModel(folder, folder.zip)
    decoder, at = model.decoder, torch.arange(5)[None]
    kv = decoder.make_kv_cache(1, 8)
    h = model.embed(at, torch.zeros((1, 0, model.width)))
    assert 0.2 < decoder.prefill(h, at, at, kv).std() < 5
    assert decoder.step(h[:, 0], torch.tensor([5]), kv).isfinite().all()


def test_packed_random_matrices_are_spread_as_dense_ones_are():
    found = []
    for bits in (None, 4, 8):
        weight = random_folder(tiny_config(), "cpu", torch.float32, bits, group=64).take_weight("x.weight", 400, 256)
        assert isinstance(weight, Packed) == (bits is not None)
        dense = unpack(weight, torch.float32) if isinstance(weight, Packed) else weight
        assert abs(dense.mean()) < 0.001
        found.append(float(dense.std()))
    assert found == pytest.approx([1 / 16] * 3, rel=0.02)


def test_weights_that_do_not_fit_are_refused_before_any_is_made(monkeypatch):
    needed = decoder_matrix_bytes(DecoderConfig.from_dict(SHAPES["phi-3.5-mini"]), torch.bfloat16, None, 64)
    assert needed == pytest.approx(2 * 3_821_079_552, rel=1e-3)
    monkeypatch.setattr(devices, "free_gpu_bytes", lambda device: 7_000_000_000)
    with pytest.raises(ModelError, match=rf"random weights of the decoder: {needed} bytes needed .* 7000000000 bytes"):
        random_folder(SHAPES["phi-3.5-mini"], "cpu")
    random_folder(SHAPES["phi-3.5-mini"], "cpu", bits=4)
