"""Data that cannot be trained on yet: what is said, and that no failure is in the way of the next try."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_zip.cli import main
from mlx_zip.errors import DataError
from mlx_zip.training.prepare.preparation import ShardMaker
from support.prepared import expanded, ids_of, prepared, stories, texts, tree
from support.tiny_training import options, write_plain, write_shards


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(word) for word in argv]) == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    assert "delete" not in found
    return found


def test_a_text_file_is_answered_with_the_command_that_prepares_it(tmp_path, capsys):
    data = texts(tmp_path / "talks.jsonl", ["one", "two"])
    found = said(capsys, "train", "--model", "m", "--data", data, "--out", tmp_path / "run")
    assert f"{data} is not prepared data" in found
    assert f"mlx_zip prepare --model m --data {data} --out talks-prepared" in found
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("index", [None, '{"files": []}'])
def test_an_unprepared_folder_is_too_whatever_index_it_has(index, tmp_path, capsys):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "page.md").write_text("text")
    if index is not None:
        (tmp_path / "site" / "index.json").write_text(index)
    found = said(capsys, "train", "--model", "m", "--data", tmp_path / "site", "--out", tmp_path / "run")
    assert f"mlx_zip prepare --model m --data {tmp_path / 'site'} --out site-prepared" in found


def test_mlx_lms_folder_is_answered_with_a_command_per_file_and_its_length(tmp_path, capsys):
    (tmp_path / "set").mkdir()
    for name in ("train", "valid"):
        texts(tmp_path / "set" / f"{name}.jsonl", ["one"])
    flags = ["--max-seq-length", 512]
    found = said(capsys, "train", "--model", "m", "--data", tmp_path / "set", "--out", tmp_path / "run", *flags)
    assert f"--data {tmp_path / 'set' / 'train.jsonl'} --context 512 --out set-train and" in found
    assert f"--data {tmp_path / 'set' / 'valid.jsonl'} --context 512 --out set-valid" in found


def test_data_of_another_length_or_with_other_masks_are_refused(tmp_path, capsys):
    run = options(tmp_path / "run", made=("data",), data=[])
    data = write_shards(tmp_path / "data", settings={"train_on": "all"})
    flags = ["--model", run.model, "--data", data, "--out", run.out]
    assert "mlx_zip prepare --context 32" in said(capsys, "train", *flags, "--max-seq-length", 32)
    assert "mlx_zip prepare --train-on answers" in said(capsys, "train", *flags, "--mask-prompt")


def test_a_name_that_is_neither_folder_nor_data_set_here_is_told_with_both_hints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = said(capsys, "train", "--model", "m", "--data", "data/prepard", "--out", tmp_path / "run")
    assert "data/prepard: no such folder" in found
    assert "mlx_zip prepare --model m --data data/prepard" in found


def test_unfinished_data_are_to_be_finished(tmp_path, capsys):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "prepare.json").write_text("{}")
    found = said(capsys, "train", "--model", "m", "--data", tmp_path / "begun", "--out", tmp_path / "run")
    assert "not finished: run the same `mlx_zip prepare` again" in found


def failing(folder: Path, data: str, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Prepares data in a folder until shard number `first`, which fails."""
    make = ShardMaker.make_shard

    def fail(self: ShardMaker, chunk: object) -> object:
        if chunk.number >= first:  # type: ignore[attr-defined]
            raise DataError("no sense in it")
        return make(self, chunk)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ShardMaker, "make_shard", fail)
        with pytest.raises(DataError, match="no sense in it"):
            prepared(folder, data, shard_samples=4)


def test_a_prepare_that_was_killed_before_its_first_shard_is_not_in_the_way_of_one_with_other_settings(
    tmp_path, monkeypatch, capsys
):
    data = texts(tmp_path / "d.jsonl", stories(40))
    failing(tmp_path / "out", data, monkeypatch, 1)
    for path in (tmp_path / "out").glob("shard-*"):
        path.unlink()
    assert (tmp_path / "out" / "prepare.json").is_file()
    prepared(tmp_path / "out", data, shard_samples=4, context=48)
    prepared(tmp_path / "whole", data, shard_samples=4, context=48)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert "removed unfinished data of other settings (context 32, which is now 48)" in capsys.readouterr().err


@pytest.mark.slow
def test_finished_shards_are_not_removed_for_other_settings(tmp_path, monkeypatch):
    data = texts(tmp_path / "d.jsonl", stories(40))
    failing(tmp_path / "out", data, monkeypatch, 1)
    before = tree(tmp_path / "out")
    assert "shard-00000.json" in before
    with pytest.raises(DataError, match=r"context 32, which is now 48.*same settings.*--out"):
        prepared(tmp_path / "out", data, shard_samples=4, context=48)
    assert tree(tmp_path / "out") == before
    prepared(tmp_path / "out", data, shard_samples=4)
    prepared(tmp_path / "whole", data, shard_samples=4)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def source_folder(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.py").write_text("the end")
    (folder / "inner" / "a.c").write_text("the mat")
    (folder / "notes.md").write_text("the cat")
    (folder / "logo.png").write_bytes(b"\x89PNG")
    (folder / ".git" / "c.py").write_text("hidden")
    return folder


def test_source_files_and_folders_of_them_are_texts(tmp_path):
    folder = source_folder(tmp_path / "project")
    found = expanded(prepared(tmp_path / "out", str(folder), fill_windows=False, codebook_size=0))
    wanted = [ids_of("the end"), ids_of("the mat"), ids_of("the cat")]
    assert [ids[1:-1] for ids in found] == wanted, "each file is one document; images and hidden folders are left out"
    one = expanded(prepared(tmp_path / "one", str(folder / "b.py"), fill_windows=False, codebook_size=0))
    assert [ids[1:-1] for ids in one] == wanted[:1]


@pytest.mark.slow
def test_codebooks_may_begin_empty(tmp_path):
    data, model = texts(tmp_path / "d.jsonl", ["the cat"]), write_plain(tmp_path / "plain")
    words = ["prepare", "--model", str(model), "--data", data, "--out", str(tmp_path / "out")]
    words += ["--workers", "1", "--empty-start"]
    assert main(words) == 0
