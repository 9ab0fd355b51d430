"""`bench multitok`: its records hold what they promise, and the page's tables are those of the record (nothing timed is
judged here).
"""

import json
import subprocess
import sys

import pytest

from mlx_zip.bench.papers.multitok import multitok
from mlx_zip.bench.papers.multitok.multitok_page import RECORDS, read_lines, write_page, written
from mlx_zip.errors import DataError
from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Tokens
from support.places import DOCS
from support.tiny_vocabularies import write_pair

PAGE = DOCS / "multitok.md"
SAMPLES = ["the cat and the dog and the cat and the dog", "the cat and the dog", "a cat and the dog", "the dog"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, samples in (("some.jsonl", SAMPLES), ("others.jsonl", ["the zebra and the dog"])):
        (folder / name).write_text("".join(json.dumps({"text": sample}) + "\n" for sample in samples))
    return folder


def bench(texts, *flags):
    command = [
        sys.executable,
        "-m",
        "mlx_zip.bench",
        "multitok",
        "--text",
        texts / "some.jsonl",
        "--held-out",
        texts / "others.jsonl",
        "--trials",
        "2",
        *flags,
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def records(texts):
    return bench(texts)


def test_speed_is_told_beside_plain_python_with_all_samples(records):
    timed = [line for line in records if line["what"] in ("train", "encode")]
    assert [(line["what"], line["setting"]["window"]) for line in timed if "plain_python" in line] == [
        ("train", 0),
        ("encode", 0),
        ("train", 2),
        ("encode", 2),
    ]
    for line in timed:
        assert len(line["ours"]["samples"]) == 2
        assert line["unit"] == "million units per s"
        assert line["machine"]
        assert line["data"]["samples"] == 4


def test_ratios_are_those_of_the_library(records):
    words = {word: None for sample in [*SAMPLES, "the zebra and the dog"] for word in sample.split()}
    numbers = {word: number for number, word in enumerate(words)}
    samples = Samples.of([[numbers[word] for word in sample.split()] for sample in SAMPLES])
    other = [numbers[word] for word in ["the", "zebra", "and", "the", "dog"]]
    for line in records:
        if line["what"] == "ratio":
            dictionary = Dictionary(Settings(Tokens(len(words)), line["setting"]["window"]))
            first, rest = samples.cut(4 * line["setting"]["percent"] // 100)
            tokens = len(dictionary.train(first).ids) + len(rest.ids)
            assert line["tokens"] == tokens
            assert line["ratio"] == round(tokens / len(samples.ids), 4)
            assert line["held_out"]["0"] == round(len(dictionary.encode(other)) / len(other), 4)


def test_every_way_of_pruning_is_told(records):
    settings = [line["setting"] for line in records if line["what"] == "pruned"]
    told = [tuple(setting[name] for name in ("window", "at_most", "mode")) for setting in settings]
    assert len(told) == len(set(told)) == 2 * 2 * 4


def test_a_tokenizers_ids_get_ratios_alone(texts, tmp_path):
    lines = bench(texts, "--tokenizer", write_pair(tmp_path))
    assert {line["what"] for line in lines} == {"ratio", "pruned"}
    assert lines[0]["data"]["units"] == 261
    assert lines[0]["per_word"] == round(lines[0]["tokens"] / len(" ".join(SAMPLES).split()), 4)


def test_the_plain_encoder_gives_the_librarys_ids():
    samples = [tuple(sample) for sample in ([0, 1, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [], [2])]
    for window in (0, 1, 2, 3):
        known, ids = multitok.plain_train(samples, 3, window)
        dictionary = Dictionary(Settings(Tokens(3), window))
        assert dictionary.train(Samples.of([list(sample) for sample in samples])).lists() == ids
        assert dictionary.phrases == [(id, run) for run, id in known.items() if len(run) > 1]
        for sample in samples:
            assert multitok.plain_encode(known, sample) == dictionary.encode(list(sample)).tolist()


def test_the_pages_tables_are_those_of_the_record():
    assert written(PAGE.read_text(), read_lines(RECORDS)) == PAGE.read_text()


def test_every_table_of_the_page_has_rows_of_a_small_run_too(records, texts, tmp_path):
    lines = [*records, *bench(texts, "--tokenizer", write_pair(tmp_path))]
    text = written(PAGE.read_text(), lines)
    assert text != PAGE.read_text()
    assert text.count(f"| {lines[-1]['data']['units_are']} | ") == 4


def test_a_record_that_cannot_be_read_leaves_the_page(tmp_path):
    (tmp_path / "page.md").write_text("words")
    (tmp_path / "record.jsonl").write_text("{")
    for name in ("record.jsonl", "none.jsonl"):
        with pytest.raises(DataError, match=name):
            write_page(tmp_path / "page.md", [tmp_path / name])
    assert (tmp_path / "page.md").read_text() == "words"
