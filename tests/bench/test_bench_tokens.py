"""`bench tokens`: counts are those of the codec on the same ids."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_zip.bench import tokens as bench
from mlx_zip.bench.recording import run_bench
from mlx_zip.bench.tokens import COLUMNS, WHOLE, count_corpus, count_pieces, read_domains
from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.errors import DataError, InstallationError, MlxZipError
from mlx_zip.text.vocabularies import read_vocabulary
from support.places import SHARED
from support.tiny_vocabularies import SIZE, TEXT, write_folder, write_pair

TEXTS = SHARED / "data" / "text"
needs_shared = pytest.mark.skipif(
    not TEXTS.is_dir(), reason="the shared texts and tokenizers are not next to the checkout"
)


@pytest.fixture
def pair(tmp_path):
    return read_vocabulary(write_pair(tmp_path))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text(
        "".join(json.dumps({"text": TEXT * n, "question": "12", "answer": "123"}) + "\n" for n in (1, 4, 2))
    )
    return path


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(list(map(str, flags)))


def lines(capsys, *flags: object) -> list[dict]:
    assert run_bench(bench.run, parse(*flags)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---- counts


def counts_of(line: dict, *setting: object) -> dict:
    found = [dict(zip(line["columns"], row, strict=True)) for row in line["counts"] if row[:3] == list(setting)]
    assert len(found) == 1
    return found[0]


def test_windows_run_across_documents_and_documents_do_not(pair, text):
    corpus = read_domains([f"web={text}"])["web"]
    line = count_corpus(pair, corpus, [(50, 3, 16), (None, 3, 16)])
    documents = [np.array(pair.encode(document.text), np.uint32) for document in corpus.documents]
    stream = np.concatenate(documents)
    params = CodecParams(SIZE + 1, 16, 3, pad_id=SIZE)
    for window, pieces in ((50, [stream[i : i + 50] for i in range(0, len(stream), 50)]), (WHOLE, documents)):
        assert counts_of(line, window, 3, 16)["ids"] == sum(len(compress(params, piece)[0]) for piece in pieces)
    assert line["base_ids"] == len(stream)
    assert line["bytes_per_base_id"] == round(7 * len(TEXT.encode()) / len(stream), 4)
    assert line["columns"] == COLUMNS


def test_entries_are_those_installed_and_those_emitted():
    params = CodecParams(10, 8, 3)
    ids = np.array([1, 2, 1, 2, 1, 2, 3], np.uint32)
    emitted, entries = compress(params, ids)
    used = {int(i) for i in emitted if i >= 10}
    assert used
    assert count_pieces(params, [ids, ids]) == (2 * len(emitted), 2 * len(entries), 2 * len(used))


def test_counted_ids_hold_the_whole_text(pair, text):
    corpus = read_domains([f"web={text}"])["web"]
    params = CodecParams(SIZE + 1, 2048, 5, pad_id=SIZE)
    for document in corpus.documents:
        base = np.array(pair.encode(document.text), np.uint32)
        emitted, _ = compress(params, base)
        book = Codebook(params)
        book.push(emitted)
        np.testing.assert_array_equal(book.expand(emitted), base)


def test_counts_are_the_published_codecs(pair, text):
    upstream = pytest.importorskip("zip2zip_compression")
    corpus = read_domains([f"web={text}"])["web"]
    settings = [(window, merge, size) for window in (40, None) for merge in (2, 3, 5) for size in (4, 2048)]
    line = count_corpus(pair, corpus, settings, upstream)
    assert line["checked_against"].startswith("zip2zip_compression ")
    pieces = [pair.encode(document.text) for document in corpus.documents]
    theirs = upstream.LZWCompressor(SIZE + 1, 2048, 3, SIZE, [SIZE])
    assert counts_of(line, WHOLE, 3, 2048)["ids"] == sum(len(theirs.encode(list(ids))[0]) for ids in pieces)


def test_a_codec_that_gives_other_ids_is_told():
    compressor = lambda *sizes: SimpleNamespace(encode=lambda ids: (ids, [], None))
    pieces = [np.array([1, 2, 3], np.uint32), np.array([1, 2, 1, 2], np.uint32)]
    with pytest.raises(MlxZipError, match=r"window 1 of 2 .* gives other ids"):
        bench.check_against_upstream(CodecParams(10, 8, 3, pad_id=9), pieces, SimpleNamespace(LZWCompressor=compressor))


def test_a_line_per_tokenizer_and_domain_says_what_was_measured(capsys, text, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text(TEXT)
    flags = ["--tokenizers", write_pair(tmp_path), write_folder(tmp_path / "mini"), "--text", f"web={plain}"]
    found = lines(capsys, *flags, f"chat={text}", f"web={plain}", "--windows", 8, "--merge-sizes", 1, 3)
    assert [(line["tokenizer"]["name"], line["domain"]) for line in found] == [
        (tmp_path.name, "web"),
        (tmp_path.name, "chat"),
        ("mini", "web"),
        ("mini", "chat"),
    ]
    assert found[0]["text"]["files"] == ["plain.txt", "plain.txt"]
    assert found[0]["text"]["bytes"] == 2 * len(TEXT)
    assert counts_of(found[0], 8, 1, 2048)["ids"] == found[0]["base_ids"]
    assert found[0]["checked_against"] is None
    assert found[0]["machine"]
    assert str(tmp_path.parent) not in json.dumps(found)


def test_of_codebooks_that_no_window_can_fill_one_is_measured():
    found = list(bench.distinct_settings([8, None], [3], [16, 4, 8]))
    assert found == [(8, 3, 4), (8, 3, 8), (None, 3, 4), (None, 3, 8), (None, 3, 16)]


def test_the_limit_cuts_each_domain_by_bytes(text):
    corpora = read_domains([f"web={text}", f"chat={text}"], 100)
    assert {domain: (corpus.n_bytes, corpus.cut) for domain, corpus in corpora.items()} == {
        "web": (100, True),
        "chat": (100, True),
    }


def test_texts_may_be_zipped_and_have_fields_of_other_names(text, tmp_path):
    zipped = tmp_path / "some.jsonl.gz"
    zipped.write_bytes(gzip.compress(text.read_bytes()))
    assert read_domains([f"math={zipped}:question+answer"])["math"].documents[0].text == "12123"
    assert read_domains([f"math={zipped}:answer"])["math"].documents[0].text == "123"


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--text", "web=x.txt"], "--tokenizers is missing"),
        (["--tokenizers", "x.model"], "--text is missing"),
        (["--windows", "0"], "'0' is neither a number of ids nor 'document'"),
        (["--windows", "some"], "'some' is neither"),
        (["--merge-sizes", "0"], "--merge-sizes must be at least 1, got 0"),
        (["--codebook-sizes", "0"], "--codebook-sizes must be at least 1, got 0"),
        (["--merge-sizes", "99"], "merge_size 99 is outside"),
        (["--codebook-sizes", "99999999"], "codebook_size 99999999 is outside"),
        (["--limit-bytes", "0"], "must be at least 1, got 0"),
        (["--text", "x.txt"], "is not of the form DOMAIN=FILE"),
        (["--text", "web=x.txt"], "no such file"),
        (["--text", "web=x.jsonl:a+b+c"], "one field or two"),
        (["--text", "web=x.jsonl:a", "web=y.jsonl:b"], "the same fields"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(flags, told, monkeypatch):
    monkeypatch.setattr(bench, "count_corpus", None)
    given = flags if "missing" in told else ["--tokenizers", "x.model", "--text", "web=x.txt", *flags]
    with pytest.raises(MlxZipError, match=told):
        run_bench(bench.run, parse(*given))


def test_a_line_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: text is int, not text"):
        read_domains([f"web={path}"])


def test_a_text_without_any_id_is_refused(pair, text):
    corpus = read_domains([f"web={text}"])["web"]
    silent = SimpleNamespace(name="silent", size=4, library="none", encode=lambda text: [])
    with pytest.raises(DataError, match="silent reads no ids"):
        count_corpus(silent, corpus, [(8, 3, 8)])


def test_a_check_without_the_published_codec_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zip2zip_compression", None)
    with pytest.raises(InstallationError, match="pip install zip2zip-compression"):
        run_bench(bench.run, parse("--tokenizers", "x.model", "--text", "web=x.txt", "--check"))


# ---- published vocabularies, where they are


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize(("name", "low", "high"), [("llama3", 0.51, 0.57), ("qwen", 0.52, 0.58)])
def test_code_gains_what_the_paper_prints_and_as_much_as_the_published_codec(name, low, high):
    """In windows of 8,192 base ids; the paper has 0.54 and 0.55."""
    upstream = pytest.importorskip("zip2zip_compression")
    corpus = read_domains([f"code={TEXTS / 'code' / 'humanevalx.test.jsonl.gz'}"])["code"]
    vocabulary = read_vocabulary(SHARED / "tokenizers" / f"{name}.tiktoken.gz")
    line = count_corpus(vocabulary, corpus, [(8192, 3, 2048)], upstream)
    assert low <= line["base_ids"] / counts_of(line, 8192, 3, 2048)["ids"] - 1 <= high
