"""The methods of `mlx_zip vocab` speak one language: one name for one thing, outputs are checked before work."""

import argparse
import json

import pytest

from mlx_zip import named
from mlx_zip.bench.pages import vocab_parsers
from mlx_zip.packs.pack import load_pack
from mlx_zip.vocab.adaptbpe.adapted import read_adapted_vocabulary
from mlx_zip.vocab.hbpe.patch_table import PatchTable
from mlx_zip.vocab.multitok import Dictionary
from support.command_line import outcome, stay_home
from support.tiny_vocabularies import write_folder, write_pair, write_ranks

TEXT = "the cat and the dog and the cat: 123 the 12, the cat and the dog.\n" * 20
LEARNED = {  # method: how it learns from a tokenizer, what reads the file
    "pack": (("learn", "--size", 4, "--data", "some.txt", "--tokenizer", "mini", "--out", "a.npz"), load_pack),
    "multitok": (("train", "--data", "some.txt", "--tokenizer", "mini", "--out", "a.mtok"), Dictionary.load),
    "adapt": (
        ("learn", "--merges", 3, "--data", "some.txt", "--tokenizer", "mini", "--out", "a.json"),
        read_adapted_vocabulary,
    ),
    "hbpe": (("learn", "--patch-size", 3, "--tokenizer", "mini", "--out", "a.npz"), PatchTable.load),
}


ADAPT = ("--tokenizer", "mini", "--merges", 3, "--out", "b.json", "--max-swaps", 0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where some.txt and the tokenizer mini lie: the working folder."""
    stay_home(monkeypatch, tmp_path)
    (tmp_path / "some.txt").write_text(TEXT)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (write_folder(tmp_path / "mini") / "tokenizer_config.json").write_text(json.dumps(named))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Runs `mlx_zip vocab` -> (status, stdout, stderr)."""
    return outcome(capsys, "vocab")


def actions():
    """(method, action, parser)."""
    for name, parser in vocab_parsers().items():
        yield *name.split(), parser


def shown(parser):
    return [a for a in parser._actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]


def replaced(words, flag, value):
    at = words.index(flag) + 1
    return (*words[:at], value, *words[at + 1 :])


@pytest.mark.parametrize(("method", "action", "parser"), list(actions()))
def test_an_action_takes_the_file_it_works_on_first_and_all_else_by_flags(method, action, parser):
    placed = [a.dest for a in shown(parser) if not a.option_strings]
    assert len(placed) == (action not in ("learn", "train"))
    assert parser.epilog.startswith("example")


@pytest.mark.parametrize(("method", "action", "parser"), list(actions()))
def test_what_one_method_calls_a_thing_the_others_do(method, action, parser):
    first_names = {a.option_strings[0] for a in shown(parser) if a.option_strings}
    assert not first_names & {"--text", "--file", "--base", "--output", "--mlx-path", "--entries"}
    if action in ("learn", "train"):
        assert {"--tokenizer", "--out", "--json"} <= first_names
    if action == "encode":
        assert {"--data", "--json"} <= first_names
    if action in ("show", "stats"):
        assert {"--json"} <= first_names


@pytest.mark.parametrize("method", LEARNED)
def test_every_method_learns_by_the_same_flags(run, method):
    words, read = LEARNED[method]
    status, out, err = run(method, *words, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)
    assert read(words[words.index("--out") + 1])


@pytest.mark.parametrize("method", LEARNED)
def test_a_bundled_models_name_is_taken_for_its_folder(run, method, folder, monkeypatch):
    (folder / "bundle").mkdir()
    (folder / "mini").rename(folder / "bundle" / "stories")
    (folder / "bundle" / "stories" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(named, "FOLDER", folder / "bundle")
    status, _, err = run(method, *replaced(LEARNED[method][0], "--tokenizer", "stories"))
    assert (status, err) == (0, "")


@pytest.mark.parametrize("method", LEARNED)
@pytest.mark.parametrize(("out", "told"), [("none/a", "no such folder"), ("folder", "is a folder or device")])
def test_what_cannot_be_written_is_told_before_anything_is_read(run, method, folder, out, told):
    words = LEARNED[method][0]
    suffix = words[-1].partition(".")[2]
    (folder / f"folder.{suffix}").mkdir()
    words = replaced(replaced(words, "--out", f"{out}.{suffix}"), "--tokenizer", "nowhere")
    status, printed, err = run(method, *words)
    assert (status, printed, err.count("\n")) == (2, "", 1)
    assert f"--out {out}.{suffix}: {told}" in err


@pytest.mark.parametrize("method", ["pack", "hbpe"])
def test_another_suffix_is_told_before_anything_is_read(run, method):
    words = replaced(replaced(LEARNED[method][0], "--out", "a.bin"), "--tokenizer", "nowhere")
    status, _, err = run(method, *words)
    assert status == 2
    assert "--out a.bin: a" in err
    assert "is a .npz file" in err


@pytest.mark.parametrize(
    ("words", "stray"),
    [
        (("multitok", "stats", "a.mtok"), "--window=2"),
        (("multitok", "stats", "a.mtok"), "some.txt"),
        (("multitok", "encode", "a.mtok", "--data", "some.txt"), "--fraction=1"),
        (("multitok", "train", "--data", "some.txt", "--out", "a.mtok"), "--matching=walk"),
        (("multitok", "export", "a.mtok", "--out", "a.npz"), "--window=2"),
        (("multitok", "export", "a.mtok", "--out", "a.npz"), "some.txt"),
        (("multitok", "train", "--data", "some.txt", "--out", "a.mtok"), "--size=2"),
        (("hbpe", "show", "a.npz"), "--tokenizer=mini"),
        (("adapt", "show", "b.json"), "--text=some.txt"),
        (("adapt", "show", "b.json"), "--base=mini"),
        (("hbpe", "encode", "a.npz", "--data", "some.txt", "--tokenizer", "mini"), "--patch-size=4"),
    ],
)
def test_a_flag_of_another_action_is_refused_by_name(run, words, stray):
    status, _, err = run(*words, stray)
    assert status == 2
    flag = stray.partition("=")[0]
    named = f"unknown flag {flag};" if flag[:2] == "--" else f"{stray!r} belongs to no flag"
    assert err.startswith(f"error: {named}")


# ---- whose ids a dictionary is of


def test_packs_and_dictionaries_know_a_tokenizer_by_one_fingerprint(run):
    for method in ("pack", "multitok"):
        assert run(method, *LEARNED[method][0])[0] == 0
    units = Dictionary.load("a.mtok").settings.units
    assert units.fingerprint == load_pack("a.npz").tokenizer


# ---- formats of tokenizers


@pytest.mark.parametrize("method", LEARNED)
@pytest.mark.parametrize("kind", ["ranks", "merges"])
def test_every_method_takes_every_format_of_a_tokenizer(run, folder, method, kind):
    if kind == "ranks":
        file = write_ranks(folder).rename(folder / "cl100k.tiktoken")
    else:
        file = write_pair(folder).with_name("vocab.bpe")
    words, read = LEARNED[method]
    status, _, err = run(method, *replaced(words, "--tokenizer", file), "--json")
    assert (status, err) == (0, "")
    assert read(words[words.index("--out") + 1])
