"""Rows of new entries are put into the tables by one launch, as the plain reference does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels.hyper_rows import install_rows  # noqa: E402
from support.kernel_launches import counting_launches  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")

SEQUENCES, SLOTS, BEFORE, PLACES = 3, 5, 4, 6
NEW = [[0, 2, 1, 0, 0], [4, 0, 3, 4, 4], [5, 0, 2, 5, 5], [7, 2, 3, 7, 7]]  # the first entry three times: padding


def tables_of(guard, sides, width, dtype):
    """A pool of random rows, empty tables, no installed slot, and spans of 1."""
    pool = guard(torch.randn(PLACES, sides, width).to(dtype))
    tables = [guard(torch.full((SEQUENCES, SLOTS, width), torch.nan, dtype=dtype)) for _ in range(sides)]
    installed = guard(torch.zeros(SEQUENCES, SLOTS, dtype=torch.bool))
    return pool, tables, installed, guard(torch.ones(SEQUENCES, BEFORE + SLOTS, dtype=torch.int64))


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sides", "width"), [(1, 1), (2, 33), (2, 1030)])
def test_each_entry_gets_its_rows_its_flag_and_its_span_and_nothing_else_changes(guard, impl, dtype, sides, width):
    pool, tables, installed, spans = tables_of(guard, sides, width, dtype)
    wanted = [part.clone() for part in (*tables, installed, spans)]
    for sequence, slot, place, span in zip(*NEW, strict=True):
        for side in range(sides):
            wanted[side][sequence, slot] = pool[place, side]
        wanted[-2][sequence, slot], wanted[-1][sequence, BEFORE + slot] = True, span
    install_rows(guard(torch.tensor(NEW)), pool, tables, installed, spans, impl)
    for got, part in zip((*tables, installed, spans), wanted, strict=True):
        torch.testing.assert_close(got, part, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_it_is_one_launch_and_no_entry_is_none(guard, impl):
    pool, tables, installed, spans = tables_of(guard, 2, 8, torch.float32)
    new = guard(torch.tensor(NEW))
    with counting_launches() as found:
        install_rows(new, pool, tables, installed, spans, impl)
    assert found.count == 1
    install_rows(guard(torch.zeros((4, 0), dtype=torch.int64)), pool, tables, installed, spans, impl)


def test_tables_that_do_not_belong_together_are_refused(guard):
    pool, tables, installed, spans = tables_of(guard, 2, 8, torch.float32)
    with pytest.raises(ValueError, match=r"pool has shape \[6, 2, 8\], expected \[None, 1, None\]"):
        install_rows(guard(torch.tensor(NEW)), pool, tables[:1], installed, spans)
    with pytest.raises(ValueError, match=r"new has shape \[3, 5\]"):
        install_rows(guard(torch.tensor(NEW[:3])), pool, tables, installed, spans)
    with pytest.raises(ValueError, match="table has shape"):
        install_rows(guard(torch.tensor(NEW)), pool, tables, installed[:, 1:].contiguous(), spans)
