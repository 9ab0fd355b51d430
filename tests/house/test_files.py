"""Files and folders appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mlx_zip.errors import DataError
from mlx_zip.files import check_out, whole_file, whole_folder, write_json


def write(folder: Path, text: str) -> None:
    with whole_folder(folder) as partial:
        (partial / "file").write_text(text, encoding="utf-8")


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_json(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "1\n"


def test_an_error_of_the_disk_names_its_reason_and_the_file(tmp_path):
    for error in (OSError("8 requested and 2 written"), OSError(errno.ENOSPC, "No space left")):
        with pytest.raises(OSError, match=f"{error.args[-1]}.*{tmp_path / 'file'}"), whole_file(tmp_path / "file"):
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


def test_a_folder_without_write_permission_is_refused_before_long_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(DataError, match="its folder cannot be written to"):
        check_out(tmp_path / "out")


def test_a_folder_that_must_be_new_is_not_replaced(tmp_path):
    write(tmp_path / "out", "old")
    with pytest.raises(FileExistsError), whole_folder(tmp_path / "out", replace=False):
        pass
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_list_of_integers_stands_on_one_line(tmp_path):
    write_json(tmp_path / "file", {"ids": [1, -2, 3], "names": ["1,\n2"]})
    assert (tmp_path / "file").read_text() == '{\n  "ids": [1, -2, 3],\n  "names": [\n    "1,\\n2"\n  ]\n}\n'
