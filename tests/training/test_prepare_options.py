"""`prepare`: options, documents read in parts, and records that are wrong or empty."""

import json
import shutil

import pytest

from mlx_zip.errors import DataError
from mlx_zip.text import sources
from mlx_zip.text.sources import Source
from mlx_zip.training.prepare import preparation
from mlx_zip.training.prepare.plan import PrepareOptions
from mlx_zip.training.prepare.preparation import prepare_data
from support.prepared import (
    BOS,
    EOS,
    expanded,
    ids_of,
    prepared,
    stream_of,
    tokenizer_folder,
    write_lines,
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 1}, "context must be an integer of 2 or more"),
        ({"limit": 0}, "limit must be"),
        ({"start_draw": 2}, r"name it with pack \(--pack\)"),
        ({"train_on": "questions"}, "train_on"),
        ({"model": "a", "tokenizer": "b"}, "either a model or a tokenizer"),
        ({"protect": ("letters",)}, "protect 'letters'"),
        ({"protect": ("9999",)}, "id 9999"),
        ({"merge_size": 17}, "merge_size 17"),
    ],
)
def test_options_out_of_range_are_refused_by_name(tmp_path, data, options, words):
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "out", data, **options)


def test_a_tokenizer_without_eos_and_pad_is_refused(tmp_path, data):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tokenizer_folder() / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="neither a pad nor an eos token"):
        prepared(tmp_path / "out", data, tokenizer=str(folder / "tokenizer.json"))


def test_a_context_that_the_ids_before_every_text_would_fill_is_refused(tmp_path, data):
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folder(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = tokenizer["post_processor"]["single"][0]
    tokenizer["post_processor"]["single"].insert(0, bos)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert expanded(prepared(tmp_path / "out", data, tokenizer=str(folder), context=3))[0][:2] == [BOS, BOS]
    with pytest.raises(DataError, match="context 2 leaves no room after the 2 ids"):
        prepared(tmp_path / "none", data, tokenizer=str(folder), context=2)
    assert not (tmp_path / "none").exists()


def test_workers_and_sources_are_checked(tmp_path, data):
    options = PrepareOptions((Source((data,)),), tmp_path / "out", tokenizer=str(tokenizer_folder()))
    with pytest.raises(DataError, match="workers must be 1 or more"):
        prepare_data(options, workers=0)
    with pytest.raises(DataError, match="no data"):
        PrepareOptions((), tmp_path / "out", tokenizer="t")


def test_a_long_document_is_read_in_parts_that_stay_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST", 40)
    lines = [f"line {i} of a long text." for i in range(20)]
    (tmp_path / "long.txt").write_text("\n".join(lines))
    parts = list(sources.SourceReader(Source((str(tmp_path / "long.txt"),))))
    assert len(parts) > 5
    assert [part.continues for part in parts] == [True] * (len(parts) - 1) + [False]
    samples = expanded(prepared(tmp_path / "out", str(tmp_path / "long.txt")))
    assert [x for ids in samples for x in ids[1:]] == [*ids_of("\n".join(lines)), EOS]


def test_wrong_and_empty_records_are_reported_counted_and_skipped(tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a."}, "{", {"text": " "}, {"words": "b"}, {"text": "c."}])
    shards = prepared(tmp_path / "out", data)
    lines = capsys.readouterr().err.splitlines()
    assert expanded(shards) == [[BOS, *stream_of(["a.", "c."])]]
    assert [line.split(": ")[0] for line in lines] == [f"skipped {data}:2", f"skipped {data}:4"]
    assert shards.index["skipped"] == {"wrong": 2, "empty": 1, "unlearnable windows": 0}
    assert shards.index["records"] == 5


def test_wrong_records_that_are_too_many_to_name_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preparation, "MOST_NOTES", 2)
    data = write_lines(tmp_path / "d.jsonl", ["{", {"text": "a."}, "{", "{", "{"])
    prepared(tmp_path / "out", data)
    assert [line.split(": ")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"skipped {data}:1",
        f"skipped {data}:3",
        "skipped 2 more wrong records after these",
    ]


def test_more_wrong_records_than_allowed_are_an_error_that_names_the_first(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a."}, "{", "{", "{"])
    with pytest.raises(DataError, match=r"3 wrong records, more than max_skipped .* 2; the first: \S*d.jsonl:2: not"):
        prepared(tmp_path / "out", data, max_skipped=2)
    assert prepared(tmp_path / "other", data, max_skipped=3).index["skipped"]["wrong"] == 3


@pytest.mark.parametrize("records", [[], [{"text": ""}], ["{"]])
def test_data_without_a_sample_are_an_error_and_leave_no_folder(tmp_path, records):
    data = write_lines(tmp_path / "d.jsonl", records)
    with pytest.raises(DataError, match=r"d.jsonl gives no sample to train on"):
        prepared(tmp_path / "out", data)
    assert not (tmp_path / "out").exists()
