"""The hyper-encoders' pieces: the kernels against the references in float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.cuda.kernels import hyper_rows  # noqa: E402
from support.pairs import quick_pairs  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [False, True])
def test_entry_rows_are_base_rows_plus_positions(guard, close, dtype, positions):
    entries = guard(torch.randint(0, 9, (3, 5)))
    matrix, places = guard(torch.randn(9, 519).to(dtype)), guard(torch.randn(6, 519).to(dtype))
    got = hyper_rows.embed_entries(entries, matrix, places if positions else None, impl="triton")
    close(got, hyper_rows.reference_embed_entries(entries, matrix.double(), places.double() if positions else None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_entry_rows_of_a_packed_matrix_are_unpacked(guard, close, random_packed, dtype, bits):
    entries, places = guard(torch.randint(0, 9, (3, 5))), guard(torch.randn(6, 576).to(dtype))
    matrix, exact = random_packed(9, 576, bits, 64, dtype)
    entries[1, 2] = 9
    got = hyper_rows.embed_entries(entries, matrix, places, impl="triton")
    assert got[1, 2].isnan().all()
    got[1, 2] = 0.0
    close(got, hyper_rows.reference_embed_entries(entries, exact, places.double()).nan_to_num(0.0))


@quick_pairs({"length, heads, each": [(1, 1, 1), (5, 3, 7), (16, 2, 32)], "mask": hyper_rows.MASKS, "dtype": DTYPES})
def test_attention_sees_what_its_mask_says(guard, close, dtype, mask, length, heads, each):
    qkv = guard(torch.randn(3, length, 3 * heads * each).to(dtype))
    lengths = guard(torch.tensor([1, (length + 1) // 2, length]))
    got = hyper_rows.attend_in_entries(qkv, lengths, heads, mask, impl="triton")
    close(got, hyper_rows.reference_attend_in_entries(qkv.double(), lengths, heads, mask))
    if mask == "both" and length > 1:
        assert (got[0, 1:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", hyper_rows.POOLS)
def test_pooling_takes_the_places_that_its_kind_names(guard, close, dtype, kind):
    x, lengths = guard(torch.randn(3, 4, 519).to(dtype)), guard(torch.tensor([1, 3, 4]))
    close(
        hyper_rows.pool_places(x, lengths, kind, impl="triton"),
        hyper_rows.reference_pool_places(x.double(), lengths, kind),
    )


def test_more_than_sixteen_places_are_refused():
    with pytest.raises(ValueError, match="17 places, at most 16"):
        hyper_rows.attend_in_entries(torch.zeros(1, 17, 3), torch.ones(1, dtype=torch.long), 1, "both")


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_an_id_beyond_the_matrix_gives_nan_and_not_what_follows_it_in_memory(guard, impl):
    got = hyper_rows.embed_entries(guard(torch.tensor([[-1, 2, 3]])), guard(torch.ones(5, 4))[1:4], None, impl=impl)
    assert got[0].isnan().all(-1).tolist() == [True, False, True]
