"""Attention of a step over static caches: the kernels against the reference in float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels import attention  # noqa: E402
from mlx_zip.cuda.kernels.attention import decode_attention, reference_decode_attention  # noqa: E402
from support.pairs import quick_pairs  # noqa: E402
from support.slow_cases import slow_but  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")

HEADS = [(1, 1, 33), (4, 2, 8), (6, 2, 24), (3, 3, 96)]  # H, K, E
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def few_keys(monkeypatch):
    """Gives each round few keys, so that short caches have several parts and rounds."""
    monkeypatch.setattr(attention, "KEYS", 16)
    monkeypatch.setattr(attention, "MOST_PARTS", 3)


def caches(guard, dtype, lengths, kv_heads, places, width):
    """Returns keys and values with NaN beyond each length."""
    both = torch.randn(2, len(lengths), kv_heads, places, width)
    for row, length in enumerate(lengths):
        both[:, row, :, max(length, 0) :] = torch.nan
    return [guard(part.to(dtype)) for part in both]


def check(guard, dtype, lengths, heads, kv_heads, width, places=150, **more):
    q = guard(torch.randn(len(lengths), heads, width).to(dtype))
    keys, values = caches(guard, dtype, lengths, kv_heads, places, width)
    seen = guard(torch.tensor(lengths))
    got = decode_attention(q, keys, values, seen, **more, impl="triton")
    scale = more.get("scale") or width**-0.5
    q, keys, values = (part.double().nan_to_num(9.0) for part in (q, keys, values))
    wanted = reference_decode_attention(q, keys, values, seen, more.get("window") or places, scale)
    assert got.dtype == dtype
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


# quick: each number of heads and each type
@quick_pairs({"heads, kv_heads, width": HEADS, "dtype": DTYPES}, quick=[(0, 0), (1, 1), (2, 2), (3, 0)])
def test_rows_of_all_lengths_agree_with_float64(guard, heads, kv_heads, width, dtype):
    check(guard, dtype, [0, 1, 15, 16, 17, 48, 49, 149, 150], heads, kv_heads, width)


@pytest.mark.parametrize("window", slow_but([1, 5, 16, 40, 200], 1, 16, 40))
def test_only_the_last_keys_within_a_window_are_seen(guard, window):
    check(guard, torch.float32, [0, 1, 4, 5, 6, 16, 41, 97, 150], 4, 2, 8, window=window)


def test_scores_are_scaled_as_asked(guard):
    check(guard, torch.float32, [70, 3], 4, 2, 8, scale=1.3)


@pytest.mark.parametrize("places", [1, 16, 30])
def test_small_caches_have_one_part(guard, places):
    check(guard, torch.float32, [0, 1, places], 4, 2, 8, places=places)


def test_lengths_beyond_the_capacity_and_below_zero_are_limited(guard):
    q, cache = guard(torch.randn(2, 1, 4)), guard(torch.randn(2, 1, 40, 4))
    got = decode_attention(q, cache, cache, guard(torch.tensor([41, -3])), impl="triton")
    wanted = reference_decode_attention(
        q.double(), cache.double(), cache.double(), guard(torch.tensor([40, 0])), 40, 0.5
    )
    torch.testing.assert_close(got.double(), wanted, rtol=3e-6, atol=3e-6)


def test_large_scores_do_not_overflow(guard):
    q, cache = guard(torch.full((1, 2, 4), 100.0)), guard(torch.full((1, 1, 70, 4), 100.0))
    got = decode_attention(q, cache, cache, guard(torch.tensor([70])), impl="triton")
    torch.testing.assert_close(got, torch.full_like(q, 100.0))


def test_parts_are_as_many_as_keys_and_programs_allow():
    assert attention.attention_part_count(1, 1) == 1
    assert attention.attention_part_count(1, 33) == 3
    assert attention.attention_part_count(1, 10_000) == 3
    assert attention.attention_part_count(600, 10_000) == 1
    assert attention.attention_part_count(5000, 10_000) == 1


def test_heads_that_do_not_fit_are_refused():
    q, cache, lengths = torch.ones(1, 3, 4), torch.ones(1, 2, 5, 4), torch.tensor([1])
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 key heads"):
        decode_attention(q, cache, cache, lengths)
    with pytest.raises(ValueError, match="window 0 is not 1 or more"):
        decode_attention(torch.ones(1, 2, 4), cache, cache, lengths, window=0)
