"""Where an evaluation's figures go, and numbers that the benchmark harness would choke on."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from mlx_zip.cli import main
from mlx_zip.errors import DataError
from mlx_zip.evaluation.tasks import run_tasks


def test_a_folder_in_place_of_the_json_file_is_refused_before_anything_is_measured(tmp_path, capsys):
    assert main(["evaluate", "--model", "none", "--data", "none.txt", "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path}: is a folder" in capsys.readouterr().err


def test_a_pipe_in_place_of_the_json_file_is_refused_before_anything_is_measured(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["evaluate", "--model", "none", "--data", "none.txt", "--out", str(tmp_path / "pipe")]) == 2
    assert "is a folder or device, not a file" in capsys.readouterr().err


def test_a_pack_in_place_of_the_json_file_is_not_overwritten(tmp_path, capsys):
    pack = tmp_path / "pack.json"
    pack.write_text("[[1, 2]]")
    assert main(["evaluate", "--model", "none", "--data", "none.txt", "--pack", str(pack), "--out", str(pack)]) == 2
    assert f"--out {pack}: the same command reads or writes that file" in capsys.readouterr().err
    assert pack.read_text() == "[[1, 2]]"


@pytest.mark.parametrize(
    ("flag", "told"), [("--out", "--out .: is a folder"), ("--pack", "pack is"), ("--prompts", "--generate")]
)
def test_an_empty_path_is_not_passed_over(flag, told, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    words = ["evaluate", "--engine", "mlx", "--model", "none", "--data", str(tmp_path / "a.txt")]
    assert main([*words, flag, ""]) == 2
    assert told in capsys.readouterr().err


def test_the_table_is_printed_although_the_json_file_cannot_be_written(tmp_path, capsys, monkeypatch):
    def full(path: Any, record: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.evaluate", lambda *_, **__: {})
    monkeypatch.setattr("mlx_zip.evaluation.evaluation_report.format_evaluation_table", lambda record: "the table")
    monkeypatch.setattr("mlx_zip.files.write_json", full)
    argv = ["evaluate", "--engine", "mlx", "--model", "m", "--data", str(tmp_path / "a.txt")]
    assert main([*argv, "--out", str(tmp_path / "a.json")]) == 2
    told = capsys.readouterr()
    assert told.out == "the table\n"
    assert "No space left on device" in told.err


def test_the_record_can_name_a_text_file_whose_name_is_not_utf8(tmp_path, capsys, monkeypatch):
    record = {"data": {"files": [str(tmp_path / "a\udcffb.txt")]}}
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.evaluate", lambda *_, **__: record)
    monkeypatch.setattr("mlx_zip.evaluation.evaluation_report.format_evaluation_table", lambda record: "the table")
    argv = ["evaluate", "--engine", "mlx", "--model", "m", "--data", str(tmp_path / "a.txt")]
    assert main([*argv, "--out", str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_bytes()) == record


@pytest.mark.parametrize(
    "option", [{"num_shots": -1}, {"limit": 0}, {"seed": -1}, {"seed": 2**32}, {"include_path": "nowhere"}], ids=str
)
def test_numbers_and_folders_that_the_harness_cannot_take_are_named(option):
    with pytest.raises(DataError, match=next(iter(option)).replace("_", "[-_]")):
        run_tasks(None, None, ["a"], **option)
