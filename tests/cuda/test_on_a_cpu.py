"""On a CPU weights are kept in as few bits as lose nothing, and products and head are those of the references."""

from __future__ import annotations

from itertools import islice

import pytest

torch = pytest.importorskip("torch")

from mlx_zip.cuda.kernels.head import joint_head  # noqa: E402
from mlx_zip.cuda.kernels.packed import Packed, dequantize  # noqa: E402
from mlx_zip.cuda.network import linear  # noqa: E402
from mlx_zip.cuda.network.cpu_decoder import joint_head_on_cpu  # noqa: E402
from mlx_zip.cuda.network.linear import (  # noqa: E402
    HALF_LARGEST,
    HalfMatrix,
    Linear,
    has_bfloat16_units,
    has_float16_products,
    join_by_rows,
)

with_half = pytest.mark.skipif(not has_float16_products(), reason="PyTorch has no FBGEMM here")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(scales: torch.dtype) -> Packed:
    words = torch.arange(8 * 8, dtype=torch.int32).view(8, 8) * 0x01234567
    return Packed(words, random(8, 2).to(scales), random(8, 2, seed=1).to(scales), 4, 32)


def prepare_weight(weight, bias=None, dtype=torch.float32):
    """Returns weight and bias of a product that is prepared for a CPU."""
    made = Linear(weight, bias).prepare_for_cpu(dtype)
    return made.weight, made.bias


@with_half
@pytest.mark.parametrize("count", [1, 3, 17, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_a_matrix_in_float16_is_multiplied_in_float32(count, biased):
    matrix, x, bias = random(33, 70), random(count, 70, seed=1), random(33, seed=2) if biased else None
    expected = x.double() @ matrix.half().double().T + (0 if bias is None else bias)
    torch.testing.assert_close(HalfMatrix(matrix, bias)(x), expected.float(), atol=1e-5, rtol=1e-5)
    assert (HalfMatrix(matrix, bias).shape, HalfMatrix(matrix, bias).nbytes) == ((33, 70), 33 * 70 * 2)


@with_half
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_matrix_that_its_folder_has_in_16_bits_is_kept_in_16(dtype):
    weight, bias = prepare_weight(random(8, 64).to(dtype), random(8))
    assert isinstance(weight, HalfMatrix)
    assert bias is None


@with_half
def test_a_matrix_in_float32_is_kept_in_16_bits_if_it_loses_nothing():
    exact = random(8, 64)
    weight, _ = prepare_weight(exact)
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, exact)
    assert isinstance(prepare_weight(exact.bfloat16().float())[0], HalfMatrix)
    tiny = torch.full((8, 64), 1.01 * 2.0**-20)  # below float16's normal range
    assert isinstance(prepare_weight(tiny)[0], HalfMatrix)


@with_half
def test_a_packed_matrix_is_unpacked_in_as_many_bits_as_its_scales_have():
    assert isinstance(prepare_weight(packed(torch.float16))[0], HalfMatrix)
    weight, _ = prepare_weight(packed(torch.float32))
    torch.testing.assert_close(weight, dequantize(packed(torch.float32)), atol=4e-6, rtol=0)  # float16 is 1e-3 off


def test_numbers_beyond_float16_stay_as_they_are():
    large = torch.full((2, 32), 2 * HALF_LARGEST).bfloat16()
    weight, _ = prepare_weight(large)
    assert torch.equal(weight, large.float())
    assert prepare_weight(torch.zeros((0, 32)))[0].shape == (0, 32)


def test_where_pytorch_cannot_multiply_float16_or_bfloat16_is_asked_for_a_matrix_is_dense(monkeypatch):
    bias = random(8)
    assert prepare_weight(random(8, 64).bfloat16(), bias, torch.bfloat16)[0].dtype == torch.bfloat16
    monkeypatch.setattr(linear, "has_float16_products", lambda: False)
    weight, rest = prepare_weight(random(8, 64).bfloat16(), bias)
    assert (weight.dtype, rest) == (torch.float32, bias)
    whole = join_by_rows([Linear(random(8, 64)), Linear(random(4, 64))]).prepare_for_cpu(torch.float32)
    assert whole(random(1, 64)).shape == (1, 12)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"amx_bf16": True, "avx512_bf16": False}, True),
        ({"amx_bf16": False, "avx512_bf16": True}, True),
        ({"amx_bf16": False, "avx512_bf16": False, "avx2": True}, False),
        ({}, False),
    ],
)
def test_pytorch_says_what_the_processor_multiplies(found, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert has_bfloat16_units.__wrapped__() is expected


def test_a_pytorch_that_does_not_say_what_the_processor_multiplies_is_not_asked(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert has_bfloat16_units.__wrapped__() is False


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("slots", [0, 5, 9])
def test_the_head_gives_what_the_reference_gives(count, slots):
    boundary, matrix, h = 40, random(48, 16), random(count, 16, seed=1)
    rows, installed = random(count, 9, 16, seed=2), torch.zeros((count, 9), dtype=torch.bool)
    for row in range(count):
        installed[row, : max(0, slots - row)] = True
    rows[~installed] = torch.nan
    expected = joint_head(h, matrix, rows, installed, boundary, True)
    scores = Linear(matrix).prepare_for_cpu(torch.float32)
    found = joint_head_on_cpu(h, scores, rows, installed, boundary, True)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(joint_head_on_cpu(h, scores, rows, installed, boundary, False).best, expected.best)


# ---- folders


@with_half
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_folder_in_16_bits_emits_what_mlx_emits_in_float32(dtype, tmp_path):
    mx = pytest.importorskip("mlx.core")
    from mlx.utils import tree_map

    from mlx_zip.bench.engines.cuda_engines import generate_greedily
    from mlx_zip.cuda.model import open_model
    from support.mlx_greedy import greedy
    from support.tiny import base_ids, tiny_model
    from support.torch_folders import save

    mlx, prompt = tiny_model(encoder="res_latent_attn"), base_ids(30)
    kind = getattr(mx, dtype)
    mlx.update(tree_map(lambda one: one.astype(kind).astype(mx.float32), mlx.parameters()))
    model = open_model(save(mlx, tmp_path / "m", dtype=kind), "cpu")
    assert model.dtype == torch.float32
    assert all(isinstance(layer.qkv.weight, HalfMatrix) for layer in model.decoder.layers)
    assert [one for one, _ in islice(generate_greedily(model, prompt, 1000), 50)] == greedy(mlx, prompt, 50)
