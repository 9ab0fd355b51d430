"""The sequences of a batch share one table of rows: each entry has one place there, however many sequences have it."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.models.batching import extract_cache, filter_cache, merge_caches
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.two_part_step import TwoPartStep
from mlx_zip.packs.pack import Pack
from mlx_zip.packs.tuned import TunedRows
from support import tiny

PACK = [[5, 6], [7, 8, 9], [5, 6, 7]]
IDS = [5, 6, 7, tiny.VOCAB, 8, 9, 5, tiny.VOCAB + 1]


def read(model, ids=IDS, pack=PACK):
    cache = model.make_cache(pack=pack)
    model(mx.array([ids]), cache=cache)
    return cache


def stepped(model, cache, ids, ahead=False):
    """Logits [B, W] of a step that reads ids [B]."""
    ids = mx.array(ids)
    if ahead:
        one = TwoPartStep(model, cache)
        return np.array(one.compute_logits(one.run_body(ids), ids)[:, -1])
    return np.array(model(ids[:, None], cache=cache)[:, -1])


def test_entries_that_several_sequences_have_take_one_place():
    model = tiny.tiny_model()
    state = merge_caches(model, [read(model) for _ in range(3)])[-1]
    assert len(state.books[0]) > len(PACK)
    assert len(state.places) == len(state.books[0])
    assert state.places.count_slots_with_equal_places(len(state.books[0])) == len(state.books[0])
    state = merge_caches(model, [read(model), read(model, pack=PACK[1:])])[-1]
    assert len(state.places) < sum(map(len, state.books))
    assert state.places.count_slots_with_equal_places(2) == 0


def test_a_row_is_encoded_once_for_all_sequences_of_a_batch():
    model = tiny.tiny_model().eval()
    model.row_source.store = RowStore()
    batch = model.make_cache(left_padding=[0] * 4, pack=PACK)
    model(mx.array([IDS] * 4), cache=batch)
    model.row_source.store_all_rows()
    read_before = len({one for one in IDS if one >= tiny.VOCAB})
    assert model.row_source.store.encoded == len(batch[-1].books[0]) + read_before
    assert model.row_source.store.from_memory == 0


def test_a_sequence_that_joins_copies_no_rows_that_are_there():
    model = tiny.tiny_model()
    batch = merge_caches(model, [read(model)])
    state, held = batch[-1], (batch[-1].outputs.array, batch[-1].inputs.array)
    batch = merge_caches(model, [batch, read(model)])
    filter_cache(batch, [1, 0])
    assert (state.outputs.array is held[0], state.inputs.array is held[1]) == (True, True)
    batch = merge_caches(model, [batch, read(model, [*IDS, 30, 31])])
    assert len(state.places) == len(state.books[2]) == len(state.books[0]) + 2


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_many_joins_and_leaves_take_no_more_places(ahead):
    model = tiny.tiny_model()
    batch, most = merge_caches(model, [read(model) for _ in range(2)]), 0
    for number in range(80):
        joining = read(model, tiny.base_ids(30, number), pack=[[3 + number % 30, 3], [4, 5]])
        batch = merge_caches(model, [batch, joining])
        filter_cache(batch, [1, 2])
        stepped(model, batch, [5, 6], ahead)
        assert len({len(batch[-1].books), len(batch[-1].replaced), len(batch[-1].places.index)}) == 1
        most = max(most, len(batch[-1].places))
    state = batch[-1]
    assert len(state.places.place_of) == len(state.places) <= most <= 4 * tiny.SLOTS
    assert state.outputs.capacity == state.inputs.capacity == 256
    assert state.encoded_inputs.size <= 2 * 256


@pytest.mark.parametrize("one", [False, True])
def test_tuned_rows_of_one_sequence_are_not_those_of_another(one):
    model = tiny.tiny_model("gemma" if one else "llama", tie_encoders=one)
    rng = np.random.default_rng(3)
    rows = [rng.normal(0, 0.3, (len(PACK), 64)).astype(np.float32) for _ in range(2)]
    tuned = Pack(PACK, rows=TunedRows(rows[0], rows[0 if one else 1], model.fingerprint))
    packs = [PACK, tuned, tuned, PACK]
    caches = [read(model, IDS[: 4 + n], pack) for n, pack in enumerate(packs)]
    alone = [stepped(model, copy.deepcopy(cache), [tiny.VOCAB + 2])[0] for cache in caches]
    fresh = merge_caches(model, [model.make_cache(pack=tuned), model.make_cache(pack=PACK)])
    batch = merge_caches(model, caches[:1])
    for cache in caches[1:]:
        batch = merge_caches(model, [batch, cache])
    assert len(batch[-1].places) == len({*batch[-1].places.place_of}) >= 2 * len(PACK)
    np.testing.assert_allclose(stepped(model, copy.deepcopy(batch), [tiny.VOCAB + 2] * 4), alone, atol=2e-4)
    np.testing.assert_allclose(stepped(model, batch, [tiny.VOCAB + 2] * 4, ahead=True), alone, atol=2e-4)
    expected = [stepped(model, model.make_cache(pack=pack), [tiny.VOCAB])[0] for pack in (tuned, PACK)]
    np.testing.assert_allclose(stepped(model, fresh, [tiny.VOCAB] * 2), expected, atol=2e-4)
    single = extract_cache(batch, 1)
    np.testing.assert_array_equal(np.array(single[-1].outputs.rows)[0, : len(PACK)], tuned.rows.output)


def test_a_copy_of_a_batch_goes_its_own_way():
    model = tiny.tiny_model()
    batch = merge_caches(model, [read(model), read(model, IDS[:5])])
    twin = copy.deepcopy(batch)
    for one in (30, 31, 32):
        stepped(model, batch, [one, 3])
    expected = stepped(model, copy.deepcopy(twin), [8, 9])
    for one in (20, 21, 22):
        stepped(model, batch, [one, 4])
    np.testing.assert_array_equal(stepped(model, twin, [8, 9]), expected)
    assert len(twin[-1].places) < len(batch[-1].places)


@pytest.mark.parametrize("at", range(6))
def test_an_interrupt_while_rows_are_shared_leaves_the_batch_as_it_was(at, monkeypatch):
    """Wherever in the sharing it comes: before or after rows were written, and while places are noted."""
    model = tiny.tiny_model()
    batch = merge_caches(model, [read(model), read(model, IDS[:5])])
    expected = [stepped(model, copy.deepcopy(batch), ids) for ids in ([30, 31], [8, 9])]
    state, calls = batch[-1], iter(range(99))

    def interrupting(function):
        def called(*args, **options):
            if next(calls) == at:
                raise KeyboardInterrupt
            found = function(*args, **options)
            if next(calls) == at:
                raise KeyboardInterrupt
            return found

        return called

    with monkeypatch.context() as patch:
        patch.setattr(state.outputs, "put_run", interrupting(state.outputs.put_run))
        patch.setattr(state.places, "add", interrupting(state.places.add))
        patch.setattr(state.places, "set_place", interrupting(state.places.set_place))
        with pytest.raises(KeyboardInterrupt):
            stepped(model, batch, [30, 31])
    np.testing.assert_allclose(stepped(model, copy.deepcopy(batch), [8, 9]), expected[1], atol=1e-5)
    np.testing.assert_allclose(stepped(model, batch, [30, 31]), expected[0], atol=1e-5)
