"""`mlx_zip compress`, in process: its counts are the codec's."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from mlx_zip.engine.mlx.generate import load
from support import tiny_text
from support.cli_cases import MODEL, PROMPT
from support.command_line import runner, shown

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def model():
    return str(tiny_text.converted(MODEL))


@pytest.fixture
def run(capsys):
    """Runs a command of `mlx_zip` -> (status, stdout, stderr)."""
    return lambda *flags, command: runner(capsys, command)(*flags)


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(PROMPT * 20)
    return str(file)


def compress(run, *flags):
    status, out, err = run(*flags, command="compress")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_compress_counts_as_the_codec_does(run, text_file, model):
    from mlx_zip.codec import compress as codec_compress

    loaded, tokenizer = load(model)
    base_ids = tokenizer.encode(PROMPT * 20, add_special_tokens=False)
    ids, entries = codec_compress(loaded.config.codec_params, base_ids)
    record = compress(run, text_file, "--tokenizer", model, "--json")
    assert (record["base_tokens"], record["ids"], record["entries"]) == (len(base_ids), len(ids), len(entries))


def test_compress_lists_the_most_saving_hypertokens_first(run, text_file, model):
    saved = [h["saved_ids"] for h in compress(run, text_file, "--tokenizer", model, "--json")["hypertokens"]]
    assert saved == sorted(saved, reverse=True)


def test_the_listed_savings_are_all_there_is(run, text_file, model):
    record = compress(run, text_file, "--tokenizer", model, "--json", "--show", 10_000)
    assert sum(h["saved_ids"] for h in record["hypertokens"]) == record["base_tokens"] - record["ids"]


def test_windows_are_compressed_on_their_own(run, text_file, model):
    whole = compress(run, text_file, "--tokenizer", model, "--json")
    assert compress(run, text_file, "--tokenizer", model, "--json", "--window", 32)["ids"] > whole["ids"]


def test_a_tokenizer_file_is_enough(run, text_file, model):
    flags = ("--tokenizer", f"{model}/tokenizer.json", "--merge-size", 5, "--codebook-size", 17, "--json")
    record = compress(run, text_file, *flags)
    assert (record["merge_size"], record["codebook_size"], record["entries"]) == (5, 17, 17)


def test_a_folder_whose_config_names_no_architecture_is_a_tokenizer(run, text_file, model, tmp_path):
    copied = tmp_path / "tokenizer"
    shutil.copytree(model, copied, ignore=shutil.ignore_patterns("*.safetensors"))
    (copied / "config.json").write_text("{}")
    record = compress(run, text_file, "--tokenizer", str(copied), "--json")
    assert record == compress(run, text_file, "--tokenizer", str(copied), "--merge-size", 3, "--json")


def test_a_models_tokenizer_file_brings_the_models_codec(run, text_file, model):
    file = str(Path(model) / "tokenizer.json")
    assert compress(run, text_file, "--tokenizer", file, "--json") == compress(
        run, text_file, "--tokenizer", model, "--json"
    )


def test_digits_can_be_kept_from_merging(run, tmp_path, model):
    (tmp_path / "n").write_text("1234" * 30)
    flags = ("--tokenizer", model, "--json", "--disabled", "digits")
    assert compress(run, tmp_path / "n", *flags)["entries"] == 0


def test_a_text_without_tokens_is_refused(run, tmp_path):
    words = Tokenizer(WordLevel({"a": 0}))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "blanks").write_text("  \n ")
    status, out, err = run(tmp_path / "blanks", "--tokenizer", tmp_path / "tokenizer.json", command="compress")
    assert (status, out, err) == (2, "", f"error: {tmp_path / 'blanks'} has no tokens\n")


def test_compress_prints_a_table(run, text_file, model):
    _, out, _ = run(text_file, "--tokenizer", model, "--show", 3, command="compress")
    figures, table = out.split("\n\n")
    assert shown(figures)["text bytes"] == f"{20 * len(PROMPT):,}"
    assert len(table.splitlines()) == 1 + 3


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["/no/such", "--tokenizer", "MODEL"], "/no/such: No such file"),
        (["BAD", "--tokenizer", "MODEL"], "is not valid UTF-8 at byte 0"),
        (["EMPTY", "--tokenizer", "MODEL"], "is empty"),
        (["TEXT", "--tokenizer", "BAD"], "--tokenizer"),
        (["TEXT", "--tokenizer", "nobody/nothing"], "--tokenizer nobody/nothing"),
        (["TEXT", "--tokenizer", "MODEL", "--window", "0"], "--window"),
        (["TEXT", "--tokenizer", "MODEL", "--merge-size", "99"], "--merge-size must be at least 1 and below 17"),
        (["TEXT", "--tokenizer", "MODEL", "--codebook-size", "-1"], "--codebook-size must be at least 0"),
        (["", "--tokenizer", "MODEL"], "the empty path: Is a directory"),
    ],
)
def test_what_cannot_be_compressed_is_one_line(run, flags, named, tmp_path, text_file, model):
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_bytes(b"")
    names = {"MODEL": model, "TEXT": text_file, "BAD": tmp_path / "bad", "EMPTY": tmp_path / "empty"}
    status, _, err = run(*(names.get(flag, flag) for flag in flags), command="compress")
    assert (status, err.count("\n"), named in err) == (2, 1, True)
