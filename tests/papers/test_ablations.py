"""The ablations: every setting is measured once and on the same text; figures and tables come from the lines."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import save_config, save_model

from mlx_zip.bench.papers.zip2zip import ablations
from mlx_zip.bench.papers.zip2zip.ablation_tables import AblationResults, conditions_table
from mlx_zip.bench.papers.zip2zip.ablations import LINES, Setting, settings_from_flags
from mlx_zip.bench.records import read_lines
from mlx_zip.engine.mlx.generate import load
from mlx_zip.errors import MlxZipError
from mlx_zip.evaluation.bits import cut_scored_windows, measure_bits
from mlx_zip.text.documents import read_corpus
from mlx_zip.text.tokenizers import load_tokenizer
from support import prepared

SMALL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}
FLAGS = [
    "--iters",
    "2",
    "--batch-size",
    "2",
    "--context",
    "32",
    "--codebook-size",
    "32",
    "--encoder-heads",
    "2",
    "--merge-sizes",
    "1",
    "2",
    "3",
    "--encoders",
    "averaging",
    "transformer-2",
]


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ablations.add_arguments(parser)
    return parser.parse_args([str(flag) for flag in flags])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base model, texts to train on and to evaluate on."""
    home = tmp_path_factory.mktemp("ablations")
    base = shutil.copytree(prepared.tokenizer_folder(), home / "base")
    config = {**SMALL, "vocab_size": len(load_tokenizer(base))}
    mx.random.seed(0)
    save_model(base, llama.Model(llama.ModelArgs.from_dict(config)))
    save_config(config, base / "config.json")
    texts = prepared.stories(20)
    prepared.texts(home / "train.jsonl", texts[:14])
    prepared.texts(home / "near.jsonl", texts[14:])
    prepared.texts(home / "far.jsonl", ["a boat, a boat, a boat on the sea.", "the sea, the sea."])
    return home


def flags(home: Path, out: Path, *more: str) -> argparse.Namespace:
    valid = [home / "near.jsonl", home / "far.jsonl"]
    return parse(
        "--model", home / "base", "--data", home / "train.jsonl", "--valid", *valid, "--out", out, *FLAGS, *more
    )


@pytest.fixture(scope="module")
def done(home):
    """The folder of a finished run."""
    out = home / "out"
    assert ablations.run(flags(home, out)) == 0
    return out


# ---- what is measured


def test_sizes_share_one_encoder_encoders_one_size_and_what_both_have_is_run_once():
    needed = ("--model", "m", "--data", "d", "--valid", "v", "--out", "o")
    wanted = settings_from_flags(
        parse(*needed, "--merge-sizes", 1, 2, 3, "--encoders", "averaging", "transformer-2", "--seed", 4, 5)
    )
    first = [
        Setting(1, None, 4),
        Setting(2, "transformer-2", 4),
        Setting(3, "transformer-2", 4),
        Setting(3, "averaging", 4),
    ]
    assert wanted == [*first, *(Setting(s.merge_size, s.encoder, 5) for s in first)]


def test_each_setting_has_a_line_with_every_text_and_a_curve(done):
    lines = read_lines(done / LINES)
    assert [Setting(**line["setting"]).name for line in lines] == [
        "m1-seed0",
        "m2-transformer-2-seed0",
        "m3-transformer-2-seed0",
        "m3-averaging-seed0",
    ]
    for line in lines:
        assert list(line["texts"]) == ["near.jsonl", "far.jsonl"]
        assert [point[0] for point in line["training"]["curve"]][-1] == line["training"]["bytes"]
        assert line["machine"]
        assert line["versions"]["mlx"]


def test_all_settings_are_measured_on_the_same_bytes_and_trained_on_the_same_windows(done):
    lines = read_lines(done / LINES)
    for name in ("near.jsonl", "far.jsonl"):
        assert len({(line["texts"][name]["bytes"], line["texts"][name]["base_ids"]) for line in lines}) == 1
    trained = [line["training"] for line in lines]
    assert len({(told["samples"], told["base_ids"], told["bytes"]) for told in trained}) == 1
    assert all(told["bytes"] == told["prepared_bytes"] for told in trained)


def test_entries_count_only_from_the_id_on_that_made_them(done):
    found = {line["setting"]["merge_size"]: line["texts"]["near.jsonl"] for line in read_lines(done / LINES)}
    assert [found[m]["availability"] for m in (1, 2, 3)] == [None, "causal", "causal"]
    assert found[1]["hyper_share"] == 0 < found[3]["hyper_share"]


def test_a_lines_figures_are_those_of_the_model_it_left(home, done):
    model, tokenizer = load(str(done / "runs" / "m3-averaging-seed0" / "model"))
    documents = read_corpus([home / "far.jsonl"]).documents
    expected = measure_bits(model, cut_scored_windows(tokenizer, documents, 32, fill_windows=True)).bits_per_byte
    line = read_lines(done / LINES)[-1]
    assert line["texts"]["far.jsonl"]["bits_per_byte"] == pytest.approx(expected, abs=1e-6)


