"""`bench classify`: what it measures is what it says (a tiny run; no accuracy is judged)."""

import argparse
import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.bench.__main__ import main
from mlx_zip.bench.papers.multitok import classify, tables
from mlx_zip.bench.papers.multitok.classify import EncodingSetting
from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.vocab.multitok import Samples, Words

TEXTS = [("a good film and a good cast", 1), ("a bad film and a bad cast", 0), ("a good cast", 1), ("a bad end", 0)]
PIECES = ["[UNK]", "a", "good", "film", "and", "bad", "cast", "end", "un", "##known", "word", "##s"]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in TEXTS))
    records = [json.dumps({"text": text, "label": label}) for text, label in [*TEXTS, ("an unknown word", 0)]]
    (tmp_path / "test.jsonl").write_text("\n".join(records))
    return tmp_path


def ran(data, *flags):
    files = ["--train", data / "train.tsv", "--test", data / "test.jsonl"]
    command = ["classify", *files, "--epochs", 2, "--seeds", 3, *flags]
    return main([str(part) for part in command])


def lines(data, capsys, *flags):
    assert ran(data, *flags) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_setting_is_a_line_with_its_ratio_and_rows(data, capsys):
    settings = ["plain", "100,Max-Max", "100,2-2,>=2", "50,2-1"]
    told = lines(data, capsys, "--settings", *settings)
    assert [line["setting"] for line in told] == settings
    assert told[0]["ratio"] == told[0]["per_word"] == 1.0
    assert told[0]["rows"] == 1 + len({word for text, _ in TEXTS for word in text.split()} | {"an", "unknown", "word"})
    assert told[0]["rows_trained"] == len({word for text, _ in TEXTS for word in text.split()})
    assert told[1]["ratio"] < told[3]["ratio"] < 1
    assert told[1]["rows"] > told[2]["rows"] > told[0]["rows"]
    for line in told:
        assert (len(line["loss"]), len(line["processor_s"])) == (2, 2)
        assert 0 <= line["auc"] <= 1


def test_a_seed_gives_the_same_figures_again(data, capsys):
    first, again = (lines(data, capsys, "--settings", "plain")[0]["loss"] for _ in range(2))
    assert first == again


def test_every_encoding_gets_the_same_words(data, capsys):
    plain, pairs = lines(data, capsys, "--settings", "plain", "100,2-1", "--words", 3)
    assert plain["tokens"] == [3 * 4, 3 * 5]
    assert pairs["tokens"][0] < plain["tokens"][0]
    assert pairs["tokens"][1] == plain["tokens"][1]


def test_texts_are_cut_in_number_too(data, capsys):
    (line,) = lines(data, capsys, "--settings", "plain", "--samples", 2, "--test-samples", 3)
    assert line["data"]["samples"] == [2, 3]


def test_units_are_berts_word_pieces_where_asked(data, capsys):
    (data / "bert_uncased.vocab.txt").write_text("\n".join(PIECES))
    plain, pairs = lines(data, capsys, "--tokenizer", data / "bert_uncased.vocab.txt", "--settings", "plain", "50,2-1")
    assert plain["data"]["units_are"] == "bert_uncased"
    assert plain["rows"] == 1 + len(PIECES)
    assert plain["tokens"][1] - plain["tokens"][0] == len(["[UNK]", "un", "##known", "word"])
    assert pairs["ratio"] < 1


def test_phrases_change_ids_but_no_text():
    train, test = ([text.split() for text, _ in part] for part in (TEXTS, TEXTS[:2]))
    units = Words.from_samples(train)
    encoded = classify.encode_texts(EncodingSetting.parse("100,2-2,>=2"), units, train, test)
    assert encoded.train.ids.min() == 1
    assert encoded.train.ids.max() == encoded.trained < encoded.used <= encoded.rows
    assert len(encoded.train) == 4
    plain = classify.encode_texts(EncodingSetting.parse("plain"), units, train, test)
    assert [[units.words[i - 1] for i in ids] for ids in plain.train.to_lists()] == train


def test_rows_that_only_the_judged_texts_hold_come_last():
    train, test = [["b", "c"]], [["a", "c", "d"]]
    encoded = classify.encode_texts(EncodingSetting.parse("plain"), Words(("a", "b", "c", "d")), train, test)
    assert (encoded.train.to_lists(), encoded.test.to_lists()) == ([[1, 2]], [[3, 2, 4]])
    assert (encoded.trained, encoded.used, encoded.rows) == (2, 5, 5)


def test_rows_without_a_gradient_may_as_well_not_be_trained():
    args = argparse.Namespace(epochs=3, batch_size=2, learning_rate=0.01)
    ids = Samples.from_sequences([[1, 2], [2, 1, 1], [1], [2, 2]])
    judged, answers = Samples.from_sequences([[1, 3], [4, 2]]), [np.array([0, 1, 0, 1]), np.array([0, 1])]
    told = [
        classify.train_classifier(classify.EncodedTexts(ids, judged, trained, 5, 5, 1.0), answers, 2, 0, args)
        for trained in (2, 4)
    ]
    for name in ("loss", "accuracy", "auc"):
        assert told[0][name] == told[1][name]


