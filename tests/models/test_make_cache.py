"""`make_cache(pack=...)` takes every form of a pack, and the objects of a request print in one line."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import DataError, ModelError, RowStore
from mlx_zip.models.rows.zip_state import ZipState
from mlx_zip.packs.pack import Pack, save_pack
from mlx_zip.packs.tuned import TunedRows
from support.starting import MODEL, OTHER, START
from support.tiny import PAD, SLOTS, VOCAB, tiny_model

ROWS = np.random.default_rng(0).normal(0, 0.3, (len(START), 64)).astype(np.float32)
TUNED = Pack(START, rows=TunedRows(ROWS, -ROWS, MODEL.fingerprint))


def state_of(**options):
    return MODEL.make_cache(**options)[-1]


@pytest.fixture
def path(tmp_path):
    save_pack(tmp_path / "pack.npz", Pack(START, None, {}, TUNED.rows))
    return tmp_path / "pack.npz"


def test_a_pack_is_a_path_a_pack_entries_or_tuned_entries(path):
    for pack in (path, str(path), Pack(START), START, [list(entry) for entry in START], TUNED, np.array(START[:1])):
        state = state_of(pack=pack)
        assert state.params.start == START[: len(state.params.start)]
        assert len(state.books[0]) == (1 if isinstance(pack, np.ndarray) else len(START))
    assert state_of(pack=()).params.start in (None, ())


def test_a_path_and_a_tuned_pack_bring_their_rows(path):
    for pack in (path, TUNED):
        assert state_of(pack=pack).tuned == [TUNED]
    assert state_of(pack=Pack(START)).tuned == [None]


def test_a_batch_takes_one_pack_for_all_or_a_list_of_one_per_sequence(path):
    same = state_of(left_padding=[0, 0, 0], pack=path)
    assert [book.params.start for book in same.books] == [START] * 3
    assert same.tuned[0] is same.tuned[2]
    each = state_of(left_padding=[0, 0, 0, 0], pack=[path, Pack(OTHER), OTHER, None])
    assert [book.params.start or () for book in each.books] == [START, OTHER, OTHER, ()]
    with pytest.raises(ModelError, match="2 packs for 3"):
        state_of(left_padding=[0, 0, 0], pack=[path, None])


def test_a_file_that_is_no_pack_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.npz"):
        state_of(pack=tmp_path / "none.npz")


def test_a_model_takes_a_pack_from_a_file(path):
    model = tiny_model()
    model.use_pack(path)
    assert model.make_cache()[-1].params.start == model.config.start == START
    assert model.row_source.pack == TUNED


def test_a_saved_state_takes_its_rows_from_a_path(path):
    state = ZipState.from_state(state_of(pack=path).state)
    assert isinstance(state.tuned[0], str)
    state.bind_start_packs([path])
    assert state.tuned == [TUNED]


def test_objects_of_a_request_print_in_one_short_line(tmp_path):
    cache = MODEL.make_cache(pack=TUNED)
    MODEL(mx.array([[5, 6, 7, VOCAB]]), cache=cache)
    batch = MODEL.make_cache(left_padding=[0, 1])
    MODEL(mx.array([[5, 6], [PAD, 5]]), cache=batch)
    assert repr(cache[-1]) == f"<ZipState: 4 ids, {len(cache[-1].books[0])} entries, {3 + len(START[0])} base tokens>"
    assert repr(batch[-1]) == "<ZipState of 2 sequences: [2, 1] ids, [1, 0] entries, [2, 1] base tokens>"
    with RowStore(tmp_path) as store:
        assert repr(store).startswith(f"<RowStore: 0 bytes in memory, folder {tmp_path}; rows by origin: 0 encoded")
    for shown in (cache[-1], batch[-1], cache[-1].outputs, RowStore(), MODEL.row_source, MODEL.config, MODEL.layout):
        assert len(repr(shown)) < 700
        assert "\n" not in repr(shown)
        assert "array" not in repr(shown)
    assert repr(SLOTS) in repr(MODEL.layout)
