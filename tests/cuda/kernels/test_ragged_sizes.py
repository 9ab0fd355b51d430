"""Every kernel at sizes drawn at random, against float64: outputs are poisoned and borders guarded."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels import hyper_rows, products  # noqa: E402
from mlx_zip.cuda.kernels.attention import (  # noqa: E402
    Rotation,
    decode_attention,
    reference_decode_attention,
    reference_rope_and_cache,
    rope_and_cache,
)
from mlx_zip.cuda.kernels.head import joint_head, reference_joint_head  # noqa: E402
from mlx_zip.cuda.kernels.hyper_rows import hyper_embedding, reference_hyper_embedding  # noqa: E402
from mlx_zip.cuda.kernels.packed import dequantize, unpack  # noqa: E402
from mlx_zip.cuda.kernels.products import matvec, reference_matvec  # noqa: E402
from mlx_zip.cuda.kernels.triton import attention as attention_triton  # noqa: E402
from mlx_zip.cuda.kernels.triton import head as head_triton  # noqa: E402
from mlx_zip.cuda.kernels.triton import products as products_triton  # noqa: E402
from support.slow_cases import slow_but  # noqa: E402

HEAD_WIDTHS = (64, 80, 96, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # for sums of many products


@pytest.fixture(params=slow_but(range(5), 0, 1, 2))
def draw(request) -> random.Random:
    """Draws the sizes of one case; the numbers themselves follow from the same seed."""
    torch.manual_seed(request.param)
    return random.Random(f"{request.node.originalname} {request.param}")


@pytest.fixture
def matrix(guard, random_packed):
    """Returns a function that makes a matrix, dense or packed as drawn, and the same one in float64."""

    def make(draw, rows, dtype, scale=1.0):
        if draw.random() < 0.4:
            dense = guard((scale * torch.randn(rows, draw.randint(1, 300))).to(dtype))
            return dense, dense.double()
        bits, group = draw.choice((4, 8)), draw.choice((32, 64, 128))
        packed, _ = random_packed(rows, group * draw.randint(1, 4), bits, group, dtype)
        packed.scales.mul_(scale), packed.biases.mul_(scale)
        return packed, dequantize(packed._replace(scales=packed.scales.double(), biases=packed.biases.double()))

    return make


def near(got, wanted, dtype, roundings=1):
    """Compares with float64; errors may be a few roundings of the largest value, and nothing is NaN that should not."""
    spread = max(1.0, wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item()) if wanted.numel() else 1.0
    tolerance = roundings * LOOSE[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * spread, equal_nan=True)


def test_products_with_any_of_what_precedes_and_follows_them(guard, matrix, draw):
    batch, dtype, gated = draw.randint(1, 8), draw.choice(DTYPES), draw.random() < 0.5
    rows = draw.randint(1, 40) * (2 if gated else 1)
    weight, exact = matrix(draw, rows, dtype, 0.05)
    x = guard(torch.randn(batch, weight.shape[1]).to(dtype))
    bias, residual = torch.randn(rows), torch.randn(batch, rows // 2 if gated else rows)
    factors = 1 + torch.rand(weight.shape[1])
    bias, residual, factors = (
        guard(one.to(dtype)) if draw.random() < 0.5 else None for one in (bias, residual, factors)
    )
    given = None if factors is None else (factors, 1e-5)
    got = matvec(x, weight, bias, given, residual, gated, impl="triton")
    wide = [None if one is None else one.double() for one in (bias, residual, factors)]
    wanted = reference_matvec(
        x.double(), exact, wide[0], wide[2] if wide[2] is None else (wide[2], 1e-5), *wide[1:2], gated
    )
    near(got, wanted, dtype, 2)


def test_attention_of_all_groups_widths_and_windows(guard, draw):
    batch, group, kv_heads = draw.randint(1, 8), draw.randint(1, 8), draw.randint(1, 2)
    width, places, dtype = draw.choice(HEAD_WIDTHS), draw.randint(1, 150), draw.choice(DTYPES)
    window = draw.choice((None, draw.randint(1, 1 + places)))
    lengths = [draw.randint(0, places) for _ in range(batch)]
    q = guard(torch.randn(batch, group * kv_heads, width).to(dtype))
    caches = torch.randn(2, batch, kv_heads, places, width)
    for row, length in enumerate(lengths):
        caches[:, row, :, length:] = torch.nan
        caches[:, row, :, : max(0, length - (window or places))] = torch.nan
    keys, values = (guard(one.to(dtype)) for one in caches)
    got = decode_attention(q, keys, values, guard(torch.tensor(lengths)), window, impl="triton")
    exact = [one.double().nan_to_num(9.0) for one in (q, keys, values)]
    near(got, reference_decode_attention(*exact, torch.tensor(lengths), window or places, width**-0.5), dtype)


def test_heads_of_any_matrix_and_any_number_of_slots(guard, matrix, draw):
    batch, height, capacity = draw.randint(1, 8), draw.randint(1, 40), draw.randint(0, 20)
    boundary, dtype = draw.randint(1, height), torch.float32
    base, exact = matrix(draw, height, dtype)
    rows, installed = torch.randn(batch, capacity, base.shape[1]), torch.rand(batch, capacity) < draw.random()
    rows[~installed] = torch.nan
    x, rows, installed = guard(torch.randn(batch, base.shape[1])), guard(rows), guard(installed)
    wanted = reference_joint_head(x.double(), exact, rows.double(), installed, boundary, logits=True)
    for logits in (False, True):
        got = joint_head(x, base, rows, installed, boundary, logits, impl="triton")
        assert torch.equal(got.best, wanted.best)
        if logits:
            near(got.logits, wanted.logits, dtype)


def test_embeddings_of_any_table(guard, matrix, draw):
    batch, length, height = draw.randint(1, 8), draw.randint(1, 5), draw.randint(1, 40)
    capacity, boundary, dtype = draw.randint(0, 9), draw.randint(0, height), draw.choice(DTYPES)
    table, exact = matrix(draw, height, dtype)
    rows = guard(torch.randn(batch, capacity, table.shape[1]).to(dtype))
    ids = guard(torch.randint(-1, boundary + capacity + 1, (batch, length)))
    got = hyper_embedding(ids, table, rows, boundary, impl="triton")
    near(got, reference_hyper_embedding(ids, exact, rows.double(), boundary), dtype)


def test_rows_of_any_entries(guard, matrix, draw):
    count, length, height, dtype = draw.randint(1, 6), draw.randint(1, 16), draw.randint(1, 30), draw.choice(DTYPES)
    table, exact = matrix(draw, height, dtype)
    places = guard(torch.randn(length + draw.randint(0, 2), table.shape[1]).to(dtype)) if draw.random() < 0.6 else None
    entries = guard(torch.randint(-1, height + 1, (count, length)))
    got = hyper_rows.embed_entries(entries, table, places, impl="triton")
    wanted = hyper_rows.reference_embed_entries(entries, exact, None if places is None else places.double())
    near(got, wanted, dtype)


def test_attention_and_pooling_of_any_entries(guard, draw):
    count, length, heads = draw.randint(1, 6), draw.randint(1, 16), draw.randint(1, 4)
    each, dtype = draw.choice((*HEAD_WIDTHS, draw.randint(1, 70))), draw.choice(DTYPES)
    lengths = guard(torch.randint(1, length + 1, (count,)))
    qkv = guard(torch.randn(count, length, 3 * heads * each).to(dtype))
    for mask in hyper_rows.MASKS:
        got = hyper_rows.attend_in_entries(qkv, lengths, heads, mask, impl="triton")
        near(got, hyper_rows.reference_attend_in_entries(qkv.double(), lengths, heads, mask), dtype)
    x = guard(torch.randn(count, length, draw.randint(1, 1100)).to(dtype))
    for kind in hyper_rows.POOLS:
        near(
            hyper_rows.pool_places(x, lengths, kind, impl="triton"),
            hyper_rows.reference_pool_places(x.double(), lengths, kind),
            dtype,
        )


def test_rotations_of_all_groups_and_widths(guard, draw):
    batch, length, group, kv_heads = draw.randint(1, 8), draw.randint(1, 2), draw.randint(1, 8), draw.randint(1, 2)
    width, places, sets, dtype = draw.choice(HEAD_WIDTHS), draw.randint(1, 20), draw.randint(1, 2), draw.choice(DTYPES)
    half = draw.choice((width // 2, width // 4, draw.randint(1, width // 2)))
    qkv = guard(torch.randn(batch, length, (group + 2) * kv_heads * width).to(dtype))
    positions = guard(torch.randint(0, 60, (batch, length)))
    slots = guard(torch.rand(batch, places + 2).argsort(1)[:, :length] - 1)  # some lie outside, none comes twice
    norms = [guard((1 + torch.rand(width)).to(dtype)) if sets == 2 else None for _ in range(2)]
    which = guard(torch.randint(0, sets, (batch,))) if draw.random() < 0.7 else None
    rates = guard(torch.rand(sets, half))
    caches = [guard(torch.full((batch, kv_heads, places, width), 9.0, dtype=dtype)) for _ in range(2)]
    exact = [cache.double() for cache in caches]
    got = rope_and_cache(qkv, positions, slots, Rotation(rates, 1.1, which, *norms, 1e-3), *caches, impl="triton")
    wide = [None if one is None else one.double() for one in norms]
    rotation = Rotation(rates.double(), 1.1, which, *wide, 1e-3)
    wanted = reference_rope_and_cache(qkv.double(), positions, slots, rotation, *exact, group * kv_heads)
    for one, other in zip((got, *caches), (wanted, *exact), strict=True):
        near(one, other, dtype, 2)


def test_norms_gates_and_unpacked_matrices(guard, matrix, draw):
    count, width, dtype = draw.randint(1, 8), draw.randint(1, 1100), draw.choice(DTYPES)
    x, gate_up = guard(torch.randn(count, width).to(dtype)), guard(torch.randn(count, 2 * width).to(dtype))
    factors = guard((1 + torch.rand(width)).to(dtype))
    near(
        products.rms_norm(x, factors, 1e-5, impl="triton"),
        products.reference_rms_norm(x.double(), factors.double(), 1e-5),
        dtype,
    )
    near(products.silu_gate(gate_up, impl="triton"), products.reference_silu_gate(gate_up.double()), dtype)
    packed, exact = matrix(draw, draw.randint(1, 40), dtype)
    if not isinstance(packed, torch.Tensor):
        near(unpack(packed, dtype, impl="triton"), exact, dtype)


# ---- nothing at all, and operands that are not upcast


def test_empty_inputs_give_empty_results():
    no_rows, ids = torch.ones(1, 0, 4), torch.zeros((0, 2), dtype=torch.int64)
    none, flags = torch.zeros(0, dtype=torch.int64), torch.zeros((0, 0), dtype=torch.bool)
    for impl in ("triton", "reference"):
        assert hyper_embedding(ids, torch.ones(3, 4), no_rows[:0], 3, impl).shape == (0, 2, 4)
        assert hyper_rows.embed_entries(ids, torch.ones(3, 4), None, impl).shape == (0, 2, 4)
        assert hyper_rows.attend_in_entries(torch.ones(0, 2, 12), none, 2, "both", impl).shape == (0, 2, 4)
        assert hyper_rows.pool_places(torch.ones(0, 2, 4), none, "real", impl).shape == (0, 4)
        assert products.silu_gate(torch.ones(0, 4), impl).shape == (0, 2)
        assert products.rms_norm(torch.ones(0, 4), torch.ones(4), 1e-5, impl=impl).shape == (0, 4)
        cache = torch.ones(0, 1, 5, 4)
        assert decode_attention(torch.ones(0, 2, 4), cache, cache, none, impl=impl).shape == (0, 2, 4)
        assert matvec(torch.ones(0, 4), torch.ones(3, 4), impl=impl).shape == (0, 3)
        head = joint_head(torch.ones(0, 4), torch.ones(3, 4), no_rows[:0], flags, 3, logits=True, impl=impl)
        assert [tuple(part.shape) for part in head] == [(0,), (0, 3)]
        out = rope_and_cache(
            torch.ones(0, 1, 12), ids[:, :1], ids[:, :1], Rotation(torch.ones(1, 2)), cache, cache, impl
        )
        assert out.shape == (0, 1, 1, 4)


def test_float16_operands_as_they_are_on_a_gpu(guard, monkeypatch):
    """The interpreter multiplies float16 matrices rightly, so what it upcasts for bfloat16 is tried without that."""
    for module in (attention_triton, head_triton, products_triton):
        monkeypatch.setattr(module, "is_interpreted", lambda: False)
    q, keys, values = (guard(torch.randn(shape).half()) for shape in ((2, 4, 24), (2, 2, 70, 24), (2, 2, 70, 24)))
    got = decode_attention(q, keys, values, guard(torch.tensor([70, 33])), impl="triton")
    exact = [one.double() for one in (q, keys, values)]
    near(got, reference_decode_attention(*exact, torch.tensor([70, 33]), 70, 24**-0.5), torch.float16)
    x, weight = guard(torch.randn(3, 40).half()), guard((torch.randn(9, 40) / 6).half())
    near(matvec(x, weight, impl="triton"), reference_matvec(x.double(), weight.double()), torch.float16)