def test_a_batch_holds_texts_of_about_one_length_and_every_text_once():
    sizes = np.random.default_rng(0).integers(1, 50, 97)
    for order in (None, np.random.default_rng(1)):
        cut = list(classify.batches_of_similar_length(sizes, 10, order))
        assert sorted(np.concatenate(cut).tolist()) == list(range(97))
        assert max(map(len, cut)) == 10
        assert max(int(np.ptp(sizes[which])) for which in cut) < 20


def test_padding_does_not_change_what_is_judged():
    model = classify.Classifier(8, 9, 2, 6)
    short, long = np.array([[1, 2, 3]]), np.array([[1, 2, 3, 0, 0]])
    one, other = (np.array(model(mx.array(ids.astype(np.int32)))) for ids in (short, long))
    assert np.allclose(one, other, atol=1e-5)


def test_auc_counts_pairs_in_order_and_ties_by_half():
    positive = np.array([False, True, False, True])
    assert classify.area_under_roc(np.array([0.1, 0.2, 0.3, 0.4]), positive) == 0.75
    assert classify.area_under_roc(np.array([0.5, 0.5, 0.5, 0.5]), positive) == 0.5
    assert classify.area_under_roc(np.array([0.1, 0.9, 0.2, 0.8]), positive) == 1.0


def test_the_training_time_is_the_first_epoch_after_which_the_loss_stays_low():
    assert classify.epochs_to_converge([0.5, 0.05, 0.2, 0.05, 0.05], 0.1) == 3
    assert classify.epochs_to_converge([0.5, 0.2], 0.1) is None
    assert classify.epochs_to_converge([0.05] * 10 + [0.5] + [0.05], 0.1) == 0


@pytest.mark.parametrize("setting", ["", "2-2", "100,2", "100,2-2,>=x", "101,2-2", "100,2-x"])
def test_settings_that_are_none_are_named(setting):
    with pytest.raises(MlxZipError, match="--settings"):
        EncodingSetting.parse(setting)


def test_a_line_without_a_label_is_named(data):
    (data / "wrong.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b"}\n')
    with pytest.raises(DataError, match=r"wrong\.jsonl, line 2"):
        classify.read_labelled(data / "wrong.jsonl")
    with pytest.raises(DataError, match=r"none\.tsv"):
        classify.read_labelled(data / "none.tsv")


@pytest.mark.parametrize("line", ['{"text": "a", "label": 1e400}', "[" * 100_000, "[1]"])
def test_a_line_that_can_be_no_label_is_named(data, line):
    (data / "wrong.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"wrong\.jsonl, line 1"):
        classify.read_labelled(data / "wrong.jsonl")


def test_the_paper_s_sizes_are_the_defaults():
    parser = argparse.ArgumentParser()
    classify.add_arguments(parser)
    args = parser.parse_args(["--train", "a", "--test", "b"])
    assert (args.epochs, args.batch_size) == (20, 1000)
    assert args.learning_rate == 0.01
    assert (classify.WIDTH, classify.HEADS, classify.HIDDEN) == (100, 2, 200)


def test_a_text_may_hold_other_ends_of_lines(data):
    (data / "odd.jsonl").write_text(json.dumps({"text": "one\u0085two", "label": 1}, ensure_ascii=False) + "\n")
    assert classify.read_labelled(data / "odd.jsonl").texts == ("one\u0085two",)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--words", 0), "--words"),
        (("--samples", 0), "--samples"),
        (("--learning-rate", 0), "--learning-rate"),
        (("--learning-rate", "inf"), "--learning-rate"),
        (("--seeds", -1), "--seeds"),
        (("--test", "none.tsv"), "none.tsv"),
    ],
)
def test_what_cannot_be_is_told_before_any_training(data, capsys, flags, told, monkeypatch):
    monkeypatch.chdir(data)
    assert ran(data, *flags) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert told in said.err


def test_a_table_has_the_papers_figures_and_the_spread_over_seeds(data, capsys):
    (data / "imdb.tsv").write_text((data / "train.tsv").read_text())
    told = lines(data, capsys, "--train", data / "imdb.tsv", "--settings", "plain", "50,2-1", "--seeds", 1, 2)
    rows = tables.classifier_table(told, of_paper=True).splitlines()[2:]
    assert [row.split(" | ")[1:3] for row in rows] == [["plain", "2"], ["50,2-1", "2"]]
    assert "| 0.743 |" in rows[1]
    accuracies = [line["accuracy"] for line in told if line["setting"] == "plain"]
    assert f"({min(accuracies):.3f}-{max(accuracies):.3f})" in rows[0]
    assert len(tables.classifier_table(told, of_paper=False).splitlines()) == 2
