"""Products of a step with what precedes and follows them: the kernel against the reference in float64."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels.packed import Packed, to_dense_matrix  # noqa: E402
from mlx_zip.cuda.kernels.products import (  # noqa: E402
    matvec,
    normalize_rms,
    reference_matvec,
)
from support.pairs import quick_pairs  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")

EPS = 1e-5
FLOAT32 = 1e-6  # of a sum's terms, for float32 sums of up to some thousand of them
SHAPES = [(1, 1), (5, 33), (7, 1100), (34, 264)]  # R, D


def random_packed(guard, rows, width, bits, group, dtype):
    words = guard(torch.randint(-(2**31), 2**31, (rows, width * bits // 32)).to(torch.int32))
    scales, biases = (torch.randn(rows, width // group) / width**0.5 for _ in range(2))
    return Packed(words, guard((scales / 2**bits).to(dtype)), guard(biases.to(dtype)), bits, group)


def exactly(value) -> Any:
    """Returns an argument in float64."""
    if isinstance(value, Packed):
        return value._replace(scales=value.scales.double(), biases=value.biases.double())
    if isinstance(value, tuple):
        return value[0].double(), value[1]
    return value.double() if isinstance(value, torch.Tensor) else value


def arguments(guard, dtype, batch, weight, all_of_it, gate=False):
    """Returns x and the keyword arguments of a product with nothing or everything before and after it."""
    rows, width = weight.shape
    x = guard((2 * torch.randn(batch, width)).to(dtype))
    if not all_of_it:
        return x, {"gate": gate}
    bias, norm = guard(torch.randn(rows).to(dtype)), guard((1 + torch.rand(width)).to(dtype))
    residual = guard(torch.randn(batch, rows // 2 if gate else rows).to(dtype))
    return x, {"bias": bias, "norm": (norm, EPS), "residual": residual, "gate": gate}


def error_bound(x, weight, bias, norm, residual, gate, one, operands_are_rounded):
    """Returns what each result [B, R] in float64 may be off by; one: the largest relative error of a rounding to x.

    Roundings of a sum's operands add up like the root of its squared terms, and to a share of the sum where all of
    them are towards zero. What follows passes an error on by its slopes; that of silu is at most 1.1.
    """
    normed = x if norm is None else normalize_rms(x, norm[1]) * norm[0]
    dense = to_dense_matrix(weight)
    sums = normed @ dense.T
    if operands_are_rounded:
        off = one * (2 * sums.abs() + 3 * (normed.square() @ dense.square().T).sqrt())
    else:
        off = FLOAT32 * (normed.abs() @ dense.abs().T)
    result = sums if bias is None else sums + bias
    if gate:
        (first, second), (off_first, off_second) = result.chunk(2, -1), off.chunk(2, -1)
        silu = torch.nn.functional.silu(first)
        off = 1.1 * off_first * (second.abs() + off_second) + silu.abs() * off_second
        result = silu * second
    result = result if residual is None else result + residual
    return off + max(one, FLOAT32) * result.abs() + FLOAT32


def check(x, weight, more, loose):
    """Compares with float64; loose: operands were rounded to x's dtype."""
    got = matvec(x, weight, **more, impl="triton")
    exact = {"bias": None, "norm": None, "residual": None, "gate": False}
    exact |= {name: exactly(value) for name, value in more.items()}
    wanted = reference_matvec(exactly(x), exactly(weight), **exact)
    assert got.dtype == x.dtype
    assert not got.isnan().any()
    one = {torch.float32: FLOAT32, torch.bfloat16: 2**-7, torch.float16: 2**-10}[x.dtype]
    bound = error_bound(exactly(x), exactly(weight), **exact, one=one, operands_are_rounded=loose)
    error = (got.double() - wanted).abs()
    assert (error <= bound).all(), (error / bound).max()


@quick_pairs(
    {
        "rows, width": SHAPES,
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "batch": [1, 3, 16],
        "all_of_it": {"alone": False, "norm bias residual": True},
        "gate": {"plain": False, "gate": True},
    }
)
def test_a_dense_product_is_that_of_float64(guard, rows, width, dtype, batch, all_of_it, gate):
    rows = 2 * rows if gate else rows
    weight = guard((torch.randn(rows, width) / width**0.5).to(dtype))
    x, more = arguments(guard, dtype, batch, weight, all_of_it, gate)
    check(x, weight, more, loose=batch > 1)


@quick_pairs(
    {
        "rows, width, group": [(2, 32, 32), (6, 1152, 64), (34, 384, 128)],
        "dtype": [torch.float32, torch.bfloat16],
        "bits": [4, 8],
        "batch": [1, 2],
        "all_of_it": {"alone": False, "norm bias residual gate": True},
    }
)
def test_a_packed_product_is_that_of_float64(guard, rows, width, group, dtype, bits, batch, all_of_it):
    weight = random_packed(guard, rows, width, bits, group, dtype)
    x, more = arguments(guard, dtype, batch, weight, all_of_it, all_of_it)
    check(x, weight, more, loose=batch > 1)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_large_activation_does_not_overflow_float16_before_it_is_scaled(guard, batch, bits):
    """Residual streams have single columns of tens of thousands; times the norm's weight that is no float16."""
    dense = guard((torch.randn(6, 64) / 8).half())
    weight = dense if bits is None else random_packed(guard, 6, 64, bits, 32, torch.float16)
    x = torch.randn(batch, 64)
    x[:, 5] = 30000.0
    more = {"norm": (guard(torch.full((64,), 6.0).half()), EPS)}
    check(guard(x.half()), weight, more, loose=batch > 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_vector_does_not_meet_its_neighbours(guard, batch):
    """A NaN in one vector, or in one row of the matrix, stays there."""
    x, weight = guard(torch.randn(batch, 40)), guard(torch.randn(9, 40))
    weight[4, 7] = torch.nan
    x[batch - 1, 3] = torch.nan if batch > 1 else 1.0
    nan = matvec(x, weight, impl="triton").isnan()
    assert nan.sum(1).tolist() == [1, 9][:batch]
    assert nan[:, 4].all()


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_norm_of_a_vector_of_zeros_is_zero(guard, batch, bits):
    weight = guard(torch.randn(6, 64)) if bits is None else random_packed(guard, 6, 64, bits, 32, torch.float32)
    factors = guard(torch.rand(64))
    got = matvec(guard(torch.zeros(batch, 64)), weight, norm=(factors, EPS), impl="triton")
    assert (got == 0).all()


def test_products_that_do_not_fit_are_refused():
    x, weight = torch.ones(1, 4), torch.ones(3, 4)
    with pytest.raises(ValueError, match="an odd number"):
        matvec(x, weight, gate=True)
    with pytest.raises(ValueError, match="at most 16"):
        matvec(torch.ones(17, 4), weight)
    with pytest.raises(ValueError, match=r"residual has shape \[1, 4\], expected \[1, 3\]"):
        matvec(x, weight, residual=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"norm has shape \[3\], expected \[4\]"):
        matvec(x, weight, norm=(torch.ones(3), EPS))
    assert matvec(torch.ones(0, 4), weight).shape == (0, 3)
