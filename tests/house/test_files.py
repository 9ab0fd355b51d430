"""Files and folders appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from mlx_zip.arguments import parse_json_map
from mlx_zip.errors import DataError, GenerationError
from mlx_zip.files import atomic_file, atomic_folder, check_writable, read_json_object, write_json
from mlx_zip.models.model_folder import read_model_config
from mlx_zip.text.sources import Item, parse_item


def write(folder: Path, text: str) -> None:
    with atomic_folder(folder) as partial:
        (partial / "file").write_text(text, encoding="utf-8")


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_json(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "1\n"


def test_an_error_of_the_disk_names_its_reason_and_the_file(tmp_path):
    for error in (OSError("8 requested and 2 written"), OSError(errno.ENOSPC, "No space left")):
        with pytest.raises(OSError, match=f"{error.args[-1]}.*{tmp_path / 'file'}"), atomic_file(tmp_path / "file"):
            raise error
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a file that could be replaced"):
        write_json(tmp_path / "pipe", 1)
    assert (tmp_path / "pipe").is_fifo()
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_an_error_without_a_file_name_gets_one(tmp_path, monkeypatch):
    def write_text(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(OSError, match=r"File too large: '.*/file'"):
        write_json(tmp_path / "file", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_replaces_the_old_one_and_leaves_no_other_files(tmp_path):
    write(tmp_path / "out", "old")
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_while_the_new_folder_is_filled_leaves_the_old_one(tmp_path):
    write(tmp_path / "out", "old")
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "out", "half \ud800")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("end", [OSError, KeyboardInterrupt])
def test_the_old_folder_comes_back_when_the_new_one_cannot_be_renamed(end, tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise end
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(end):
        write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("call", ["is_dir", "exists", "touch"])
def test_a_folder_without_permission_is_refused_before_long_work(call, tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, call, refuse)  # root may write anywhere
    with pytest.raises(DataError, match="out cannot be written: Permission denied"):
        check_writable(tmp_path / "out")


def test_a_file_that_the_system_would_not_make_is_refused_before_long_work(tmp_path):
    check_writable(tmp_path / ("a" * 100))
    for length in (250, 300):  # too long for the temporary file alone, and for the file itself
        with pytest.raises(DataError, match="a cannot be written: File name too long"):
            check_writable(tmp_path / ("a" * length))
    assert not list(tmp_path.iterdir())


def test_an_integer_of_thousands_of_digits_is_an_error_without_advice_for_programmers(tmp_path):
    (tmp_path / "a.json").write_text(f'{{"a": {"9" * 5000}}}')
    with pytest.raises(DataError, match=r"a\.json cannot be read: .* value has 5000 digits$"):
        read_json_object(tmp_path / "a.json")
    with pytest.raises(GenerationError, match=r"--x is not valid JSON: .* value has 5000 digits$"):
        parse_json_map("--x", f'{{"a": {"9" * 5000}}}')
    assert parse_item(Item("f:1", "json", b"9" * 5000)).reason.endswith(" value has 5000 digits")


def test_a_folder_that_must_be_new_is_not_replaced(tmp_path):
    write(tmp_path / "out", "old")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "out", replace=False):
        pass
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_list_of_integers_stands_on_one_line(tmp_path):
    write_json(tmp_path / "file", {"ids": [1, -2, 3], "names": ["1,\n2"]})
    assert (tmp_path / "file").read_text() == '{\n  "ids": [1, -2, 3],\n  "names": [\n    "1,\\n2"\n  ]\n}\n'


def test_two_threads_may_write_one_file_at_the_same_time(tmp_path):
    both, errors = threading.Barrier(2, timeout=20), []

    def work(text: str) -> None:
        try:
            with atomic_file(tmp_path / "file") as partial:
                partial.write_text(text)
                both.wait()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(text,)) for text in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (tmp_path / "file").read_text() in ("one", "other")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- a Mac, whose disk has a cache of its own


class Mac:
    """Records flushes by name of what was flushed; `fails` is the error of F_FULLFSYNC."""

    def __init__(self, monkeypatch, fails: int | None = None) -> None:
        self.flushed: list[tuple[str, str]] = []
        self.fails = fails
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", self.fcntl)
        monkeypatch.setattr(os, "fsync", lambda handle: self.note("fsync", handle))

    def note(self, call: str, handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        self.flushed.append((call, name.split(".partial")[0].lstrip(".")))

    def fcntl(self, handle: int, command: int) -> int:
        assert command == 51
        if self.fails:
            raise OSError(self.fails, os.strerror(self.fails))
        self.note("full", handle)
        return 0


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files are read from /proc")


@needs_proc
def test_a_file_empties_the_disk_s_cache_on_a_mac_before_and_after_it_gets_its_name(tmp_path, monkeypatch):
    mac = Mac(monkeypatch)
    write_json(tmp_path / "file", 1)
    assert mac.flushed == [("full", "file"), ("full", tmp_path.name)]


@needs_proc
def test_a_folder_empties_the_disk_s_cache_on_a_mac_once_for_all_its_files(tmp_path, monkeypatch):
    mac = Mac(monkeypatch)
    with atomic_folder(tmp_path / "out") as partial:
        for name in ("a", "b"):
            (partial / name).write_text(name)
    assert sorted(mac.flushed[:2]) == [("fsync", "a"), ("fsync", "b")]
    assert mac.flushed[2:] == [("fsync", "out"), ("full", "out"), ("full", tmp_path.name)]


@needs_proc
def test_a_file_system_without_a_full_flush_gets_an_ordinary_one(tmp_path, monkeypatch):
    mac = Mac(monkeypatch, fails=errno.ENOTSUP)
    write_json(tmp_path / "file", 1)
    assert mac.flushed == [("fsync", "file"), ("fsync", tmp_path.name)]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_python_alone_takes_for_json_is_refused(number, tmp_path):
    (tmp_path / "file.json").write_text(f'{{"a": [{number}]}}')
    with pytest.raises(DataError, match=rf"file\.json cannot be read: {number} is no number of JSON"):
        read_json_object(tmp_path / "file.json")


def test_a_config_may_have_infinity(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
    assert read_model_config(tmp_path)["time_step_limit"] == [0.0, float("inf")]


def test_the_path_of_a_pipe_is_told_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(DataError) as told:
        read_json_object(tmp_path / "pipe.json")
    assert str(told.value) == f"{tmp_path / 'pipe.json'}: is a folder or device, not a file"


def test_a_disk_that_fails_while_it_flushes_is_an_error(tmp_path, monkeypatch):
    Mac(monkeypatch, fails=errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write_json(tmp_path / "file", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(hasattr(fcntl, "F_FULLFSYNC"), reason="a Mac")
def test_other_systems_flush_as_ever(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    write_json(tmp_path / "file", 1)
    assert len(flushed) == 2
