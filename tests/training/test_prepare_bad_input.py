"""What `prepare` is given and cannot use: one line that names the culprit, and nothing left behind or lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_zip.cli import main
from mlx_zip.errors import DataError
from mlx_zip.files import try_lock_folder
from mlx_zip.text import hub
from mlx_zip.training.prepare import preparation
from mlx_zip.training.prepare.mixture import load_mixture
from mlx_zip.training.prepare.preparation import ShardMaker
from support.prepared import prepared, stories, texts, tokenizer_folder, tree, write_lines


@pytest.fixture
def data(tmp_path: Path) -> str:
    return texts(tmp_path / "a.jsonl", stories(20))


def crash(self: ShardMaker, *args: Any) -> Any:
    raise RuntimeError("crashed")


@pytest.fixture
def begun(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished shard, whose run crashed at the second."""
    whole = ShardMaker.make_shard
    with monkeypatch.context() as patch:
        patch.setattr(ShardMaker, "make_shard", lambda self, chunk: (crash if chunk.number else whole)(self, chunk))
        with pytest.raises(RuntimeError, match="crashed"):
            prepared(tmp_path / "out", data, shard_samples=8)
    return tmp_path / "out"


# ---- records and sources


@pytest.mark.parametrize("field", ["role", "name"])
def test_half_a_surrogate_pair_anywhere_in_a_conversation_is_a_wrong_record(field, tmp_path, capsys):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.name }}{{ m.content }}{{ eos_token }}{% endfor %}"
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    wrong = [{**talk[0], field: "x\ud800"}, talk[1]]
    file = write_lines(tmp_path / "a.jsonl", [{"messages": wrong}, {"messages": talk}])
    found = prepared(tmp_path / "out", file, tokenizer=str(tokenizer_folder(template=template)))
    notes = capsys.readouterr().err.splitlines()
    assert len(found) == 1
    assert [note.partition(": ")[0] for note in notes] == [f"skipped {file}:1"]
    assert "not valid Unicode" in notes[0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("split: 5", "source 1: split must be a name, got 5"),
        ("revision: [a]", "source 1: revision must be a name"),
        ("columns: {5: text}", "source 1: columns: 5 is none of"),
        ("share: 1" + "0" * 400, "source 1: .*share must be a number above 0"),
        ("data: ['']", "source 1: data must be a name"),
        ("separator: 2020-13-45", "cannot be read"),
        ("separator: " + "9" * 5000, "cannot be read"),
        ("separator: " + "[" * 1000, "cannot be read"),
    ],
    ids=lambda text: text[:20],
)
def test_a_mixture_with_a_value_of_a_wrong_type_is_named(source, words, data, tmp_path):
    lines = [f"data: {data}", "share: 1"]
    lines = [line for line in lines if line.split(":")[0] != source.split(":")[0]]
    (tmp_path / "m.yaml").write_text("sources:\n- " + "\n  ".join([*lines, source]) + "\n")
    with pytest.raises(DataError, match=words):
        load_mixture(tmp_path / "m.yaml")


