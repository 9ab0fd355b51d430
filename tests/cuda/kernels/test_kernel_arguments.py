"""What kernels refuse before they launch anything, and which form of them runs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels import dispatch  # noqa: E402
from mlx_zip.cuda.kernels.attention import Rotation, rope_and_cache  # noqa: E402
from mlx_zip.cuda.kernels.hyper_rows import (  # noqa: E402
    attend_in_entries,
    embed_entries,
    hyper_embedding,
    pool_places,
)
from mlx_zip.cuda.kernels.packed import Packed, unpack  # noqa: E402
from mlx_zip.cuda.kernels.products import silu_gate  # noqa: E402

ONE = torch.ones(1, dtype=torch.int64)
IDS = torch.zeros((1, 3), dtype=torch.int64)


def words(*shape):
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: embed_entries(IDS, torch.ones(4, 2), torch.ones(2, 2)), "3 places, positions only 2"),
        (lambda: embed_entries(IDS, torch.ones(4, 2), torch.ones(3, 1)), r"places has shape \[3, 1\]"),
        (lambda: attend_in_entries(torch.ones(1, 2, 12), ONE, 2, "none"), "mask 'none' is not one of both,"),
        (lambda: attend_in_entries(torch.ones(1, 2, 12), ONE, 3, "both"), "12 columns are not made of queries"),
        (lambda: pool_places(torch.ones(1, 2, 4), ONE, "first"), "pool 'first' is not one of all, real, last"),
        (lambda: unpack(Packed(words(2, 8), *[torch.zeros(2, 1)] * 2, 3, 32), torch.float32), "3 bits: only 4 and 8"),
        (lambda: unpack(Packed(words(2, 8).long(), *[torch.zeros(2, 2)] * 2, 4, 32), torch.half), "expected int32"),
        (lambda: unpack(Packed(words(2, 8), *[torch.zeros(2, 1)] * 2, 4, 48), torch.float32), "groups of 48"),
        (lambda: hyper_embedding(IDS.T, torch.ones(4, 2), torch.ones(1, 1, 2), 3), r"rows has shape \[1, 1, 2\]"),
        (lambda: silu_gate(torch.ones(4, 2).T), "gate_up is not contiguous"),
        (lambda: silu_gate(torch.ones(4)), r"gate_up has shape \[4\], expected \[None, None\]"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_queries_keys_and_values_that_are_no_whole_heads_are_refused():
    at, cache = IDS[:, :1], torch.zeros(1, 1, 3, 4)
    for columns in (8, 14):  # no query head; no whole one
        with pytest.raises(ValueError, match=f"{columns} columns, which hold no 1 key heads of 4"):
            rope_and_cache(torch.ones(1, 1, columns), at, at, Rotation(torch.ones(1, 2)), cache, cache.clone())


def test_tensors_on_several_devices_are_refused():
    with pytest.raises(ValueError, match=r"on several devices: \['cpu', 'meta'\]"):
        dispatch.should_use_triton(None, torch.ones(1), torch.ones(1, device="meta"))


def test_a_block_forces_one_form_and_an_argument_goes_before_it():
    x = torch.ones(1)
    with dispatch.force_implementation("triton"):
        assert dispatch.should_use_triton(None, x)
        assert not dispatch.should_use_triton("reference", x)
        with dispatch.force_implementation("reference"):
            assert not dispatch.should_use_triton(None, x)
        assert dispatch.should_use_triton(None, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_is_refused_where_it_cannot_run_and_not_taken_by_itself_on_a_cpu(monkeypatch):
    x = torch.ones(1)
    assert not dispatch.should_use_triton(None, x)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="CPU tensors need Triton's interpreter"):
        dispatch.should_use_triton("triton", x)
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="triton is not installed"):
        dispatch.should_use_triton("triton", x)
