"""The one loader of tokenizers: a model that was adapted has the same ids whichever way its tokenizer is reached."""

import shutil
import sys

import pytest

from mlx_zip import cli, load
from mlx_zip.bench.engines.workloads import read_tokenizer
from mlx_zip.converters.adapt import adapt
from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.text import hub
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.adaptbpe.adapted import adapt_vocabulary, count_words
from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
from support.adaptbpe_cases import ADAPTBPE
from support.places import GOLDEN_MODELS

TEXT = "The cat sat on the mat. The cat café 日本 sat on the mat again."
PLAIN = GOLDEN_MODELS / "llama_transformer_untied_pos" / "base"


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """(folder of an adapted model, the ids of `TEXT` by its vocabulary)."""
    folder = tmp_path_factory.mktemp("adapted")
    base = read_base_vocabulary(PLAIN)
    kept = adapt_vocabulary(base, count_words(base.splitter, [ADAPTBPE["gpt2"]["train_text"][:8000]]), 90)
    kept.save(folder / "adapted.json")
    return adapt(PLAIN, folder / "adapted.json", folder / "smaller", progress=False), kept.encode(TEXT).tolist()


def loaded(folder):
    return load_tokenizer(folder).encode(TEXT, add_special_tokens=False)


WAYS = {
    "load": lambda folder: load(folder)[1].encode(TEXT, add_special_tokens=False),
    "load_tokenizer": lambda folder: load_tokenizer(folder).encode(TEXT, add_special_tokens=False),
    "its tokenizer.json": lambda folder: load_tokenizer(folder / "tokenizer.json").encode(
        TEXT, add_special_tokens=False
    ),
    "read_vocabulary": lambda folder: read_vocabulary(folder).encode(TEXT),
    "bench": lambda folder: read_tokenizer(folder).encode(TEXT, add_special_tokens=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_adapted_models_folder_gives_its_exact_ids(way, smaller):
    folder, expected = smaller
    assert list(WAYS[way](folder)) == expected


@pytest.mark.parametrize("way", ["load", "load_tokenizer", "read_vocabulary", "bench"])
def test_an_adapted_model_on_the_hub_gives_its_exact_ids(way, smaller, monkeypatch):
    folder, expected = smaller
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(folder))
    assert list(WAYS[way]("somebody/smaller")) == expected


def test_a_model_without_a_tokenizer_json_is_read_by_transformers_with_its_ids(smaller, tmp_path):
    folder = shutil.copytree(PLAIN, tmp_path / "base")
    expected = load_tokenizer(folder).encode(TEXT, add_special_tokens=False)
    assert list(read_vocabulary(folder).encode(TEXT)) == list(expected)


def test_a_name_without_a_slash_is_refused_at_once_and_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hub, "download_files", lambda *args, **options: pytest.fail("asked the hub"))
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr(sys, "argv", ["mlx_zip"])
    assert cli.main(["compress", str(tmp_path / "a.txt"), "--tokenizer", "nosuch"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "nosuch: no folder with a tokenizer" in err
    with pytest.raises(DataError, match="nosuch: no folder with a tokenizer"):
        load_tokenizer("nosuch")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "holds no JSON object"),
        ("{", "is not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("way", ["load", "load_tokenizer"])
def test_a_damaged_file_of_a_folder_is_named(way, name, content, told, tmp_path):
    folder = shutil.copytree(PLAIN, tmp_path / "base")
    (folder / name).write_text(content)
    with pytest.raises(MlxZipError, match=f"cannot (be )?load.*: {name} {told}"):
        WAYS[way](folder)


@pytest.mark.parametrize("content", ["[" * 100_000, "{"])
def test_a_vocabulary_that_is_no_json_is_named(content, tmp_path):
    (tmp_path / "vocab.json").write_text(content)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match=r"vocab\.json and merges\.txt"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "x" * 300, "x" * 300 + "/y"])
@pytest.mark.parametrize("way", ["load", "load_tokenizer", "read_vocabulary"])
def test_a_name_that_no_path_can_have_is_refused(way, name):
    with pytest.raises(MlxZipError, match=r"^[x~]"):
        WAYS[way](name)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("owner/name", True),
        ("my.org/a-b_c.1", True),
        ("name", False),
        ("./a", False),
        ("~/a", False),
        ("a/b/c", False),
        ("/a", False),
    ],
)
def test_hub_ids_have_an_owner_and_a_name(name, is_one):
    assert hub.is_hub_id(name) == is_one


def test_the_reasons_that_a_library_lists_after_a_colon_are_reported(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("it has none of: \n(1) a file, \n(2) a class")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"it has none of: \(1\) a file, \(2\) a class"):
        load_tokenizer(tmp_path)
