"""Rows in a folder: whatever has become of its files, never a wrong row, never a crash, one warning."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from stored_rows import WIDTH, Encoder, entries, kind, true_rows

from mlx_zip import RowStore
from mlx_zip.hyper import row_folder
from mlx_zip.hyper.row_files import disk_bytes, files_in
from mlx_zip.hyper.row_folder import purge

HERE = Path(__file__).resolve().parent
N = 200
HEADER, STRIDE = 4096, 16 + 4 * WIDTH + 8


def fill(folder, n=N, seed=0, folder_bytes=1 << 20):
    with RowStore(folder, folder_bytes=folder_bytes) as store:
        ids, lengths = entries(n, seed)
        store.rows(kind(), ids, lengths, Encoder())


def check(folder, n=N, seed=0, which=None, folder_bytes=1 << 20):
    """Reads n entries, all of which must be right, and puts back what was missing; how many were missing."""
    encoder, (ids, lengths) = Encoder(), entries(n, seed)
    with RowStore(folder, folder_bytes=folder_bytes) as store:
        rows = store.rows(which or kind(), ids, lengths, encoder)
        np.testing.assert_array_equal(np.array(rows), true_rows(ids, lengths))
    return sum(encoder.calls)


def file_of(folder):
    (path,) = files_in(folder)
    return path


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "mlx_zip"]


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


def test_rows_are_written_in_lots_and_at_the_end(tmp_path):
    ids, lengths = entries(100)
    store = RowStore(tmp_path)
    for i in range(100):
        store.rows(kind(), ids[i : i + 1], lengths[i : i + 1], Encoder())
        store.settle()
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
        store.rows(kind(), ids, lengths, Encoder())
    first.close()
    size = file_of(tmp_path).stat().st_size
    second.close()
    assert file_of(tmp_path).stat().st_size == size


# ---- bounds


def test_a_folder_stays_within_its_bound_and_the_oldest_rows_go(tmp_path, caplog):
    limit = 64 << 10
    for seed in range(12):
        fill(tmp_path, 100, seed, folder_bytes=limit)
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= limit
    assert check(tmp_path, 100, 0, folder_bytes=limit) == 100
    assert check(tmp_path, 100, 11, folder_bytes=limit) < 100
    assert warnings(caplog) == []


def test_rows_in_use_outlive_the_file_they_were_in(tmp_path):
    limit = 64 << 10
    fill(tmp_path, 20, folder_bytes=limit)
    for seed in range(1, 12):
        fill(tmp_path, 80, seed, folder_bytes=limit)
        assert check(tmp_path, 20, folder_bytes=limit) == 0
    assert len({path.name for path in files_in(tmp_path)}) > 1


def test_models_share_the_bound_and_the_one_used_last_stays(tmp_path):
    limit = 64 << 10
    for model in range(1, 9):
        assert check(tmp_path, 100, which=kind(model), folder_bytes=limit) == 100
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= limit
    assert check(tmp_path, 100, which=kind(8), folder_bytes=limit) == 0


def test_a_bound_too_small_for_a_few_rows_keeps_none(tmp_path, caplog):
    fill(tmp_path, folder_bytes=4096)
    fill(tmp_path, folder_bytes=4096)
    assert files_in(tmp_path) == []
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
    names = {"cells-1": cells - 1, "cells": cells, "cells+1": cells + 1, "record": cells + STRIDE,
             "record+7": cells + STRIDE + 7, "half": cells + N // 2 * STRIDE, "end-1": size - 1}  # fmt: skip
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
    store.rows(kind(), ids[:3], lengths[:3], encoder)
    os.truncate(file_of(tmp_path), cut_at(file_of(tmp_path), place))
    rows = store.rows(kind(), ids, lengths, encoder)
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
def test_a_file_of_anything_is_replaced(content, tmp_path, caplog):
    fill(tmp_path)
    file_of(tmp_path).write_bytes(content)
    assert check(tmp_path) == N
    assert check(tmp_path) == 0
    assert len(warnings(caplog)) == 1


def test_cells_that_all_point_somewhere_end_in_time(tmp_path):
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
    path.rename(tmp_path / f"{kind().rows.name}-000001.rows")
    content = file_of(tmp_path).read_bytes()
    assert check(tmp_path) == N
    assert len(warnings(caplog)) == 1
    assert "another model" in warnings(caplog)[0]
    assert (tmp_path / f"{kind().rows.name}-000001.rows").read_bytes() == content
    assert check(tmp_path) == 0


def test_what_a_killed_process_began_is_removed(tmp_path):
    (tmp_path / f".{kind().rows.name}-000001.rows.partial").write_bytes(b"torn")
    fill(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{kind().rows.name}-000001.rows"]


def test_a_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "rows").mkdir(mode=0o700)
    (tmp_path / "other").write_bytes(b"precious")
    (tmp_path / "rows" / f"{kind().rows.name}-000001.rows").symlink_to(tmp_path / "other")
    check(tmp_path / "rows")
    assert (tmp_path / "other").read_bytes() == b"precious"


# ---- a disk that takes nothing, a folder that is none


def test_a_read_only_folder_is_read_with_one_warning(tmp_path, caplog, monkeypatch):
    fill(tmp_path)
    plain = os.open

    def read_only(path, flags, *rest, **more):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return plain(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    assert check(tmp_path) == 0
    assert warnings(caplog) == []
    assert check(tmp_path, N + 150) == 150
    assert len(warnings(caplog)) == 1
    assert "Read-only file system" in warnings(caplog)[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_to_write_is_read_with_one_warning(tmp_path, caplog):
    fill(tmp_path / "rows")
    (tmp_path / "rows").chmod(0o500)
    file_of(tmp_path / "rows").chmod(0o400)
    assert check(tmp_path / "rows", N + 150) == 150
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("left", [0, 4, 100, 5000, 11_500, 12_000])
def test_a_full_disk_costs_one_warning_and_keeps_what_was_there(left, tmp_path, caplog, monkeypatch):
    fill(tmp_path, 70)
    plain, free = os.pwrite, left

    def nearly_full(handle, data, at):
        nonlocal free
        taken = min(len(data), free)
        if taken == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        free -= taken
        return plain(handle, data[:taken], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", nearly_full)
        assert check(tmp_path, N) == N - 70
        assert len(warnings(caplog)) == 1
        assert "No space left" in warnings(caplog)[0]
    caplog.clear()
    assert check(tmp_path, N) <= N - 70
    assert check(tmp_path, N) == 0
    assert warnings(caplog) == []


def test_a_limit_on_file_sizes_is_like_a_full_disk(tmp_path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n" + WRITER
    done = subprocess.run([sys.executable, "-c", code, str(HERE), str(tmp_path), "0", "40"], capture_output=True,
                          text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("row store") == 1
    assert "File too large" in done.stderr


@pytest.mark.parametrize("what", ["a file", "below a file", "open to all"])
def test_a_folder_that_cannot_be_used_is_not_used(what, tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    folder = tmp_path / {"a file": "file", "below a file": "file/rows", "open to all": "open"}[what]
    assert check(folder) == N
    assert len(warnings(caplog)) == 1
    assert list((tmp_path / "open").iterdir()) == []


# ---- several processes

WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from stored_rows import Encoder, entries, kind, true_rows
import numpy as np
from mlx_zip import RowStore
store, begin, rounds = RowStore(sys.argv[2], memory_bytes=0), int(sys.argv[3]), int(sys.argv[4])
ids, lengths = entries(100_000)
print("ready", flush=True)
for at in range(begin, begin + 200 * rounds, 200):
    chosen = slice(at, at + 300)  # a third is asked for again
    rows = store.rows(kind(), ids[chosen], lengths[chosen], Encoder())
    np.testing.assert_array_equal(np.array(rows), true_rows(ids[chosen], lengths[chosen]))
    store.settle()
store.close()
"""


