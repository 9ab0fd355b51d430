"""The joint head, dense and packed: the kernel against the reference in float64."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels.head import joint_head, reference_joint_head  # noqa: E402
from mlx_zip.cuda.kernels.packed import Packed, dequantize  # noqa: E402
from mlx_zip.cuda.kernels.triton import head as head_triton  # noqa: E402
from support.pairs import quick_pairs  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")

SHAPES = [(1, 5, 5, 0, 8), (1, 40, 33, 18, 33), (3, 19, 17, 3, 600)]  # B, R, V, C, D
SUMS = {"rtol": 1e-5, "atol": 1e-4}  # float32 sums of up to 600 products


def inputs(guard, dtype, batch, height, capacity, width) -> Any:
    x, rows = torch.randn(batch, width), torch.randn(batch, capacity, width)
    installed = torch.rand(batch, capacity) < 0.6
    rows[~installed] = torch.nan
    return guard(x.to(dtype)), guard(rows.to(dtype)), guard(installed)


def compare(x, base, rows, installed, boundary, exact_base):
    wanted: Any = reference_joint_head(x.double(), exact_base, rows.double(), installed, boundary, logits=True)
    for logits in (True, False):
        got: Any = joint_head(x, base, rows, installed, boundary, logits=logits, impl="triton")
        assert torch.equal(got.best, wanted.best)
        if logits:
            torch.testing.assert_close(got.logits.double(), wanted.logits, **SUMS)
        else:
            assert got.logits is None


EACH_ONCE = [(0, 0), (1, 1), (2, 0)]  # each size and each of two types


@quick_pairs(
    {"batch, height, boundary, capacity, width": SHAPES, "dtype": [torch.float32, torch.bfloat16]}, quick=EACH_ONCE
)
def test_a_dense_head_is_that_of_float64(guard, batch, height, boundary, capacity, width, dtype):
    x, rows, installed = inputs(guard, dtype, batch, height, capacity, width)
    base = guard(torch.randn(height, width).to(dtype))
    compare(x, base, rows, installed, boundary, base.double())


@quick_pairs(
    {"height, boundary, capacity, width": [(5, 5, 0, 32), (40, 33, 18, 96), (19, 17, 3, 608)], "bits": [4, 8]},
    quick=EACH_ONCE,
)
def test_a_packed_head_is_that_of_its_matrix_in_float64(guard, height, boundary, capacity, width, bits):
    x, rows, installed = inputs(guard, torch.float32, 2, height, capacity, width)
    words = guard(torch.randint(-(2**31), 2**31, (height, width * bits // 32)).to(torch.int32))
    scales, biases = (guard(torch.randn(height, width // 32)) / 2**bits for _ in range(2))
    base = Packed(words, guard(scales), guard(biases), bits, 32)
    exact = dequantize(base._replace(scales=scales.double(), biases=biases.double()))
    compare(x, base, rows, installed, boundary, exact)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64), (4, 128)])
def test_a_packed_head_of_one_row_is_that_of_its_matrix_in_float64(guard, random_packed, bits, group):
    x, rows, installed = inputs(guard, torch.float32, 1, 19, 3, 384)
    base, exact = random_packed(19, 384, bits, group, torch.float32)
    compare(x, base, rows, installed, 17, exact)


@pytest.mark.slow
def test_more_rows_than_share_a_reading_of_the_matrix(guard):
    x, rows, installed = inputs(guard, torch.float32, 18, 35, 20, 24)
    base = guard(torch.randn(35, 24))
    compare(x, base, rows, installed, 33, base.double())


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_the_lowest_of_equal_ids_is_best(guard, impl):
    x, base = guard(torch.ones(1, 4)), guard(torch.zeros(50, 4))
    base[[21, 37]] = 1.0
    rows, installed = guard(torch.ones(1, 20, 4)), guard(torch.ones(1, 20, dtype=torch.bool))
    assert joint_head(x, base, rows, installed, 50, impl=impl).best.tolist() == [21]


def test_more_blocks_than_one_round_of_the_reduction_holds(guard, monkeypatch):
    monkeypatch.setattr(head_triton, "LANES", 4)
    x, base = guard(torch.randn(1, 2)), guard(torch.randn(210, 2))
    rows, installed = guard(torch.randn(1, 1, 2)), guard(torch.zeros(1, 1, dtype=torch.bool))
    compare(x, base, rows, installed, 209, base.double())


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_the_lowest_of_equal_ids_is_best_across_rounds_of_the_reduction(guard, monkeypatch, impl):
    monkeypatch.setattr(head_triton, "LANES", 4)
    x, base = guard(torch.ones(1, 4)), guard(torch.zeros(200, 4))
    base[[5, 5 + 4 * head_triton.IDS, 3 + 8 * head_triton.IDS]] = 1.0  # blocks of one lane
    rows, installed = guard(torch.ones(1, 20, 4)), guard(torch.ones(1, 20, dtype=torch.bool))
    assert joint_head(x, base, rows, installed, 200, impl=impl).best.tolist() == [5]


@pytest.mark.parametrize("batch", [1, 2])
def test_the_best_of_ids_that_all_have_logits_far_below_zero_is_found(guard, batch):
    x, base = guard(torch.ones(batch, 4)), guard(-50 - torch.rand(40, 4))
    rows, installed = guard(-torch.full((batch, 20, 4), 99.0)), guard(torch.rand(batch, 20) < 0.5)
    compare(x, base, rows, installed, 33, base.double())  # five blocks, in eight lanes


@pytest.mark.parametrize("batch", [1, 3])
def test_a_tail_of_several_blocks_can_never_be_chosen(guard, batch):
    x, rows, installed = inputs(guard, torch.float32, batch, 60, 18, 24)
    base = guard(torch.randn(60, 24))
    compare(x, base, rows, installed, 21, base.double())


def test_a_boundary_outside_the_matrix_is_refused():
    none = torch.zeros(1, 0, 4)
    with pytest.raises(ValueError, match=r"boundary 0 lies outside 1\.\.3"):
        joint_head(torch.ones(1, 4), torch.ones(3, 4), none, torch.zeros(1, 0, dtype=torch.bool), 0)
