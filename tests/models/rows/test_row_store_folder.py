"""The folder of a row store: read-only or full, shared by processes, purged."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import RowStore
from mlx_zip.models.rows import row_folder
from mlx_zip.models.rows.row_folder import list_row_files, purge_row_folder, sum_disk_usage
from support.places import TESTS
from support.stored_rows import Encoder, N, check, entries, file_of, fill, kind, true_rows, warnings

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


@pytest.mark.slow
def test_a_limit_on_file_sizes_is_like_a_full_disk(tmp_path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n" + WRITER
    done = subprocess.run(
        [sys.executable, "-c", code, str(TESTS), str(tmp_path), "0", "40"], capture_output=True, text=True, timeout=300
    )
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
from support.stored_rows import Encoder, entries, kind, true_rows
import numpy as np
from mlx_zip import RowStore
store, begin, rounds = RowStore(sys.argv[2], memory_bytes=0), int(sys.argv[3]), int(sys.argv[4])
ids, lengths = entries(100_000)
print("ready", flush=True)
for at in range(begin, begin + 200 * rounds, 200):
    chosen = slice(at, at + 300)  # a third is asked for again
    rows = store.find_or_encode_rows(kind(), ids[chosen], lengths[chosen], Encoder())
    np.testing.assert_array_equal(np.array(rows), true_rows(ids[chosen], lengths[chosen]))
    store.store_all_rows()
store.close()
"""


def writer(folder, begin, rounds):
    command = [sys.executable, "-c", WRITER, str(TESTS), str(folder), str(begin), str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_write_and_read_at_once(tmp_path):
    processes = [writer(tmp_path, begin, 40) for begin in (0, 1000, 4000)]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
    assert check(tmp_path, 12_000, folder_bytes=1 << 30) == 0


@pytest.mark.slow
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
    store.find_or_encode_rows(kind(), ids, lengths, Encoder())
    store.flush()
    os.close(handle)
    store.close()
    assert check(tmp_path) == 0
    assert warnings(caplog) == []


# ---- purge


def test_purge_removes_the_rows_and_nothing_else(tmp_path):
    fill(tmp_path / "rows")
    (tmp_path / "rows" / "mine.txt").write_text("mine")
    size = sum_disk_usage(list_row_files(tmp_path / "rows"))
    assert 0 < size <= file_of(tmp_path / "rows").stat().st_size
    assert purge_row_folder(tmp_path / "rows") == (1, size)
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["mine.txt"]
    fill(tmp_path / "other")
    purge_row_folder(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_store_in_use_keeps_working_when_its_folder_is_purged(tmp_path, caplog):
    (tmp_path / "rows").mkdir(mode=0o700)
    (tmp_path / "rows" / "mine.txt").write_text("mine")
    fill(tmp_path / "rows")
    store, encoder, (ids, lengths) = RowStore(tmp_path / "rows", memory_bytes=0), Encoder(), entries(N + 100)
    store.find_or_encode_rows(kind(), ids[:3], lengths[:3], encoder)
    purge_row_folder(tmp_path / "rows")
    rows = store.find_or_encode_rows(kind(), ids, lengths, encoder)
    np.testing.assert_array_equal(np.array(rows), true_rows(ids, lengths))
    store.close()
    assert encoder.calls == [100]
    assert check(tmp_path / "rows", N + 100) == N
    assert warnings(caplog) == []


def test_a_store_whose_folder_is_gone_says_so_once(tmp_path, caplog):
    store, (ids, lengths) = RowStore(tmp_path / "rows"), entries(N)
    (tmp_path / "rows").rmdir()
    for _ in range(2):
        store.find_or_encode_rows(kind(), ids, lengths, Encoder())
        store.flush()
    store.close()
    assert len(warnings(caplog)) == 1
    assert mx.array_equal(store.find_or_encode_rows(kind(), ids, lengths, Encoder()), mx.array(true_rows(ids, lengths)))
