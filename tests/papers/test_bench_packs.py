"""`bench packs`: what its lines hold, against the codec itself."""

import json

import pytest

from mlx_zip.bench.papers.packs import packs
from mlx_zip.codec import CodecParams, compress
from mlx_zip.errors import MlxZipError
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.learner import learn
from support import tiny_bench
from support.prepared import tokenizer_folder


@pytest.fixture
def texts(tmp_path):
    """(to learn from, to try)."""
    paths = tmp_path / "a.train.txt", tmp_path / "a.test.txt"
    paths[0].write_text("the cat sat on the mat. the dog sat on the cat. " * 20)
    paths[1].write_text("the dog sat on the mat. a cat sat on the dog. " * 3)
    return paths


def test_a_lines_rates_are_those_of_the_codec(texts, capsys):
    train, test = texts
    flags = ("--tokenizer", tokenizer_folder(), "--train", f"web={train}", "--test", f"web={test}")
    assert tiny_bench.run("packs", *flags, "--sizes", 20, 5, "--window", 64, "--merge-size", 3) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["train"]["files"] == ["a.train.txt"]
    assert [pack["size"] for pack in line["packs"]] == [5, 20]
    vocabulary = read_vocabulary(tokenizer_folder())
    ids, held_out = ([*vocabulary.encode(path.read_text())] for path in texts)
    assert (line["train_ids"], line["test_ids"]) == (len(ids), len(held_out))
    for size, told in ((0, line["empty"]), (5, line["packs"][0]["rate"]), (20, line["packs"][1]["rate"])):
        params = CodecParams(vocabulary.size, packs.GROWTH + 20, 3)
        pack = learn(params, [ids], size, window=64).entries if size else ()
        codec = CodecParams(vocabulary.size, packs.GROWTH + len(pack), 3, start=pack or None)
        windows = [held_out[at : at + 64] for at in range(0, len(held_out), 64)]
        assert told == round(len(held_out) / sum(len(compress(codec, window)[0]) for window in windows), 4)
    assert line["empty"] < line["packs"][0]["rate"] <= line["packs"][1]["rate"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--sizes", 0), "--sizes must be at least 1"),
        (("--window", 0), "--window must be at least 1"),
        (("--test", "code=a.test.txt"), "texts to learn from or to try, but not both"),
        (("--train", "web=none.txt"), "none.txt"),
    ],
)
def test_what_cannot_be_measured_is_said_first(flags, told, texts, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    before = ("--tokenizer", tokenizer_folder(), "--train", "web=a.train.txt", "--test", "web=a.test.txt")
    with pytest.raises(MlxZipError, match=told):
        tiny_bench.run("packs", *before, *flags)
    assert capsys.readouterr().out == ""