def test_without_compression_nothing_is_compressed_and_larger_merges_compress_more(done):
    rates = [line["training"]["compression_rate"] for line in read_lines(done / LINES)]
    assert rates[0] == 1 > rates[1] > rates[2] == rates[3]


def test_averaging_has_no_parameters_and_the_decoder_is_the_same_for_all(done):
    lines = read_lines(done / LINES)
    assert [line["parameters"]["encoders"] > 0 for line in lines] == [False, True, True, False]
    assert len({line["parameters"]["decoder"] for line in lines}) == 1


# ---- going on


def test_what_is_done_is_not_run_again_and_new_settings_are_added(home, done, tmp_path, monkeypatch):
    out = shutil.copytree(done, tmp_path / "out")
    before, ran = (out / LINES).read_text(), []
    measure = ablations.AblationRunner.measure
    monkeypatch.setattr(ablations.AblationRunner, "measure", lambda self, s: (ran.append(s.name), measure(self, s))[1])
    ablations.run(flags(home, out))
    assert (ran, (out / LINES).read_text()) == ([], before)
    ablations.run(flags(home, out, "--encoders", "attention"))
    assert ran == ["m3-attention-seed0"]
    assert (out / LINES).read_text().startswith(before)


def test_a_folder_of_other_conditions_is_refused_by_name(home, done):
    with pytest.raises(MlxZipError, match=r"other conditions \(iters, learning_rate, warmup\)"):
        ablations.run(flags(home, done, "--iters", "40", "--learning-rate", "0.01"))


def test_another_base_of_the_same_name_is_another_condition(home, done, tmp_path):
    base = shutil.copytree(home / "base", tmp_path / "base")
    (base / "config.json").write_text((base / "config.json").read_text() + "\n")
    with pytest.raises(MlxZipError, match=r"other conditions \(model\)"):
        ablations.run(flags(home, done, "--model", str(base)))


def test_a_signal_ends_the_run_with_its_status_and_leaves_no_line(home, tmp_path, monkeypatch):
    stopped = SimpleNamespace(stopped_by=signal.SIGTERM)
    monkeypatch.setattr(ablations, "train", lambda *args: stopped)
    with pytest.raises(SystemExit) as ended:
        ablations.run(flags(home, tmp_path / "out"))
    assert ended.value.code == 143
    assert not (tmp_path / "out" / LINES).exists()


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--merge-sizes", "0"], "merge size must be 1 or more"),
        (["--merge-size", "1"], "--merge-size, that of the encoders, must be 2 or more"),
    ],
)
def test_flags_that_make_no_sense_are_refused(home, tmp_path, given, message):
    with pytest.raises(MlxZipError, match=message):
        ablations.run(flags(home, tmp_path / "out", *given))


@pytest.mark.parametrize("given", [["--limit", "3"], ["--limit", "4", "--iters", "3"]])
def test_windows_that_would_not_be_read_equally_often_are_refused(home, tmp_path, given):
    with pytest.raises(MlxZipError, match=r"--data gives \d windows, \d are read .* read equally often"):
        ablations.run(flags(home, tmp_path / "out", *given))
    assert list((tmp_path / "out" / "data").iterdir()) == []


def test_two_texts_of_one_name_are_refused(home, tmp_path):
    twin = shutil.copy(home / "near.jsonl", tmp_path)
    with pytest.raises(MlxZipError, match=r"two texts are called near\.jsonl"):
        ablations.run(flags(home, tmp_path / "out", "--valid", str(home / "near.jsonl"), str(twin)))


def test_a_zip2zip_model_is_no_base(home, done, tmp_path):
    model = done / "runs" / "m3-averaging-seed0" / "model"
    with pytest.raises(MlxZipError, match="is a zip2zip model"):
        ablations.run(flags(home, tmp_path / "out", "--model", str(model)))


def test_lines_of_two_conditions_do_not_compare(done):
    lines = read_lines(done / LINES)
    lines[1]["conditions"] = {**lines[1]["conditions"], "iters": 3}
    with pytest.raises(MlxZipError, match="different conditions"):
        AblationResults(lines)


# ---- figures, tables


def test_the_setup_names_the_base_of_the_lines(done):
    assert "| base | base, " in conditions_table(AblationResults(read_lines(done / LINES)))


def test_lines_are_written_whole_after_every_setting(home, tmp_path, monkeypatch):
    def fail_at_second(self, setting, calls=[]):  # noqa: B006
        calls.append(setting)
        if len(calls) == 2:
            raise MlxZipError("no power")
        return {"training": {}, "texts": {}, "parameters": {}}

    monkeypatch.setattr(ablations.AblationRunner, "measure", fail_at_second)
    (tmp_path / "out").mkdir()
    with pytest.raises(MlxZipError, match="no power"):
        ablations.run(flags(home, tmp_path / "out"))
    assert [
        json.loads(text)["setting"]["merge_size"] for text in (tmp_path / "out" / LINES).read_text().splitlines()
    ] == [1]
