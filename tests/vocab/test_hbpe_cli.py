"""`mlx_zip vocab hbpe` and `mlx_zip bench hbpe`, in process."""

import json

import pytest

from mlx_zip.bench.__main__ import main as bench
from mlx_zip.vocab.hbpe.patch_merges import learn_merges
from mlx_zip.vocab.hbpe.patch_table import PatchTable
from mlx_zip.vocab.hbpe.patch_text import read_token_bytes
from support.command_line import outcome, shown
from support.tiny_vocabularies import SIZE, TEXT, write_folder, write_pair, write_ranks


@pytest.fixture
def tokenizer(tmp_path):
    return write_folder(tmp_path / "mini")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(capsys):
    return outcome(capsys, "vocab", "hbpe")


def test_a_table_is_learned_shown_and_used(run, tmp_path, tokenizer, text):
    table = tmp_path / "t.npz"
    status, out, _ = run("learn", "--out", table, "--tokenizer", tokenizer, "--patch-size", 3)
    assert status == 0
    assert "merges were learned from 3 tokens that did not fit" in out  # "the", " the" and "123"
    status, out, _ = run("show", table)
    assert status == 0
    figures = shown(out)
    assert (figures["tokens"], figures["longest token bytes"]) == (f"{SIZE + 1}", "4")
    assert (figures["patch size"], figures["mode"]) == ("3", "stop")
    status, out, _ = run("encode", table, "--data", text, "--tokenizer", tokenizer, "--show", 1)
    assert status == 0
    assert shown(out)["text bytes"] == str(len(TEXT))
    assert out.splitlines()[-1].split()[-1] == "256"


def test_json_holds_what_the_library_gives(run, tmp_path, tokenizer, text):
    path, tokens = tmp_path / "t.npz", read_token_bytes(tokenizer)
    _, out, _ = run("learn", "--out", path, "--tokenizer", tokenizer, "--patch-size", 3, "--mode", "full", "--json")
    trained, table = json.loads(out), PatchTable.load(path)
    learned = learn_merges(tokens, 3)
    assert trained["merges"] == [list(pair) for pair in learned.merges.pairs]
    assert trained["counts"] == learned.counts.tolist()
    assert (trained["mode"], trained["fingerprint"], trained["tokens_too_long"]) == ("full", table.fingerprint, 3)
    assert sum(trained["patch_lengths"].values()) == trained["tokens"] == len(tokens)
    _, out, _ = run("encode", path, "--data", text, "--tokenizer", tokenizer, "--json")
    used = json.loads(out)
    assert used["exact"] is True
    assert b"".join(table.merges.decode(patch) for patch in used["patch_symbols"]) == TEXT.encode()
    assert used["symbols"] == sum(map(len, used["patch_symbols"]))
    assert used["fertility"] == used["patches"] / len(TEXT.split())
    _, out, _ = run("show", path, "--json")
    assert json.loads(out) == {k: v for k, v in trained.items() if k not in ("counts", "tokens_too_long")}


def test_a_table_of_another_tokenizer_is_refused(run, tmp_path, tokenizer, text):
    table = tmp_path / "t.npz"
    run("learn", "--out", table, "--tokenizer", tokenizer)
    status, out, err = run("encode", table, "--data", text, "--tokenizer", write_pair(tmp_path).with_name("vocab.bpe"))
    assert (status, out) == (2, "")
    assert "another tokenizer" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("learn", "--out", "t.npz"), "learn needs --tokenizer"),
        (("learn", "--tokenizer", "mini"), "learn needs --out"),
        (("learn", "text.txt", "--out", "t.npz", "--tokenizer", "mini"), "'text.txt' belongs to no flag"),
        (("encode", "t.npz", "--tokenizer", "mini"), "encode needs --data"),
        (("encode", "t.npz", "--data", "text.txt"), "encode needs --tokenizer"),
        (("show", "t.npz", "--show", "-1"), "--show"),
        (("show", "none.npz"), "none.npz"),
        (("learn", "--out", "t.npz", "--tokenizer", "mini", "--patch-size", "1"), "from 2 to 256, got 1"),
        (("learn", "--out", "t.bin", "--tokenizer", "mini"), "t.bin"),
        (("learn", "--out", "none/t.npz", "--tokenizer", "mini"), "--out none/t.npz: no such folder"),
        (("learn", "--out", "t.npz", "--tokenizer", "text.txt"), "text.txt: merge 0"),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(run, tmp_path, monkeypatch, tokenizer, text, flags, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*flags)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mini", "text.txt"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("show", "t.npz", "--tokenizer", "mini"), "--tokenizer"),
        (("show", "t.npz", "--patch-size", "4"), "--patch-size"),
        (("fit", "run"), "--data"),
        (("fit", "run", "--data", "text.txt", "--latent", "1,2,3"), "LAYERS,WIDTH,FFN,HEADS"),
    ],
)
def test_each_action_takes_its_own_flags_alone(run, flags, message):
    status, _, err = run(*flags)
    assert status == 2
    assert message in err.splitlines()[-1]


def test_the_bench_tells_merges_lengths_and_times(capsys, tmp_path, text):
    path = write_pair(tmp_path).with_name("vocab.bpe")
    flags = ["--tokenizer", path, "--text", text, "--sizes", 3, 4, "--trials", 2]
    assert bench(["hbpe", *map(str, flags)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tokens = read_token_bytes(path)
    assert [line["merges"] for line in lines] == [len(learn_merges(tokens, size).merges.pairs) for size in (3, 4)]
    assert all(len(line["learn_ms"]["samples"]) == 2 for line in lines)
    assert all(line["symbols_per_patch_full"] <= line["symbols_per_patch_stop"] <= line["patch_size"] for line in lines)
    assert all(line["flops_patches_padded"] >= line["flops_patches_counted"] for line in lines)


def test_the_bench_refuses_what_it_cannot_read(capsys, tmp_path):
    assert bench(["hbpe", "--tokenizer", str(write_ranks(tmp_path)), "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
