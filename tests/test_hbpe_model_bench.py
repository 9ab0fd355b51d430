"""`mlx_zip bench hbpe_model` on a text of a few kilobytes: every kind of model, and what its line says."""

import argparse
import json

import pytest

from mlx_zip.bench import hbpe_model as bench
from mlx_zip.bench.__main__ import main
from mlx_zip.models.hbpe import PatchConfig, PatchModel, parameters_of
from mlx_zip.vocab.hbpe_measures import Tower

STORY = "Once there was a small cat who sat on a mat. The cat saw a dog.\n\nThe dog said hello, and they sat down."
SEPARATOR = "<end>"
SMALL = ["--vocab-size", 300, "--context", 16, "--batch-size", 2, "--latent", "1,16,24,2", "--local", "1,8,12,2"]


@pytest.fixture
def texts(tmp_path):
    train, test = tmp_path / "train.txt", tmp_path / "test.txt"
    stories = [STORY.replace("cat", animal) for animal in ("cat", "hen", "cow", "fox", "owl") * 4]
    train.write_text(f"\n{SEPARATOR}\n".join(stories))
    test.write_text(f"{STORY}\n{SEPARATOR}\n{STORY.replace('dog', 'frog')}\n")
    return ["--train", train, "--test", test, "--separator", SEPARATOR]


def parse(texts, *flags):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(list(map(str, [*texts, *SMALL, *flags])))


def test_every_kind_is_trained_and_measured_on_the_same_text(capsys, texts):
    assert main(["hbpe_model", *map(str, [*texts, *SMALL, "--seconds", 0.01])]) == 0
    lines = {line["model"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert tuple(lines) == bench.KINDS
    for line in lines.values():
        assert line["steps"] >= 2
        assert 0 < line["bits_per_byte"] < 12
        assert line["wall_s"] >= 0
    plain, patches = lines["plain"], lines["patches"]
    assert (plain["test_bytes"], plain["bytes_per_unit"]) == (patches["test_bytes"], patches["bytes_per_unit"])
    assert lines["bytes"]["bytes_per_unit"] == pytest.approx(1, abs=0.02)  # the ends of documents are units too
    assert lines["bytes"]["context"] > 16
    assert lines["patches"]["config"]["latent"] == plain["config"]["tower"]


def test_both_parts_of_a_text_keep_their_bytes(texts):
    args = parse(texts)
    data = bench.Data(bench._documents(args.train, SEPARATOR), bench._documents(args.test, SEPARATOR), args)
    corpus, _, table = data.tokenized
    read = table.decode(table.encode(corpus.ids.reshape(-1)))
    assert b"".join(data.train).startswith(read)
    assert len(read) == corpus.n_bytes
    for corpora in (data.patched("space"), data.bytes()):
        assert corpora[0].n_bytes <= sum(map(len, data.train))
        assert corpora[0].n_bytes > 0.8 * sum(map(len, data.train))
    assert data.patched("space")[1].n_bytes > 0


@pytest.mark.parametrize("vocabulary", [300, 2000])
def test_the_equal_model_has_no_more_parameters_than_plain_but_hardly_fewer(texts, vocabulary):
    args = parse(texts, "--vocab-size", vocabulary, "--latent", "1,64,96,2")
    data = bench.Data(bench._documents(args.train, SEPARATOR), bench._documents(args.test, SEPARATOR), args)
    table, latent = data.tokenized[2], bench.equal_latent(data, args)
    size = lambda tower: parameters_of(PatchModel(PatchConfig(table.merges.symbols, 8, tower, args.local)))
    plain = parameters_of(bench.PlainModel(bench.PlainConfig(len(table), args.latent)))
    assert size(latent) <= plain
    assert size(Tower(latent.layers, latent.width, latent.ffn + 1, latent.heads)) > plain
    assert latent.width >= 64


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "entropy"], "needs bytes too"),
        (["--seconds", 0], "--seconds"),
        (["--context", 9999], "does not fill one window"),
        (["--test", "none.txt"], "none.txt"),
    ],
)
def test_what_cannot_be_measured_is_one_line(capsys, texts, flags, message):
    assert main(["hbpe_model", *map(str, [*texts, *SMALL, "--seconds", 0.01, *flags])]) == 2
    assert message in capsys.readouterr().err
