"""`multitok`: its records hold what they promise, and tables are made of them (nothing timed is judged here)."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest

from mlx_zip.bench.papers.multitok import phrase_rates, tables
from mlx_zip.bench.records import Records
from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Tokens
from support import tiny_bench
from support.places import REPO
from support.tiny_vocabularies import write_pair

SAMPLES = ["the cat and the dog and the cat and the dog", "the cat and the dog", "a cat and the dog", "the dog"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, samples in (("some.jsonl", SAMPLES), ("others.jsonl", ["the zebra and the dog"])):
        (folder / name).write_text("".join(json.dumps({"text": sample}) + "\n" for sample in samples))
    return folder


def bench(texts, *flags):
    files = ("--text", texts / "some.jsonl", "--held-out", texts / "others.jsonl")
    with redirect_stdout(StringIO()) as out:
        assert tiny_bench.run("multitok", *files, "--trials", 2, *flags) == 0
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture(scope="module")
def records(texts):
    return bench(texts)


def test_speed_is_reported_next_to_plain_python_with_all_samples(records):
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
    samples = Samples.from_sequences([[numbers[word] for word in sample.split()] for sample in SAMPLES])
    other = [numbers[word] for word in ["the", "zebra", "and", "the", "dog"]]
    ratios = [line for line in records if line["what"] == "ratio"]
    assert ratios
    for line in ratios:
        dictionary = Dictionary(Settings(Tokens(len(words)), line["setting"]["window"]))
        first, rest = samples.split_at(4 * line["setting"]["percent"] // 100)
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
        known, ids = phrase_rates.learn_phrases_in_plain_python(samples, 3, window)
        dictionary = Dictionary(Settings(Tokens(3), window))
        assert dictionary.train(Samples.from_sequences([list(sample) for sample in samples])).to_lists() == ids
        assert dictionary.phrases == [(id, run) for run, id in known.items() if len(run) > 1]
        for sample in samples:
            assert phrase_rates.encode_in_plain_python(known, sample) == dictionary.encode(list(sample)).tolist()


def test_every_table_is_made_of_the_kept_records():
    records = Records(REPO)
    assert all(len(make(records).splitlines()) > 2 for make in tables.TABLES.values())


def test_a_small_runs_lines_make_tables_too(records, texts, tmp_path):
    root = tmp_path / "checkout"
    (root / "bench" / "records").mkdir(parents=True)
    lines = [*records, *bench(texts, "--tokenizer", write_pair(tmp_path))]
    (root / "bench" / "records" / "multitok.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {name: tables.TABLES[f"multitok-{name}"](Records(root)) for name in ("speed", "ratios", "pruned", "cascade")}
    assert made["cascade"].count(f"| {lines[-1]['data']['units_are']} | ") == 4
    assert made["pruned"].count("| reencode |") == 4
    assert made["speed"].count("| encode, pruned, ") == 4