def writer(folder, begin, rounds):
    command = [sys.executable, "-c", WRITER, str(HERE), str(folder), str(begin), str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_write_and_read_at_once(tmp_path):
    processes = [writer(tmp_path, begin, 40) for begin in (0, 1000, 4000)]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
    assert check(tmp_path, 12_000, folder_bytes=1 << 30) == 0


def test_a_process_killed_while_writing_leaves_a_good_store(tmp_path, caplog):
    for round_, wait_s in enumerate((0.0, 0.02, 0.1)):
        process = writer(tmp_path, 20_000 * round_, 10_000)
        assert process.stdout.readline() == "ready\n"
        time.sleep(wait_s)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        check(tmp_path, 2000, folder_bytes=1 << 30)
    assert check(tmp_path, 2000, folder_bytes=1 << 30) == 0
    assert warnings(caplog) == []


def test_a_folder_that_another_process_holds_is_read_and_costs_one_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(row_folder, "PATIENCE_S", 0.05)
    fill(tmp_path)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert check(tmp_path, N + 150) == 150
    assert len(warnings(caplog)) == 1
    assert "another process" in warnings(caplog)[0]
    os.close(handle)
    assert check(tmp_path, N + 150) == 150
    assert check(tmp_path, N + 150) == 0


def test_rows_wait_for_another_process_to_finish_writing(tmp_path, caplog):
    store, (ids, lengths) = RowStore(tmp_path), entries(N)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    store.rows(kind(), ids, lengths, Encoder())
    store.flush()
    os.close(handle)
    store.close()
    assert check(tmp_path) == 0
    assert warnings(caplog) == []


# ---- purge


def test_purge_removes_the_rows_and_nothing_else(tmp_path):
    fill(tmp_path / "rows")
    (tmp_path / "rows" / "mine.txt").write_text("mine")
    size = disk_bytes(files_in(tmp_path / "rows"))
    assert 0 < size <= file_of(tmp_path / "rows").stat().st_size
    assert purge(tmp_path / "rows") == (1, size)
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["mine.txt"]
    fill(tmp_path / "other")
    purge(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_store_in_use_goes_on_when_its_folder_is_purged(tmp_path, caplog):
    (tmp_path / "rows").mkdir(mode=0o700)
    (tmp_path / "rows" / "mine.txt").write_text("mine")
    fill(tmp_path / "rows")
    store, encoder, (ids, lengths) = RowStore(tmp_path / "rows", memory_bytes=0), Encoder(), entries(N + 100)
    store.rows(kind(), ids[:3], lengths[:3], encoder)
    purge(tmp_path / "rows")
    rows = store.rows(kind(), ids, lengths, encoder)
    np.testing.assert_array_equal(np.array(rows), true_rows(ids, lengths))
    store.close()
    assert encoder.calls == [100]
    assert check(tmp_path / "rows", N + 100) == N
    assert warnings(caplog) == []


def test_a_store_whose_folder_is_gone_says_so_once(tmp_path, caplog):
    store, (ids, lengths) = RowStore(tmp_path / "rows"), entries(N)
    (tmp_path / "rows").rmdir()
    for _ in range(2):
        store.rows(kind(), ids, lengths, Encoder())
        store.flush()
    store.close()
    assert len(warnings(caplog)) == 1
    assert mx.array_equal(store.rows(kind(), ids, lengths, Encoder()), mx.array(true_rows(ids, lengths)))
