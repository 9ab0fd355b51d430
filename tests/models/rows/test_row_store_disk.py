"""Rows in files: whatever has become of them, never a wrong row, never a crash, one warning."""

import mmap
import os
import stat

import numpy as np
import pytest

from mlx_zip import RowStore
from mlx_zip.models.rows import row_folder
from mlx_zip.models.rows.row_folder import file_number, list_row_files
from support.stored_rows import WIDTH, Encoder, N, check, entries, file_of, fill, kind, true_rows, warnings

HEADER, STRIDE = 4096, 16 + 4 * WIDTH + 8


# ---- in order


def test_another_store_finds_what_one_has_written(tmp_path, caplog):
    fill(tmp_path)
    assert check(tmp_path) == 0
    assert check(tmp_path, N + 50) == 50
    assert check(tmp_path, N + 50) == 0
    assert warnings(caplog) == []


def test_files_are_for_their_owner_only(tmp_path):
    before = os.umask(0)
    try:
        fill(tmp_path / "a" / "rows")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "rows").stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(tmp_path / "a" / "rows").stat().st_mode) == 0o600


def test_rows_are_written_in_batches_and_at_the_end(tmp_path):
    ids, lengths = entries(100)
    store = RowStore(tmp_path)
    for i in range(100):
        store.find_or_encode_rows(kind(), ids[i : i + 1], lengths[i : i + 1], Encoder())
        store.store_all_rows()
    assert check(tmp_path, 100) == 100 - row_folder.FLUSH_ROWS
    store.close()
    assert check(tmp_path, 100) == 0


def test_rows_of_other_sets_are_not_found(tmp_path, caplog):
    fill(tmp_path)
    assert check(tmp_path, which=kind(2)) == N
    assert check(tmp_path) == check(tmp_path, which=kind(2)) == 0
    assert warnings(caplog) == []


def test_an_entry_that_is_written_twice_is_stored_once(tmp_path):
    first, second = RowStore(tmp_path), RowStore(tmp_path)
    ids, lengths = entries(N)
    for store in (first, second):
        store.find_or_encode_rows(kind(), ids, lengths, Encoder())
    first.close()
    size = file_of(tmp_path).stat().st_size
    second.close()
    assert file_of(tmp_path).stat().st_size == size


# ---- bounds


def test_a_folder_stays_within_its_limit_and_the_oldest_rows_are_deleted(tmp_path, caplog):
    limit = 64 << 10
    for seed in range(12):
        fill(tmp_path, 100, seed, folder_bytes=limit)
        assert sum(path.stat().st_size for path in list_row_files(tmp_path)) <= limit
    assert check(tmp_path, 100, 0, folder_bytes=limit) == 100
    assert check(tmp_path, 100, 11, folder_bytes=limit) < 100
    assert warnings(caplog) == []


def test_rows_in_use_outlive_the_file_they_were_in(tmp_path):
    limit = 64 << 10
    fill(tmp_path, 20, folder_bytes=limit)
    for seed in range(1, 12):
        fill(tmp_path, 80, seed, folder_bytes=limit)
        assert check(tmp_path, 20, folder_bytes=limit) == 0
    assert len({path.name for path in list_row_files(tmp_path)}) > 1


def test_models_share_the_limit_and_the_one_used_last_stays(tmp_path):
    limit = 64 << 10
    for model in range(1, 9):
        assert check(tmp_path, 100, which=kind(model), folder_bytes=limit) == 100
        assert sum(path.stat().st_size for path in list_row_files(tmp_path)) <= limit
    assert check(tmp_path, 100, which=kind(8), folder_bytes=limit) == 0


def test_a_limit_too_small_for_a_few_rows_keeps_none(tmp_path, caplog):
    fill(tmp_path, folder_bytes=4096)
    fill(tmp_path, folder_bytes=4096)
    assert list_row_files(tmp_path) == []
    assert len(warnings(caplog)) == 2
    assert "4096 bytes are too few" in warnings(caplog)[0]


# ---- damage


CUTS = [0, 1, 60, HEADER - 1, HEADER, HEADER + 8, "cells-1", "cells", "cells+1", "record", "record+7", "half", "end-1"]


def cut_at(path, place):
    """Byte at which a place in words lies."""
    if isinstance(place, int):
        return place
    size = path.stat().st_size
    cells = size - N * STRIDE
    names = {
        "cells-1": cells - 1,
        "cells": cells,
        "cells+1": cells + 1,
        "record": cells + STRIDE,
        "record+7": cells + STRIDE + 7,
        "half": cells + N // 2 * STRIDE,
        "end-1": size - 1,
    }
    return names[place]


@pytest.mark.parametrize("place", CUTS)
def test_a_file_cut_short_anywhere_is_repaired_with_one_warning(place, tmp_path, caplog):
    fill(tmp_path)
    path = file_of(tmp_path)
    os.truncate(path, cut_at(path, place))
    assert 0 < check(tmp_path) <= N
    assert len(warnings(caplog)) == 1
    assert "damaged" in warnings(caplog)[0]
    caplog.clear()
    assert check(tmp_path) == 0
    assert warnings(caplog) == []


