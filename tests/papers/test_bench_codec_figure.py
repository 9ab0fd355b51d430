"""`bench codec_latency`: what its lines hold and how it is drawn (no timing is judged here)."""

from __future__ import annotations

import argparse
import json

import pytest

from mlx_zip.bench import codec, recording
from mlx_zip.bench.papers.zip2zip import codec_figure
from mlx_zip.bench.papers.zip2zip.codec_figure import latency_figure, measure_latency
from mlx_zip.bench.recording import run_bench
from mlx_zip.codec import CodecParams, compress
from mlx_zip.errors import MlxZipError
from mlx_zip.text.vocabularies import read_vocabulary
from support.tiny_vocabularies import SIZE, TEXT, write_pair


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(codec, "TRIAL_S", 0.0)
    monkeypatch.setattr(recording, "IDLE_S", 0.0)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text(TEXT * 200)
    return path


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    codec_figure.add_arguments(parser)
    return parser.parse_args(list(map(str, flags)))


def flags(tmp_path, text) -> list[object]:
    return ["--text", text, "--tokenizer", write_pair(tmp_path), "--trials", 2]


def test_a_line_per_size_up_to_the_texts(capsys, tmp_path, text):
    assert run_bench(codec_figure.run, parse(*flags(tmp_path, text))) == 0
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert [(line["bench"], line["what"], line["bytes"]) for line in found] == [
        ("codec", "figure4", 1000),
        ("codec", "figure4", 10_000),
    ]
    assert "sizes up to 10,000 are measured" in captured.err
    assert found[0]["data"] == f"some.txt; {tmp_path.name}"
    assert found[0]["versions"]["mlx_zip"]


def test_a_trials_sum_is_the_tokenizers_and_the_codecs_time(tmp_path, monkeypatch):
    """The clock is made up: 1 s for the tokenizer, 2 s for ours, 3 s for the published codec."""
    seconds = [1.0, 2.0, 3.0] if codec.upstream else [1.0, 2.0]
    times = iter([one for first in (-1, 0, 1) for one in (*seconds[first:], *seconds[:first])])  # they take turns
    monkeypatch.setattr(codec_figure, "mean_call_seconds", lambda call: (call(), next(times))[1])
    vocabulary = read_vocabulary(write_pair(tmp_path))
    line = measure_latency(vocabulary, TEXT, 2)
    assert line["tokenizer"]["samples"] == [1e6, 1e6]
    assert line["with_ours"]["samples"] == [3e6, 3e6]
    assert (line["with_upstream"] and line["with_upstream"]["samples"]) == ([4e6, 4e6] if codec.upstream else None)
    ids = vocabulary.encode(TEXT)
    assert (line["base_ids"], line["bytes"]) == (len(ids), len(TEXT))
    assert line["ids"] == len(compress(CodecParams(SIZE + 1, 2048, 3, pad_id=SIZE), ids)[0]) < len(ids)


def test_without_the_published_codec_its_times_are_null_and_not_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(codec_figure, "upstream", None)
    line = measure_latency(read_vocabulary(write_pair(tmp_path)), TEXT, 1)
    assert line["with_upstream"] is None
    figure = latency_figure([{**line, "data": "some.txt; mini"}])
    assert len(figure.axes[0].containers) == 2


def test_ids_of_a_text_are_measured_with_a_vocabularys_file(capsys, tmp_path, text):
    few = ["--windows", 1, "--trials", 1, "--length", 300, "--vocab-size", SIZE + 256]
    parser = argparse.ArgumentParser()
    codec.add_arguments(parser)
    given = ["--text", text, "--tokenizer", write_pair(tmp_path), *few]
    assert run_bench(codec.run, parser.parse_args(list(map(str, given)))) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["data"] for line in found} == {f"some.txt; {tmp_path.name}"}
    assert found[0]["ids"] == 300


@pytest.mark.parametrize("missing", ["--text", "--tokenizer"])
def test_text_and_tokenizer_are_needed(tmp_path, text, missing):
    given = flags(tmp_path, text)
    at = given.index(missing)
    with pytest.raises(MlxZipError, match="codec_latency needs --text and --tokenizer"):
        run_bench(codec_figure.run, parse(*given[:at], *given[at + 2 :]))


def test_a_text_that_is_too_short_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(TEXT)
    with pytest.raises(MlxZipError, match=f"--text holds {len(TEXT)} bytes; the smallest size is 1000"):
        run_bench(codec_figure.run, parse(*flags(tmp_path, short)))
