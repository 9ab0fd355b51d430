"""`bench classify`: what it measures is what it says (a tiny run; no accuracy is judged)."""

import argparse
import json

import numpy as np
import pytest

from mlx_zip.bench import classify
from mlx_zip.bench.__main__ import main
from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.vocab.multitok import Words

TEXTS = [("a good film and a good cast", 1), ("a bad film and a bad cast", 0), ("a good cast", 1), ("a bad end", 0)]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in TEXTS))
    records = [json.dumps({"text": text, "label": label}) for text, label in [*TEXTS, ("an unknown word", 0)]]
    (tmp_path / "test.jsonl").write_text("\n".join(records))
    return tmp_path


def lines(data, capsys, *flags):
    files = ["--train", data / "train.tsv", "--test", data / "test.jsonl"]
    command = ["classify", *files, "--epochs", 2, "--seeds", 3, *flags]
    assert main([str(part) for part in command]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_setting_is_a_line_with_its_ratio_and_rows(data, capsys):
    settings = ["plain", "100,Max-Max", "100,2-2,>=2", "50,2-1"]
    told = lines(data, capsys, "--settings", *settings)
    assert [line["setting"] for line in told] == settings
    assert told[0]["ratio"] == 1.0
    assert told[0]["rows"] == 1 + len({word for text, _ in TEXTS for word in text.split()} | {"an", "unknown", "word"})
    assert told[1]["ratio"] < told[3]["ratio"] < 1
    assert told[1]["rows"] > told[2]["rows"] > told[0]["rows"]
    for line in told:
        assert len(line["loss"]) == len(line["accuracies"]) == 2
        assert 0 <= line["auc"] <= 1


def test_a_seed_gives_the_same_figures_again(data, capsys):
    first, again = (lines(data, capsys, "--settings", "plain")[0]["loss"] for _ in range(2))
    assert first == again


def test_phrases_change_ids_but_no_text(data):
    train, test = ([text.split() for text, _ in part] for part in (TEXTS, TEXTS[:2]))
    units = Words.in_order(train)
    encoded = classify.encode(classify.Setting.parse("100,2-2,>=2"), units, train, test)
    assert encoded.train.ids.max() == encoded.rows - 1
    assert encoded.train.ids.min() > 0
    assert len(encoded.train) == 4
    plain = classify.encode(classify.Setting.parse("plain"), units, train, test)
    assert [[units.words[i - 1] for i in ids] for ids in plain.train.lists()] == train


def test_padding_does_not_change_what_is_judged():
    model = classify.Classifier(9, 2, 6)
    short, long = np.array([[1, 2, 3]]), np.array([[1, 2, 3, 0, 0]])
    one, other = (np.array(model(classify.mx.array(ids.astype(np.int32)))) for ids in (short, long))
    assert np.allclose(one, other, atol=1e-5)


def test_auc_counts_pairs_in_order_and_ties_by_half():
    positive = np.array([False, True, False, True])
    assert classify.auc(np.array([0.1, 0.2, 0.3, 0.4]), positive) == 0.75
    assert classify.auc(np.array([0.5, 0.5, 0.5, 0.5]), positive) == 0.5
    assert classify.auc(np.array([0.1, 0.9, 0.2, 0.8]), positive) == 1.0


def test_the_training_time_is_the_first_epoch_behind_which_the_loss_stays_low():
    assert classify.reached([0.5, 0.05, 0.2, 0.05, 0.05], 0.1) == 3
    assert classify.reached([0.5, 0.2], 0.1) is None
    assert classify.reached([0.05] * 10 + [0.5] + [0.05], 0.1) == 0


@pytest.mark.parametrize("setting", ["", "2-2", "100,2", "100,2-2,>=x", "101,2-2", "100,2-x"])
def test_settings_that_are_none_are_named(setting):
    with pytest.raises(MlxZipError, match="--settings"):
        classify.Setting.parse(setting)


def test_a_line_without_a_label_is_named(data):
    (data / "wrong.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b"}\n')
    with pytest.raises(DataError, match=r"wrong\.jsonl, line 2"):
        classify.read_labelled(data / "wrong.jsonl")
    with pytest.raises(DataError, match=r"none\.tsv"):
        classify.read_labelled(data / "none.tsv")


def test_the_paper_s_sizes_are_the_defaults():
    parser = argparse.ArgumentParser()
    classify.add_arguments(parser)
    args = parser.parse_args(["--train", "a", "--test", "b"])
    assert (args.epochs, args.batch_size) == (20, 1000)
    assert (classify.WIDTH, classify.HEADS, classify.HIDDEN, classify.RATE) == (100, 2, 200, 0.01)