@pytest.mark.parametrize("place", ["cells-1", "record+7", "half", 0])
def test_a_file_cut_short_while_it_is_in_use_is_no_crash(place, tmp_path, caplog):
    fill(tmp_path)
    store, encoder, (ids, lengths) = RowStore(tmp_path, memory_bytes=0), Encoder(), entries(N)
    store.find_or_encode_rows(kind(), ids[:3], lengths[:3], encoder)
    os.truncate(file_of(tmp_path), cut_at(file_of(tmp_path), place))
    rows = store.find_or_encode_rows(kind(), ids, lengths, encoder)
    np.testing.assert_array_equal(np.array(rows), true_rows(ids, lengths))
    store.close()
    assert len(warnings(caplog)) == 1
    assert check(tmp_path) == 0


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bytes_never_give_a_wrong_row(seed, tmp_path):
    fill(tmp_path)
    path, rng = file_of(tmp_path), np.random.default_rng(seed)
    data = bytearray(path.read_bytes())
    begin = (0, HEADER, len(data) - N * STRIDE)[seed % 3]  # in the header, the cells, the records
    for at in rng.integers(begin, len(data), 400 if begin else 4000):
        data[at] ^= 1 << rng.integers(8)
    path.write_bytes(data)
    check(tmp_path)
    assert check(tmp_path) == 0


@pytest.mark.slow
def test_each_single_flipped_bit_of_a_record_is_noticed(tmp_path, caplog):
    fill(tmp_path, 1)
    path = file_of(tmp_path)
    good = path.read_bytes()
    record = len(good) - STRIDE
    for bit in [*range(0, 12 * 8, 5), *range(16 * 8, STRIDE * 8, 7)]:  # ids, row, checksum; between them: filling
        data = bytearray(good)
        data[record + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        caplog.clear()
        assert check(tmp_path, 1) == 1
        assert len(warnings(caplog)) == 1
        path.write_bytes(good)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 100_000, b"\xff" * 100_000, os.urandom(100_000)])
def test_a_file_of_random_bytes_is_replaced(content, tmp_path, caplog):
    fill(tmp_path)
    file_of(tmp_path).write_bytes(content)
    assert check(tmp_path) == N
    assert check(tmp_path) == 0
    assert len(warnings(caplog)) == 1


def test_a_lookup_ends_even_if_every_cell_is_taken(tmp_path):
    fill(tmp_path)
    path = file_of(tmp_path)
    data = bytearray(path.read_bytes())
    records = len(data) - N * STRIDE
    data[HEADER:records] = os.urandom(records - HEADER)
    path.write_bytes(data)
    check(tmp_path)


def test_another_models_file_under_this_ones_name_is_left_alone(tmp_path, caplog):
    check(tmp_path, which=kind(2))
    path = file_of(tmp_path)
    path.rename(tmp_path / f"{kind().name}-000001.rows")
    content = file_of(tmp_path).read_bytes()
    assert check(tmp_path) == N
    assert len(warnings(caplog)) == 1
    assert "another model" in warnings(caplog)[0]
    assert (tmp_path / f"{kind().name}-000001.rows").read_bytes() == content
    assert check(tmp_path) == 0


def test_what_a_killed_process_began_is_removed(tmp_path):
    (tmp_path / f".{kind().name}-000001.rows.partial").write_bytes(b"torn")
    fill(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{kind().name}-000001.rows"]


def test_a_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "rows").mkdir(mode=0o700)
    (tmp_path / "other").write_bytes(b"precious")
    (tmp_path / "rows" / f"{kind().name}-000001.rows").symlink_to(tmp_path / "other")
    check(tmp_path / "rows")
    assert (tmp_path / "other").read_bytes() == b"precious"


# ---- maps, each of which costs a full flush of the disk on a Mac


@pytest.fixture
def maps(monkeypatch):
    """The sizes of all maps that are made during a test."""
    made: list[int] = []
    plain = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda handle, size, **more: made.append(size) or plain(handle, size, **more))
    return made


def test_a_file_is_mapped_once_however_often_it_is_read_and_written(tmp_path, maps):
    with RowStore(tmp_path, memory_bytes=0) as store:
        for n in range(10, N, 10):
            store.find_or_encode_rows(kind(), *entries(n), Encoder())
            store.flush()
    assert store.from_disk > 0
    assert len(maps) == len(list_row_files(tmp_path)) == 1


def test_a_second_model_and_a_full_file_are_the_only_reasons_for_another_map(tmp_path, maps):
    with RowStore(tmp_path, memory_bytes=0, folder_bytes=1 << 17) as store:
        for which in (kind(1), kind(2)):
            for n in (50, 100, 150, 200, 200, 150):
                store.find_or_encode_rows(which, *entries(n), Encoder())
                store.flush()
    newest = {path.name[:32]: file_number(path) for path in list_row_files(tmp_path)}
    assert len(newest) == 2
    assert len(maps) == sum(newest.values())
