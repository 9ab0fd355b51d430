"""`mlx_zip vocab multitok`: what it prints and writes, and what it refuses."""

import json
import signal

import pytest

from mlx_zip.packs.pack import load_pack
from mlx_zip.text import documents
from mlx_zip.text.documents import read_corpus
from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Words, prune, rewrite_ids
from support import tiny_text
from support.command_line import outcome, runner, shown
from support.tiny_vocabularies import write_folder

SAMPLES = ["the cat and the dog and the cat and the dog", "the cat and the dog", "", "the dog and the cat", "a cat"]
TRAINED = [sample.split() for sample in SAMPLES if sample]


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs the command in an empty folder with `some.jsonl` -> (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": sample}) + "\n" for sample in SAMPLES))
    return outcome(capsys, "vocab", "multitok")


@pytest.fixture
def encoded(tmp_path):
    return lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def by_hand(window=0, **fields):
    dictionary = Dictionary(Settings(Words.from_samples(TRAINED), window, **fields))
    return dictionary, dictionary.train(dictionary.number_units(TRAINED))


@pytest.mark.parametrize("window", [0, 2])
def test_train_learns_what_the_library_does(run, encoded, window):
    status, out, err = run(
        "train", "--data", "some.jsonl", "--out", "a.mtok", "--window", window, "--encoded", "ids.jsonl"
    )
    dictionary, ids = by_hand(window)
    assert (status, err) == (0, "")
    assert Dictionary.load("a.mtok").phrases == dictionary.phrases
    assert encoded("ids.jsonl") == ids.to_lists()
    figures = shown(out)
    assert [figures[name] for name in ("samples", "corpus units", "corpus tokens")] == ["4", "23", str(len(ids.ids))]


@pytest.mark.parametrize("mode", ["published", "single", "parent", "reencode"])
def test_train_prunes_and_rewrites_as_the_library_does(run, encoded, mode):
    flags = ("--prune", 1, "--prune-mode", mode, "--encoded", "ids.jsonl", "--json")
    status, out, _ = run("train", "--data", "some.jsonl", "--out", "a.mtok", *flags)
    dictionary, ids = by_hand()
    pruned = prune(dictionary, 1, mode)
    again = rewrite_ids(dictionary, pruned, ids)
    record = json.loads(out)
    assert status == 0
    assert encoded("ids.jsonl") == again.to_lists()
    assert Dictionary.load("a.mtok").phrases == pruned.phrases
    assert record["trained"]["corpus_tokens"] == len(ids.ids)
    assert record["pruned"]["corpus_tokens"] == Dictionary.load("a.mtok").totals.tokens == len(again.ids)


def test_a_fraction_learns_from_the_first_samples_alone(run, encoded):
    run("train", "--data", "some.jsonl", "--out", "a.mtok", "--fraction", 50, "--encoded", "ids.jsonl")
    dictionary = Dictionary(Settings(Words.from_samples(TRAINED)))
    learned = dictionary.train(dictionary.number_units(TRAINED[:2])).to_lists()
    singles = [(1 + words).tolist() for words in dictionary.number_units(TRAINED[2:])]
    assert encoded("ids.jsonl") == learned + singles
    assert Dictionary.load("a.mtok").phrases == dictionary.phrases


@pytest.mark.parametrize("mode", ["published", "single", "parent", "reencode"])
def test_what_a_fraction_leaves_out_stays_in_units_when_phrases_are_pruned(run, encoded, mode):
    flags = ("--fraction", 50, "--prune", 1, "--prune-mode", mode, "--encoded", "ids.jsonl", "--json")
    record = json.loads(run("train", "--data", "some.jsonl", "--out", "a.mtok", *flags)[1])
    dictionary = Dictionary(Settings(Words.from_samples(TRAINED)))
    ids = dictionary.train(dictionary.number_units(TRAINED[:2]))
    learned = rewrite_ids(dictionary, prune(dictionary, 1, mode), ids).to_lists()
    singles = [(1 + words).tolist() for words in dictionary.number_units(TRAINED[2:])]
    assert encoded("ids.jsonl") == learned + singles
    assert record["pruned"]["corpus_tokens"] == sum(map(len, learned + singles))


def test_encode_prints_a_list_of_ids_for_each_sample(run, encoded):
    run("train", "--data", "some.jsonl", "--out", "a.mtok")
    status, out, err = run("encode", "a.mtok", "--data", "some.jsonl", "--window", 2)
    dictionary, _ = by_hand()
    expected = [dictionary.encode(sample, 2).tolist() for sample in dictionary.number_units(TRAINED)]
    assert (status, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == expected
    record = json.loads(run("encode", "a.mtok", "--data", "some.jsonl", "--window", 2, "--json")[1])
    assert record == {
        "samples": 4,
        "units": 23,
        "tokens": sum(map(len, expected)),
        "ratio": sum(map(len, expected)) / 23,
        "ids": expected,
    }
    out = run("encode", "a.mtok", "--data", "some.jsonl", "--window", 2, "--out", "ids.jsonl")[1]
    assert shown(out)["samples"] == "4"
    assert encoded("ids.jsonl") == expected


def test_unknown_words_are_an_error_or_get_the_id_that_is_given(run, tmp_path):
    (tmp_path / "more.txt").write_text("the zebra and the cat")
    run("train", "--data", "some.jsonl", "--out", "a.mtok")
    status, out, err = run("encode", "a.mtok", "--data", "more.txt")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "'zebra'" in err
    ids = json.loads(run("encode", "a.mtok", "--data", "more.txt", "--unk-id", 0)[1])
    assert ids[1] == 0
    run("train", "--data", "some.jsonl", "--out", "b.mtok", "--words-of", "more.txt")
    assert "zebra" in Dictionary.load("b.mtok").settings.units.words
    assert run("encode", "b.mtok", "--data", "more.txt")[0] == 0


def test_stats_lists_the_phrases_that_saved_most(run):
    run("train", "--data", "some.jsonl", "--out", "a.mtok")
    dictionary, _ = by_hand()
    record = json.loads(run("stats", "a.mtok", "--show", 3, "--json")[1])
    assert record["phrases"] == len(dictionary)
    assert [line["id"] for line in record["shown"]] == [id for id, _ in dictionary.most_saving_phrases(3)]
    assert record["shown"][0]["text"] in " ".join(TRAINED[0])
    table = run("stats", "a.mtok", "--show", 3)[1]
    assert repr(record["shown"][0]["text"]) in table


def test_the_share_of_unknown_units_is_reported(run, tmp_path):
    (tmp_path / "more.txt").write_text("the zebra and the cat")
    run("train", "--data", "some.jsonl", "--out", "a.mtok")
    encode = ("encode", "a.mtok", "--data", "more.txt", "--unk-id", 0)
    record = json.loads(run(*encode, "--json")[1])
    assert (record["unknown_units"], record["unknown_share"]) == (1, 0.2)
    assert "1 of 5 units are unknown (20.00%)" in run(*encode)[2]
    assert "1 of 5 units are unknown (20.00%)" in run(*encode, "--out", "ids.jsonl")[2]


def test_training_reports_the_rate_of_held_out_texts(run, tmp_path):
    (tmp_path / "more.txt").write_text("the cat and the zebra")
    for flags in ((), ("--prune", 1), ("--unk-id", 0)):
        words = ("train", "--data", "some.jsonl", *flags, "--out", "a.mtok")
        told = json.loads(run(*words, "--held-out", "more.txt", "--json")[1])["held_out"]
        encode = ("encode", "a.mtok", "--data", "more.txt", "--unk-id", 0, "--json")
        assert told == {name: json.loads(run(*encode)[1])[name] for name in told}
        assert told["units"] == 5
    assert shown(run(*words, "--held-out", "more.txt")[1])["unknown share"] == "0.2"
    assert "--held-out FILE measures others" in run(*words)[1]


def test_uses_are_drawn(run, tmp_path):
    run("train", "--data", "some.jsonl", "--out", "a.mtok", "--plot", "a.svg")
    assert run("stats", "a.mtok", "--plot", "b.png")[0] == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = run("stats", "a.mtok", "--plot", "b.gif")
    assert (status, err) == (2, "error: --plot b.gif: a plot is a .svg or .png file\n")


def test_phrases_of_ids_are_shown_as_text(run, tmp_path):
    folder = write_folder(tmp_path / "tokenizer")
    run("train", "--data", "some.jsonl", "--tokenizer", folder, "--out", "a.mtok")
    ids = json.loads(run("stats", "a.mtok", "--show", 1, "--json")[1])["shown"][0]
    texts = json.loads(run("stats", "a.mtok", "--show", 1, "--tokenizer", folder, "--json")[1])["shown"][0]
    assert ids["text"] == " ".join(map(str, ids["units"]))
    assert texts["text"] in SAMPLES[0]
    assert "--tokenizer NAME shows these ids as text" in run("stats", "a.mtok")[1]


def test_lines_and_separators_cut_a_text_into_samples(run, tmp_path):
    (tmp_path / "some.txt").write_text("a b\na b\n---\na b c\n")
    for flags, samples in (((), 1), (("--separator=---",), 2), (("--lines", "--separator=---"), 3)):
        record = json.loads(run("train", "--data", "some.txt", "--out", "a.mtok", *flags, "--json")[1])
        assert record["trained"]["samples"] == samples


def test_the_ids_of_a_tokenizer_can_be_the_units(run, tmp_path):
    folder = write_folder(tmp_path / "tokenizer")
    record = json.loads(run("train", "--data", "some.jsonl", "--out", "a.mtok", "--tokenizer", folder, "--json")[1])
    assert record["trained"]["units"] == Dictionary.load("a.mtok").settings.units.size == 262
    out = run("encode", "a.mtok", "--data", "some.jsonl", "--tokenizer", folder)[1]
    assert len(out.splitlines()) == 4
    other = json.loads((folder / "tokenizer.json").read_text())
    other["added_tokens"][0]["content"] = "<stop>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    for flags in ((), ("--tokenizer", tmp_path / "tokenizer.json")):
        status, out, err = run("encode", "a.mtok", "--data", "some.jsonl", *flags)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "a.mtok" in err


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        (("train", "--out", "a.mtok"), "train needs --data"),
        (("train", "--data", "some.jsonl"), "train needs --out"),
        (("encode", "a.mtok"), "encode needs --data"),
        (("stats", "a.mtok", "--show", -1), "--show must be at least 0"),
        (("train", "--data", "some.jsonl", "--out", "a.mtok", "--prune-mode", "single"), "--prune K"),
        (("train", "--data", "some.jsonl", "--out", "a.mtok", "--prune", -1), "--prune must be at least 0"),
        (("train", "--data", "some.jsonl", "--out", "a.mtok", "--fraction", 101), "percent"),
        (("train", "--data", "some.jsonl", "--out", "a.mtok", "--fraction", "nan"), "percent"),
        (("train", "--data", "some.jsonl", "--out", "a.mtok", "--window", -1), "--window"),
        (
            ("train", "--data", "some.jsonl", "--out", "a.mtok", "--words-of", "some.jsonl", "--tokenizer", "x"),
            "--words-of",
        ),
        (("train", "--data", "none.jsonl", "--out", "a.mtok"), "none.jsonl"),
        (("train", "--data", "empty.jsonl", "--out", "a.mtok"), "empty.jsonl"),
        (("train", "--data", "wrong.jsonl", "--out", "a.mtok"), "wrong.jsonl:2"),
        (("train", "--data", "none.jsonl", "--out", "nowhere/a.mtok", "--encoded", "ids.jsonl"), "nowhere"),
        (("train", "--data", "none.jsonl", "--out", "a.mtok", "--encoded", "nowhere/ids.jsonl"), "nowhere"),
        (
            ("train", "--data", "none.jsonl", "--out", "a.mtok", "--prune", 1, "--encoded", "nowhere/ids.jsonl"),
            "nowhere",
        ),
        (("train", "--data", "none.jsonl", "--out", "."), "is a folder"),
        (("encode", "none.mtok", "--data", "some.jsonl", "--out", "nowhere/ids.jsonl"), "nowhere"),
        (("export", "none.mtok"), "--out"),
        (("export", "none.mtok", "--out", "a.json"), ".npz"),
        (("export", "none.mtok", "--out", "nowhere/a.npz"), "nowhere"),
        (("export", "none.mtok", "--out", "a.npz", "--size", 0), "--size"),
        (("export", "none.mtok", "--out", "a.npz", "--merge-size", 1), "--merge-size"),
        (("export", "none.mtok", "--out", "a.npz"), "none.mtok"),
        (("encode", "none.mtok", "--data", "some.jsonl"), "none.mtok"),
        (("stats", "some.jsonl"), "some.jsonl"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(run, tmp_path, flags, culprit):
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "wrong.jsonl").write_text('{"text": "a b"}\n{"words": 5}\n')
    before = sorted(path.name for path in tmp_path.iterdir())
    status, out, err = run(*flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert culprit in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


MODEL = "llama_transformer_tied_lora"
TEXT = "the cat sat on the mat. the dog sat on the cat.\n" * 30


def test_a_dictionary_of_a_models_ids_becomes_a_pack_that_it_begins_with(run, tmp_path, capsys):
    model = tiny_text.converted(MODEL)
    (tmp_path / "text.txt").write_text(TEXT)
    assert run("train", "--data", "text.txt", "--out", "ids.mtok", "--lines", "--tokenizer", model)[0] == 0
    status, out, _ = run("export", "ids.mtok", "--tokenizer", model, "--size", 8, "--out", "a.npz", "--json")
    pack, record = load_pack("a.npz"), json.loads(out)
    assert (status, record["entries"], record["tokenizer"]) == (0, 8, pack.tokenizer)
    uses = {run: uses for (_, run), uses in zip(*phrases("ids.mtok"), strict=True)}
    assert [uses[entry] for entry in pack.entries] == pack.about["uses"]
    allowed = [n for entry, n in uses.items() if len(entry) <= pack.about["merge_size"]]
    assert pack.about["uses"] == sorted(allowed, reverse=True)[:8]
    assert runner(capsys)("vocab", "pack", "check", "a.npz", "--model", model)[0] == 0
    prompt = ["generate", "--model", model, "--prompt", TEXT[:48], "--max-tokens", 4, "--json"]
    prompt.append("--ignore-chat-template")
    lengths = []
    for flags in ([], ["--pack", "a.npz"]):
        status, out, _ = runner(capsys)(*prompt, *flags)
        lengths.append(json.loads(out)["prompt_ids"])
        assert status == 0
    assert lengths[1] < lengths[0]


def phrases(path):
    dictionary = Dictionary.load(path)
    return dictionary.phrases, dictionary.uses[dictionary.settings.units.size :].tolist()


def test_what_is_no_codebook_is_not_exported(run, tmp_path):
    folder = write_folder(tmp_path / "tokenizer")
    run("train", "--data", "some.jsonl", "--out", "words.mtok")
    run("train", "--data", "some.jsonl", "--out", "ids.mtok", "--tokenizer", folder)
    run("train", "--data", "some.jsonl", "--out", "empty.mtok", "--tokenizer", folder, "--limit", 0)
    for name, flags, told in [
        ("words.mtok", (), "words"),
        ("words.mtok", ("--tokenizer", folder), "words"),
        ("ids.mtok", (), "--tokenizer"),
        ("ids.mtok", ("--tokenizer", tiny_text.converted(MODEL)), "another tokenizer"),
        ("empty.mtok", ("--tokenizer", folder), "no phrase"),
    ]:
        status, out, err = run("export", name, "--out", "a.npz", *flags)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert told in err
        assert not (tmp_path / "a.npz").exists()


# ---- texts are read once, and signals


@pytest.mark.parametrize("flags", [("--fraction", 50), ("--prune", 1), ("--prune", 1, "--prune-mode", "parent")])
def test_a_text_that_changes_after_it_was_read_changes_nothing(run, encoded, monkeypatch, flags):
    def read(*given):
        corpus = read_corpus(*given)
        with open("some.jsonl", "a") as file:
            file.write(json.dumps({"text": "the zebra"}) + "\n")
        return corpus

    train = ("train", "--data", "some.jsonl", *flags)
    run(*train, "--out", "a.mtok", "--encoded", "a.jsonl")
    monkeypatch.setattr(documents, "read_corpus", read)
    status, _, err = run(*train, "--out", "b.mtok", "--encoded", "b.jsonl")
    assert (status, err) == (0, "")
    assert encoded("a.jsonl") == encoded("b.jsonl")
    assert Dictionary.load("a.mtok").phrases == Dictionary.load("b.mtok").phrases


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_half_written(run, tmp_path, monkeypatch, number):
    def iterate(samples):
        for item in whole(samples):
            yield item
            signal.raise_signal(number)

    whole, before = Samples.__iter__, signal.getsignal(number)
    run("train", "--data", "some.jsonl", "--out", "a.mtok")
    monkeypatch.setattr(Samples, "__iter__", iterate)
    status, _, _ = run("encode", "a.mtok", "--data", "some.jsonl", "--out", "ids.jsonl")
    assert status == 128 + number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mtok", "some.jsonl"]
    assert signal.getsignal(number) == before
