"""RMS norm, and silu(gate) * up: the kernels against references in float64."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from mlx_zip.cuda.kernels import products  # noqa: E402
from mlx_zip.cuda.kernels.triton.tuning import is_interpreted  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 33), (2, 1030)])
def test_a_norm_is_that_of_float64(guard, close, dtype, count, width):
    x, weight = guard(torch.randn(count, width).to(dtype)), guard((1 + torch.rand(width)).to(dtype))
    got = products.rms_norm(x, weight, 1e-5, impl="triton")
    close(got, products.reference_rms_norm(x.double(), weight.double(), 1e-5), roundings=2)
    close(got, torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-5), roundings=2)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_norm_is_written_where_the_caller_wants_it(guard, close, impl):
    x, weight, place = guard(torch.randn(2, 5)), guard(torch.rand(5)), guard(torch.full((2, 5), torch.nan))
    assert products.rms_norm(x, weight, 1e-6, place, impl) is place
    close(place, torch.nn.functional.rms_norm(x.double(), (5,), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 33), (2, 1030)])
def test_a_gated_activation_is_that_of_float64(guard, close, dtype, count, width):
    gate_up = guard(torch.randn(count, 2 * width).to(dtype))
    close(products.silu_gate(gate_up, impl="triton"), products.reference_silu_gate(gate_up.double()))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"weight has shape \[4\], expected \[5\]"):
        products.rms_norm(torch.ones(2, 5), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match=r"out has shape \[1, 5\], expected \[2, 5\]"):
        products.rms_norm(torch.ones(2, 5), torch.ones(5), 1e-5, torch.ones(1, 5))
    with pytest.raises(ValueError, match="an odd number"):
        products.silu_gate(torch.ones(2, 5))
    with pytest.raises(ValueError, match="not one of triton, reference"):
        products.silu_gate(torch.ones(2, 4), impl="metal")


@triton.jit
def _copy(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bfloat16_is_cut_off_in_the_interpreter_and_rounded_on_a_gpu(guard, dtype):
    """So a result of the interpreter may be off by one whole step of bfloat16, and one of two roundings by two."""
    x, out = guard(torch.randn(512)), guard(torch.zeros(512, dtype=dtype))
    _copy[(1,)](x, out, BLOCK=512)
    if dtype == torch.bfloat16 and is_interpreted():
        cut = (x.view(torch.int32) & -65536).view(torch.float32)
        assert torch.equal(out.float(), cut)
        assert not torch.equal(cut, x.to(dtype).float())
    else:
        assert torch.equal(out, x.to(dtype))
