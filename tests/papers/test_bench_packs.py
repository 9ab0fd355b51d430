"""`packs`: what its lines hold, against the codec itself, for the domain learned from and for others."""

import json

import numpy as np
import pytest

from mlx_zip.bench.papers.packs import pack_compression
from mlx_zip.bench.papers.packs.pack_compression import BaseIdBpe
from mlx_zip.codec import CodecParams, compress
from mlx_zip.errors import MlxZipError
from mlx_zip.packs.learner import learn_pack
from mlx_zip.text.vocabularies import read_vocabulary
from support import tiny_bench
from support.prepared import tokenizer_folder

WINDOW = 64


@pytest.fixture
def texts(tmp_path):
    """Texts of two domains: a.train, a.test and b.test."""
    (tmp_path / "a.train.txt").write_text("the cat sat on the mat. the dog sat on the cat. " * 20)
    (tmp_path / "a.test.txt").write_text("the dog sat on the mat. a cat sat on the dog. " * 3)
    (tmp_path / "b.test.txt").write_text("x = y + z; y = z + x; z = x + y; " * 3)
    return tmp_path


def flags(texts):
    tests = (f"a={texts / 'a.test.txt'}", f"b={texts / 'b.test.txt'}")
    return ("--tokenizer", tokenizer_folder(), "--train", f"a={texts / 'a.train.txt'}", "--test", *tests)


def test_rates_are_those_of_the_codec_on_every_domain_with_growth_and_without(texts, capsys):
    assert tiny_bench.run("packs", *flags(texts), "--sizes", 20, 5, "--window", WINDOW, "--merge-size", 3) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["domain"], line["train"]["files"], list(line["tests"])) == ("a", ["a.train.txt"], ["a", "b"])
    assert [(pack["size"], pack["learner"]) for pack in line["packs"]] == [
        (size, learner) for size in (5, 20) for learner in ("learn", "multitok", "bpe")
    ]
    vocabulary = read_vocabulary(tokenizer_folder())
    ids = [*vocabulary.encode((texts / "a.train.txt").read_text())]
    assert line["train_ids"] == len(ids)
    for domain in ("a", "b"):
        held_out = [*vocabulary.encode((texts / f"{domain}.test.txt").read_text())]
        windows = [held_out[at : at + WINDOW] for at in range(0, len(held_out), WINDOW)]
        params = CodecParams(vocabulary.size, pack_compression.GROWTH, 3)
        assert line["tests"][domain]["empty"] == rate(params, windows)
        for size in (5, 20):
            entries = learn_pack(params, [ids], size, window=WINDOW).entries
            told = next(pack for pack in line["packs"] if (pack["size"], pack["learner"]) == (size, "learn"))
            for name, growth in (("rates", pack_compression.GROWTH), ("static", 0)):
                codec = CodecParams(vocabulary.size, growth + len(entries), 3, start=entries)
                assert told[name][domain] == rate(codec, windows)


def rate(codec, windows):
    return round(sum(map(len, windows)) / sum(len(compress(codec, window)[0]) for window in windows), 4)


def test_a_pack_brings_more_to_the_texts_it_was_learned_from(texts, capsys):
    assert tiny_bench.run("packs", *flags(texts), "--sizes", 20, "--window", WINDOW) == 0
    line = json.loads(capsys.readouterr().out)
    gain = {name: line["packs"][0]["rates"][name] / line["tests"][name]["empty"] for name in ("a", "b")}
    assert gain["a"] > 1.2 > gain["b"]


def test_plain_bpe_merges_the_most_frequent_pair_first_and_no_longer_than_asked():
    params = CodecParams(10, 100, 3)
    bpe = BaseIdBpe(params, [np.array([1, 2, 1, 2, 1, 2, 3, 1, 2, 3], np.uint32)], 3, 100, longest=3)
    assert bpe.entries() == [(1, 2), (1, 2, 3)]  # 1 2 1 2 would be longer than 3 ids
    assert bpe.count(np.array([1, 2, 3, 9, 1, 2], np.uint32)) == 3


def test_plain_bpe_crosses_neither_windows_nor_disabled_ids():
    params = CodecParams(10, 100, 3, disabled_ids=[7])
    text = np.array([1, 7, 1, 7, 1, 7, 2, 3, 2, 3, 2, 3], np.uint32)
    assert BaseIdBpe(params, [text], 5, 8).entries() == [(2, 3)]  # the window ends inside the second 2 3
    assert BaseIdBpe(params, [text], 5, 8).count(text) == 3 + 3 + 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--sizes", 0), "--sizes must be at least 1"),
        (("--window", 0), "--window must be at least 1"),
        (("--test", "code=a.test.txt"), "a has texts to learn from but none to try packs on"),
        (("--train", "a=none.txt"), "none.txt"),
    ],
)
def test_what_cannot_be_measured_is_said_first(flags, told, texts, monkeypatch, capsys):
    monkeypatch.chdir(texts)
    before = ("--tokenizer", tokenizer_folder(), "--train", "a=a.train.txt", "--test", "a=a.test.txt")
    with pytest.raises(MlxZipError, match=told):
        tiny_bench.run("packs", *before, *flags)
    assert capsys.readouterr().out == ""