def test_a_share_too_small_for_one_sample_is_the_sources_own_fault(data, tmp_path, capsys):
    other = texts(tmp_path / "b.jsonl", stories(5))
    (tmp_path / "m.yaml").write_text(f"sources:\n- {{data: {data}, share: 1.0e-300}}\n- {{data: {other}, share: 1}}\n")
    argv = ["prepare", "--tokenizer", str(tokenizer_folder()), "--mixture", str(tmp_path / "m.yaml")]
    assert main([*argv, "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    assert f"{data}: its share next to the others' is too small" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_saved_data_set_without_its_parts_is_named_and_leaves_no_folder(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="set cannot be read"):
        prepared(tmp_path / "out", str(tmp_path / "set"))
    assert not (tmp_path / "out").exists()


def test_a_text_in_a_folder_that_is_not_utf8_is_named(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_text("café\n", encoding="utf-8")
    (tmp_path / "set" / "b.txt").write_bytes(b"caf\xe9 one\n")
    with pytest.raises(DataError, match=r"set/b\.txt cannot be read: 'utf-8' codec"):
        prepared(tmp_path / "out", str(tmp_path / "set"))


def test_only_files_that_the_library_reads_are_looked_at_for_text_that_is_not_utf8(tmp_path):
    for name in (".git/a.txt", "__old/a.txt", "in/.b.txt", "in/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"caf\xe9\n")
    (tmp_path / "a.txt").symlink_to("nowhere")
    assert hub._find_file_not_utf8(tmp_path) == tmp_path / "in/c.txt"


def test_an_error_of_the_data_keeps_the_shards_that_are_finished(begun, data, monkeypatch):
    before = tree(begun)

    def fail(self: ShardMaker, chunk: Any) -> Any:
        raise DataError("no sense in it")

    monkeypatch.setattr(ShardMaker, "make_shard", fail)
    with pytest.raises(DataError, match="no sense in it"):
        prepared(begun, data, shard_samples=8)
    assert tree(begun) == before


# ---- the folder


def test_a_folder_in_which_another_process_prepares_is_left_alone(begun, data, capsys):
    before = tree(begun)
    with try_lock_folder(begun) as alone:
        assert alone
        with pytest.raises(DataError, match="another process prepares data in"):
            prepared(begun, data, shard_samples=8)
    assert tree(begun) == before
    assert len(prepared(begun, data, shard_samples=8)) > 8


def test_a_finished_folder_that_lost_an_array_is_not_taken_for_finished(tmp_path, data):
    prepared(tmp_path / "out", data)
    (tmp_path / "out" / "shard-00000.ids.npy").unlink()
    with pytest.raises(DataError, match=r"shard-00000\.ids\.npy cannot be read.*delete the folder and prepare"):
        prepared(tmp_path / "out", data)


def test_a_finished_folder_whose_index_lacks_its_counts_is_named(tmp_path, data):
    prepared(tmp_path / "out", data)
    path = tmp_path / "out" / "index.json"
    index = json.loads(path.read_text())
    del index["totals"]
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index\.json is damaged; delete the folder"):
        prepared(tmp_path / "out", data)


@pytest.mark.parametrize("text", ["{}", '{"name": "shard-00000"}', "[1]", "{", "[" * 100_000], ids=lambda t: t[:12])
def test_a_damaged_record_of_a_shard_is_named(text, begun, data):
    (begun / "shard-00000.json").write_text(text)
    with pytest.raises(DataError, match=r"shard-00000\.json .*delete the folder and prepare again"):
        prepared(begun, data, shard_samples=8)


def test_a_finished_shard_that_does_not_fit_its_record_is_named(begun, data):
    path = begun / "shard-00000.base.npy"
    whole = np.load(path)
    np.save(path, whole[:-1])
    with pytest.raises(DataError, match=r"shard-00000\.base\.npy is not what its record says"):
        prepared(begun, data, shard_samples=8)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"shard-00000\.base\.npy cannot be read"):
        prepared(begun, data, shard_samples=8)


# ---- paths


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a `prepare` that is refused."""
    argv = ["prepare", "--tokenizer", str(tokenizer_folder()), "--workers", "1", *words]
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.jsonl", "sources"])
def test_a_pipe_among_the_texts_is_named_and_not_waited_for(name, tmp_path, capsys):
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "a.py").write_text("x = 1\n" * 50)
    place = tmp_path / "sources" / "b.py" if name == "sources" else tmp_path / name
    os.mkfifo(place)
    told = said(capsys, "--data", str(tmp_path / name), "--out", str(tmp_path / "out"))
    assert f"{place}: is a folder or device, not a file" in told
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_too_long_is_named_without_an_error_number(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"error: {'t' * 300}.txt: File name too long" in said(capsys, "--data", "t" * 300 + ".txt", "--out", "o")


def test_an_empty_out_is_not_the_working_folder(data, tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "--out is empty" in said(capsys, "--data", data, "--out", "")
    assert list(Path().iterdir()) == []


def test_out_takes_a_home_folder(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    argv = ["prepare", "--tokenizer", str(tokenizer_folder()), "--data", data, "--out", "~/out", "--workers", "1"]
    assert main(argv) == 0
    assert (tmp_path / "out" / "index.json").exists()


def test_an_out_that_cannot_be_made_is_not_to_be_run_again(data, tmp_path, capsys):
    told = said(capsys, "--data", data, "--out", f"{data}/out")
    assert told == f"error: {data}/out cannot be written: Not a directory\n"


def test_prepared_data_are_not_prepared_again(data, tmp_path, capsys):
    prepared(tmp_path / "first", data)
    told = said(capsys, "--data", str(tmp_path / "first"), "--out", str(tmp_path / "out"))
    assert f"{tmp_path / 'first'} is prepared already; `mlx_zip train --data" in told
    assert not (tmp_path / "out").exists()


def test_records_that_are_all_wrong_leave_no_folder(tmp_path):
    wrong = write_lines(tmp_path / "a.jsonl", ["5"] * 40)
    with pytest.raises(DataError, match="40 wrong records, more than"):
        prepared(tmp_path / "out", wrong, shard_samples=8, max_skipped=30)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_before_the_first_shard_leaves_no_folder(data, tmp_path, monkeypatch):
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardMaker, "make_shard", full)
    with pytest.raises(DataError, match=r"out cannot be written: No space left on device$"):
        prepared(tmp_path / "out", data)
    assert not (tmp_path / "out").exists()


def test_the_working_folder_is_a_data_set_too(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    texts(tmp_path / "set" / "train.jsonl", stories(5))
    monkeypatch.chdir(tmp_path / "set")
    assert len(prepared(tmp_path / "out", ".")) > 0


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler])
def test_a_worker_ignores_ctrl_c_if_its_parent_does(before, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which `start_worker` sets
    monkeypatch.setattr(preparation, "_maker", None)
    monkeypatch.setattr(preparation, "ShardMaker", lambda *_: None)
    found = signal.signal(signal.SIGINT, before)
    try:
        preparation.start_worker(None)  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) == (signal.SIG_IGN if before == signal.SIG_IGN else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGINT, found)
