"""Rotary positions, head norms and the cache write: the kernel against the reference in float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels.attention import Rotation, reference_rope_and_cache, rope_and_cache  # noqa: E402
from support.pairs import quick_pairs  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")

SHAPES = [(4, 2, 6, 3), (1, 1, 33, 8)]  # heads, key heads, columns of a head, frequencies


def double(rotation: Rotation) -> Rotation:
    parts = (
        part.double() if isinstance(part, torch.Tensor) and part.is_floating_point() else part for part in rotation
    )
    return Rotation(*parts)


@quick_pairs(
    {
        "which": [None, [1, 0]],
        "is_normed": [False, True],
        "heads, kv_heads, width, half": SHAPES,
        "dtype": [torch.float32, torch.bfloat16],
    }
)
def test_queries_are_rotated_and_keys_and_values_reach_their_slots_only(
    guard, close, dtype, heads, kv_heads, width, half, is_normed, which
):
    qkv = guard(torch.randn(2, 3, (heads + 2 * kv_heads) * width).to(dtype))
    positions = guard(torch.tensor([[0, 1, 5], [2, 40, 3]]))
    slots = guard(torch.tensor([[4, 0, 7], [-1, 2, 1]]))  # 7 and -1 lie outside of a cache of 7 places
    norms = [guard(torch.rand(width).to(dtype)) if is_normed else None for _ in range(2)]
    chosen = None if which is None else guard(torch.tensor(which))
    rotation = Rotation(guard(torch.rand(2, half)), 1.25, chosen, norms[0], norms[1], 1e-3)
    caches = [guard(torch.full((2, kv_heads, 7, width), 9.0, dtype=dtype)) for _ in range(2)]
    exact = [cache.double() for cache in caches]
    got = rope_and_cache(qkv, positions, slots, rotation, *caches, impl="triton")
    wanted = reference_rope_and_cache(qkv.double(), positions, slots, double(rotation), *exact, heads)
    for one, other in zip((got, *caches), (wanted, *exact), strict=True):
        close(one, other, roundings=4)
    assert (exact[0] == 9).all(-1).sum() == kv_heads * (14 - 4)


@pytest.mark.parametrize("position", [511, 131_071])
def test_far_positions_are_rotated_by_the_angles_that_float32_has(guard, close, position):
    qkv, rates = guard(torch.randn(1, 1, 3 * 8)), guard(torch.tensor([[1.0, 0.5, 2.0**-9, 2.0**-14]]))  # exact angles
    at, caches = guard(torch.tensor([[position]])), [guard(torch.zeros(1, 1, 1, 8)) for _ in range(2)]
    exact = [cache.double() for cache in caches]
    got = rope_and_cache(qkv, at, at * 0, Rotation(rates), *caches, impl="triton")
    close(got, reference_rope_and_cache(qkv.double(), at, at * 0, Rotation(rates.double()), *exact, 1), roundings=4)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_set_of_frequencies_that_is_not_there_gives_nan(guard, impl):
    qkv, at = guard(torch.ones(2, 1, 3 * 4)), guard(torch.ones((2, 1), dtype=torch.int64))
    rotation = Rotation(guard(torch.ones(2, 2)), frequency_set=guard(torch.tensor([2, 1])))
    keys, values = (guard(torch.zeros(2, 1, 3, 4)) for _ in range(2))
    out = rope_and_cache(qkv, at, at, rotation, keys, values, impl)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_rotations_that_do_not_fit_are_refused():
    qkv, at, cache = torch.ones(1, 1, 12), torch.zeros((1, 1), dtype=torch.int64), torch.zeros(1, 1, 3, 4)
    for rotation, message in (
        (Rotation(torch.ones(1, 3)), "rotate no head of 4 columns"),
        (Rotation(torch.ones(1, 2), frequency_set=torch.zeros(2)), "frequency_set has shape"),
        (Rotation(torch.ones(1, 2), q_norm=torch.ones(4)), "belong together"),
        (Rotation(torch.ones(1, 2), q_norm=torch.ones(4), k_norm=torch.ones(3)), "k_norm has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_and_cache(qkv, at, at, rotation, cache, cache.clone())
