"""Records from files and data sets: what is read, and what is said of what cannot be."""

import gzip
import os

import pytest
from huggingface_hub.errors import HfHubHTTPError

from mlx_zip.errors import DataError
from mlx_zip.text.sources import Record, Skipped, Source, SourceReader, parse_item
from support.prepared import ids_of, prepared, texts, write_lines


def records(*names, **options):
    source = Source(tuple(map(str, names)), **options)
    return [parse_item(item, source.columns) for item in SourceReader(source)]


def read_texts(*names, **options):
    return [record.text for record in records(*names, **options) if isinstance(record, Record)]


def test_a_text_file_is_one_document_as_it_stands(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\n")
    assert read_texts(tmp_path / "a.txt") == ["one\r\n\ntwo\n"]


def test_a_separator_line_ends_a_document_and_newlines_around_it_belong_to_none(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo --- two\n---\n\nthree\n---\n---\nfour\n")
    found = records(tmp_path / "a.txt", separator="---")
    assert [r.text if isinstance(r, Record) else r.reason for r in found] == [
        "one\ntwo --- two",
        "three",
        "no text",
        "four",
    ]
    assert [r.where.rsplit(":", 1)[1] for r in found] == ["1", "4", "7", "8"]


def test_gzip_files_read_as_plain_ones(tmp_path):
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(b"one\n")
    assert read_texts(tmp_path / "a.txt.gz", texts(tmp_path / "b.jsonl.gz", ["two"])) == ["one\n", "two"]


def test_blank_lines_between_records_are_no_records(tmp_path):
    assert read_texts(write_lines(tmp_path / "a.jsonl", ['{"text": "a"}', "", "  ", '{"text": "b"}'])) == ["a", "b"]


def test_columns_name_the_keys_of_other_peoples_records(tmp_path):
    data = write_lines(tmp_path / "a.jsonl", [{"q": "2+2?", "a": "4", "text": "no"}])
    (record,) = records(data, columns={"prompt": "q", "completion": "a"})
    assert (record.prompt, record.text) == ("2+2?", "4")
    (record,) = records(data, columns={"text": "q"})
    assert record.text == "2+2?"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": 1}', "text is int, not text"),
        ('{"text": null}', "has neither text nor messages nor prompt and completion"),
        ('{"prompt": "a"}', "has neither text nor messages nor prompt and completion"),
        ('{"prompt": "a", "completion": 4}', "completion is int, not text"),
        ('{"prompt": ["a"], "completion": "b"}', "prompt is list, not text"),
        ('["text"]', "not a JSON object but list"),
        ('{"text": "a"', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (b'{"text": "\xff"}', "not valid UTF-8 at byte 10"),
        ('{"text": "\\ud800"}', "not valid Unicode at character 0"),
        ('{"messages": "hi"}', "messages is str, not a list"),
        ('{"messages": ["hi"]}', "message 0 is no object with a role"),
        ('{"messages": [{"content": "hi"}]}', "message 0 is no object with a role"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content of message 0 is int, not text"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "not valid Unicode"),
    ],
)
def test_a_wrong_line_is_named_with_its_reason(tmp_path, line, reason):
    good, wrong = records(write_lines(tmp_path / "a.jsonl", ['{"text": "a"}', line]))
    assert good.text == "a"
    assert isinstance(wrong, Skipped)
    assert wrong.where == f"{tmp_path / 'a.jsonl'}:2"
    assert wrong.reason.startswith(reason)
    assert not wrong.empty


@pytest.mark.parametrize(
    "line", ['{"text": " \\n"}', '{"messages": []}', '{"messages": [{"role": "user", "content": " "}]}']
)
def test_a_record_without_text_is_empty_which_is_no_fault(tmp_path, line):
    (found,) = records(write_lines(tmp_path / "a.jsonl", [line]))
    assert isinstance(found, Skipped)
    assert found.empty


def test_a_document_that_is_not_utf8_is_skipped_and_the_others_stay(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n---\nb\xffd\n---\nfine\n")
    assert read_texts(tmp_path / "a.txt", separator="---") == ["good", "fine"]


def test_a_cut_off_gzip_file_is_an_error_that_names_it(tmp_path):
    texts(tmp_path / "a.jsonl.gz", ["one" * 1000, "two"])
    (tmp_path / "a.jsonl.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:40])
    with pytest.raises(DataError, match=r"a.jsonl.gz cannot be read"):
        records(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.txt.gz").write_text("not gzip")
    with pytest.raises(DataError, match=r"b.txt.gz cannot be read"):
        records(tmp_path / "b.txt.gz")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt", "a.txt: no such file"),
        ("/a/b", "no such file or folder"),
        ("nothing", "no name of a data set"),
        ("a.parquet", "no such file or folder"),
    ],
)
def test_data_that_are_not_there_are_an_error_before_anything_is_written(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"a data file is named \.txt, \.jsonl"):
        records(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "options",
    [
        {"share": 0},
        {"share": True},
        {"separator": ""},
        {"separator": "a\nb"},
        {"separator": 5},
        {"columns": {"x": "y"}},
        {"columns": {"text": 5}},
    ],
)
def test_a_source_out_of_range_is_refused(options):
    with pytest.raises(DataError):
        Source(("a.txt",), **options)


def test_a_reader_knows_how_much_it_has_read(tmp_path):
    names = [texts(tmp_path / f"{i}.jsonl", ["x" * 100] * 5) for i in range(3)]
    reader = SourceReader(Source(tuple(names)))
    assert [*reader]
    assert reader.stored == sum((tmp_path / f"{i}.jsonl").stat().st_size for i in range(3))


# ---- data sets


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="the data extra is not installed")


def test_a_saved_data_set_and_its_splits_are_read(tmp_path, datasets):
    rows = datasets.Dataset.from_dict({"content": ["one", "two", ""], "n": [1, 2, 3]})
    rows.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "split")
    columns = {"text": "content"}
    assert read_texts(tmp_path / "flat", columns=columns) == ["one", "two"]
    assert read_texts(tmp_path / "split", columns=columns, split="test") == ["one", "two"]
    with pytest.raises(DataError, match="has no split 'train'; it has test"):
        records(tmp_path / "split", columns=columns)
    (first, *_) = records(tmp_path / "flat", columns=columns)
    assert first.where == f"{tmp_path / 'flat'} row 0"


def test_parquet_files_and_conversations_in_them_are_read(tmp_path, datasets):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    datasets.Dataset.from_dict({"messages": [talk, talk]}).to_parquet(tmp_path / "a.parquet")
    shards = prepared(tmp_path / "out", str(tmp_path / "a.parquet"), codebook_size=0)
    assert len(shards) == 2
    assert shards[0].ids[shards[0].mask].tolist()[:-1] == ids_of("yes")


def test_a_folder_that_is_no_data_set_is_an_error_that_names_it(tmp_path, datasets):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty cannot be read"):
        records(tmp_path / "empty")


def test_a_pipe_in_a_folder_is_told_and_not_waited_for(tmp_path, datasets):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    os.mkfifo(folder / ".hidden.txt")  # which the library leaves out
    assert read_texts(folder) == ["one"]
    os.mkfifo(folder / "more" / "b.txt")
    with pytest.raises(DataError, match=r"more/b\.txt: is a folder or device, not a file"):
        records(folder)


def test_subsets_are_read_in_turn(monkeypatch, datasets):
    asked = []

    def load(name, subset, **options):
        asked.append((name, subset, options["split"], options["streaming"]))
        return [{"text": f"{subset}{i}"} for i in range(3 if subset == "b" else 1)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_texts("owner/name", subsets=("a", "b"), split="dev") == ["a0", "b0", "b1", "b2"]
    assert asked == [("owner/name", "a", "dev", True), ("owner/name", "b", "dev", True)]


@pytest.mark.parametrize("error", [ConnectionError, HfHubHTTPError.__bases__[0]])
def test_a_lost_connection_is_an_error_that_names_the_data_set(error, monkeypatch, datasets):
    def rows():
        yield {"text": "one"}
        raise error("gone")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows())
    with pytest.raises(DataError, match="owner/name cannot be read: gone"):
        records("owner/name")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.jsonl", '{"text": "one"}\n{"text": "two"}\n'),
        ("train.csv", "text\none\ntwo\n"),
        ("train.csv.gz", "text\none\ntwo\n"),
        ("train.json", '[\n  {"text": "one"}, {"text": "two"}]'),
    ],
)
def test_a_folder_with_a_data_file_is_a_data_set_although_its_script_lies_next_to_it(name, content, tmp_path, datasets):
    (tmp_path / "set").mkdir()
    data = content.encode()
    (tmp_path / "set" / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (tmp_path / "set" / "make.py").write_text("print('a script')")
    assert [found.text for found in records(tmp_path / "set")] == ["one", "two"]


def test_a_source_folder_with_settings_in_json_is_still_source_code(tmp_path):
    (tmp_path / "a.js").write_text("one")
    (tmp_path / "package.json").write_text('{"name": "a", "files": [{"b": 1}]}')
    (tmp_path / "words.json").write_text('["a", "b"]')
    assert [found.text for found in records(tmp_path)] == ["one"]
