"""Hyper embedding: the kernel against the reference in float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels.hyper_rows import hyper_embedding, reference_hyper_embedding  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "base", "boundary", "capacity", "width"),
    [(1, 1, 7, 5, 3, 33), (2, 5, 9, 9, 4, 1030), (1, 3, 4, 4, 0, 8)],
)
def test_rows_come_from_the_base_table_or_the_hyper_rows(
    guard, close, dtype, batch, length, base, boundary, capacity, width
):
    ids = guard(torch.randint(0, boundary + capacity, (batch, length)))
    table = guard(torch.randn(base, width).to(dtype))
    rows = guard(torch.randn(batch, capacity, width).to(dtype))
    got = hyper_embedding(ids, table, rows, boundary, impl="triton")
    assert got.dtype == dtype
    close(got, reference_hyper_embedding(ids, table.double(), rows.double(), boundary))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "width", "group"), [(4, 1056, 32), (8, 64, 64)])
def test_rows_of_a_packed_table_are_unpacked(guard, close, random_packed, dtype, bits, width, group):
    ids, rows = guard(torch.randint(-1, 9, (2, 5))), guard(torch.randn(2, 3, width).to(dtype))
    table, exact = random_packed(7, width, bits, group, dtype)
    got = hyper_embedding(ids, table, rows, 5, impl="triton")
    assert got.dtype == dtype
    known = (ids >= 0) & (ids < 8)
    close(got[known], reference_hyper_embedding(ids, exact, rows.double(), 5)[known])
    assert got[~known].isnan().all()


def test_each_sequence_reads_its_own_rows(guard):
    ids = guard(torch.tensor([[3, 4], [4, 0]]))
    table, rows = guard(torch.zeros(3, 2)), guard(torch.arange(8.0).view(2, 2, 2) + 1)
    got = hyper_embedding(ids, table, rows, 3, impl="triton")
    assert got.tolist() == [[[1, 2], [3, 4]], [[7, 8], [0, 0]]]


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_an_id_that_does_not_exist_gives_a_row_of_nan_and_reads_nothing(guard, impl):
    ids = guard(torch.tensor([[-1, 0, 5, 10**12]]))
    got = hyper_embedding(ids, guard(torch.ones(4, 3)), guard(torch.ones(1, 2, 3)), 3, impl=impl)
    assert got[0].isnan().all(-1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_an_id_beyond_the_boundary_is_no_base_id_although_the_table_has_such_a_row(guard, impl):
    got = hyper_embedding(guard(torch.tensor([[2, 3]])), guard(torch.ones(4, 3)), guard(torch.ones(1, 0, 3)), 3, impl)
    assert got[0].isnan().all(-1).tolist() == [False, True]


def test_a_boundary_above_the_table_is_refused(guard):
    with pytest.raises(ValueError, match="boundary 5 lies outside"):
        hyper_embedding(torch.zeros(1, 1, dtype=torch.long), torch.ones(4, 3), torch.ones(1, 2, 3), 5)
