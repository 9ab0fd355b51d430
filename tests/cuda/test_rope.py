"""Rotary positions and the cache write: the kernel against the reference in float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels.rope import reference, rope_and_cache  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "half"), [(4, 2, 6, 3), (1, 1, 33, 8)])
def test_queries_turn_and_keys_and_values_reach_their_slots_only(guard, close, dtype, heads, kv_heads, width, half):
    qkv = guard(torch.randn(2, 3, (heads + 2 * kv_heads) * width).to(dtype))
    positions = guard(torch.tensor([[0, 1, 5], [2, 40, 3]]))
    slots = guard(torch.tensor([[4, 0, 7], [-1, 2, 1]]))  # 7 and -1 lie outside of a cache of 7 places
    rates = guard(torch.rand(half))
    caches = [guard(torch.full((2, kv_heads, 7, width), 9.0, dtype=dtype)) for _ in range(2)]
    exact = [cache.double() for cache in caches]
    got = rope_and_cache(qkv, positions, slots, rates, *caches, scale=1.25, impl="triton")
    wanted = reference(qkv.double(), positions, slots, rates.double(), *exact, 1.25, heads)
    for one, other in zip((got, *caches), (wanted, *exact), strict=True):
        close(one, other, roundings=2)
    assert (exact[0] == 9).all(-1).sum() == kv_heads * (14 - 4)
