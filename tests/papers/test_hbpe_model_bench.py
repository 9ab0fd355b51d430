"""`mlx_zip bench hbpe_model` on a text of a few kilobytes: every kind of model, and what its line says."""

import argparse
import json

import numpy as np
import pytest

from mlx_zip.bench.__main__ import main
from mlx_zip.bench.papers.hbpe import hbpe_model as bench
from mlx_zip.bench.papers.hbpe.hbpe_model import PatchTrainingData, read_documents
from mlx_zip.models.patch_model import PatchConfig, PatchModel, count_parameters
from mlx_zip.vocab.hbpe.measures import Tower
from mlx_zip.vocab.hbpe.patch_text import read_text_encoder, read_token_bytes
from support.tiny_vocabularies import write_folder

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


def data_of(args):
    texts = [read_documents(path, SEPARATOR) for path in (args.train, args.test)]
    return PatchTrainingData(*texts, args.context, args.vocab_size, args.tokenizer)


def test_both_parts_of_a_text_keep_their_bytes(texts):
    data = data_of(parse(texts))
    corpus, _, table = data.windows_for_kind("patches", 8)
    read = table.decode(table.encode(corpus.ids.reshape(-1)))
    assert b"".join(data.train).startswith(read)
    assert len(read) == corpus.n_bytes
    for corpora in (data.windows_for_kind("space", 8), data.windows_for_kind("bytes", 8)):
        assert corpora[0].n_bytes <= sum(map(len, data.train))
        assert corpora[0].n_bytes > 0.8 * sum(map(len, data.train))
    assert data.windows_for_kind("space", 8)[1].n_bytes > 0


def test_the_entropies_that_give_the_threshold_are_those_that_cut(texts, monkeypatch):
    data, foreseen = data_of(parse(texts)), []

    def byte_entropies(model, document, window):
        foreseen.append(document)
        return np.frombuffer(document, np.uint8).astype(np.float32)

    monkeypatch.setattr(bench, "byte_entropies", byte_entropies)
    data.byte_model = object()
    data.windows_for_kind("entropy", 8)
    assert sorted(foreseen) == sorted({*data.train, *data.test})


def test_a_first_stage_that_is_named_makes_the_ids(texts, tmp_path):
    path = write_folder(tmp_path / "mini")
    data = data_of(parse(texts, "--tokenizer", path))
    tokens = read_token_bytes(path)
    assert data.tokens == [*tokens, b""]
    assert data.ids[0].reshape(-1)[:9].tolist() == list(read_text_encoder(path)(data.train[0].decode()))[:9]


@pytest.mark.parametrize("vocabulary", [300, 2000])
def test_the_equal_model_has_no_more_parameters_than_plain_but_hardly_fewer(texts, vocabulary):
    args = parse(texts, "--vocab-size", vocabulary, "--latent", "1,64,96,2")
    table = data_of(args).windows_for_kind("patches", 8)[2]
    latent = bench.latent_with_equal_parameters(table, args.latent, args.local)
    size = lambda tower: count_parameters(PatchModel(PatchConfig(table.merges.symbols, 8, tower, args.local)))
    plain = count_parameters(bench.PlainModel(bench.PlainConfig(len(table), args.latent)))
    assert size(latent) <= plain
    assert size(Tower(latent.layers, latent.width, latent.ffn + 1, latent.heads)) > plain
    assert latent.width >= 64


def lines_of(capsys, *flags):
    assert main(["hbpe_model", *map(str, flags)]) == 0
    return list(map(json.loads, capsys.readouterr().out.splitlines()))


def test_a_curve_has_a_point_per_mark_and_ends_as_a_run_with_one_mark(capsys, texts):
    flags = [*texts, *SMALL, "--models", "patches", "bytes", "--steps", 6]
    marked, whole = (lines_of(capsys, *flags, "--marks", count) for count in (3, 1))
    for one, other in zip(marked, whole, strict=True):
        assert [point["step"] for point in one["curve"]] == [2, 4, 6]
        assert one["curve"][0]["train_bytes"] < one["curve"][1]["train_bytes"] < one["curve"][2]["train_bytes"]
        assert one["bits_per_byte"] == other["bits_per_byte"]


def test_a_recipe_sets_flags_and_flags_given_after_it_take_precedence(texts):
    args = parse(texts, "--recipe", "figure7", "--patch-size", 6)
    assert (args.recipe, args.models, args.patch_size) == ("figure7", ["patches"], [6])


def test_each_kind_has_its_learning_rate(texts):
    args = parse(texts, "--learning-rate", 0.01, "plain=0.002")
    assert [bench.learning_rate_of_kind(args, kind) for kind in ("plain", "bytes")] == [0.002, 0.01]
    assert bench.learning_rate_of_kind(parse(texts), "plain") == bench.LEARNING_RATE


def test_every_patch_size_is_a_line_for_the_kinds_that_have_one(capsys, texts):
    flags = [*texts, *SMALL, "--models", "patches", "space", "--steps", 2, "--patch-size", 4, 8]
    lines = lines_of(capsys, *flags)
    found = [(one["model"], one["config"]["patch_size"], one["steps"]) for one in lines]
    assert found == [("patches", 4, 2), ("patches", 8, 2), ("space", 7, 2)]


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
