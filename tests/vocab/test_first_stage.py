"""Tokenizers under learned vocabularies: one reader of their files for all methods, and what they are known by."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip import named
from mlx_zip.errors import DataError
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
from mlx_zip.vocab.first_stage import open_tokenizer_file, tokenizer_fingerprint, tokens_fingerprint
from mlx_zip.vocab.hbpe.patch_text import read_text_encoder, read_token_bytes
from support.prepared import tokenizer_folder
from support.tiny_vocabularies import SIZE, TEXT, tokens, write_folder, write_pair, write_ranks

# As the first versions wrote them, of the tokenizers below.
PACKS_HOLD = "e6b04b2ee8fe725b27f493e235ed2c0a693103a7abaaca8b7d5a7be17536bf64"
TABLES_HOLD = "ad8911313dd618366f00dfbdfabb7d31418a782b8b17979c601c88378574652f"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("first-stage") / "mini")


@pytest.fixture
def files(tmp_path, folder):
    """A file of each kind, plain and compressed -> (kind, path) pairs."""
    listed = tmp_path / "tokens.json"
    listed.write_text(json.dumps([token.hex() for token in tokens()]))
    plain = {
        "tokenizer": folder / "tokenizer.json",
        "merges": write_pair(tmp_path).with_name("vocab.bpe"),
        "ranks": write_ranks(tmp_path),
        "hex": listed,
    }
    for path in list(plain.values()):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return [*plain.items(), *((kind, tmp_path / f"{path.name}.gz") for kind, path in plain.items())]


def test_each_kind_of_file_is_told_by_its_name_compressed_or_not(files):
    assert [open_tokenizer_file(path).kind for _, path in files] == [kind for kind, _ in files]


def test_a_file_gives_its_name_or_its_folders(tmp_path, folder, files):
    assert open_tokenizer_file(folder).name == "mini"
    assert open_tokenizer_file(write_ranks(tmp_path, "mine.tiktoken.gz")).name == "mine"
    (tmp_path / "gpt2-vocab.bpe").write_text("t h\n")
    assert open_tokenizer_file(tmp_path / "gpt2-vocab.bpe").name == "gpt2"


@given(st.text(max_size=50) | st.just(TEXT))
def test_all_methods_read_the_same_ids_and_bytes_from_a_tokenizer_json(folder, text):
    base, spelled = read_base_vocabulary(folder), read_token_bytes(folder)
    ids = base.encode(text).tolist()
    assert ids == list(read_text_encoder(folder)(text)) == list(read_vocabulary(str(folder)).encode(text))
    assert b"".join(spelled[i] for i in ids) == text.encode()
    assert [spelled[i] for i in base.ids] == base.merges.tokens


def test_all_methods_read_the_same_ids_and_bytes_from_ranks(tmp_path):
    path = write_ranks(tmp_path)
    base, spelled = read_base_vocabulary(path), read_token_bytes(path)
    assert [spelled[i] for i in base.ids] == base.merges.tokens
    assert len(base.ids) == len(spelled) == SIZE


def test_a_bundled_models_name_stands_for_its_folder(tmp_path, folder, monkeypatch):
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "config.json").write_text("{}")
    (tmp_path / "stories" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    monkeypatch.setattr(named, "FOLDER", tmp_path)
    assert read_token_bytes("stories") == read_token_bytes(folder)
    assert read_base_vocabulary("stories").ids.tolist() == read_base_vocabulary(folder).ids.tolist()
    assert read_vocabulary("stories").size == SIZE + 1


def test_an_id_of_several_tokens_is_refused_by_all(tmp_path, folder):
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["vocab"]["123"] = 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    for read in (read_base_vocabulary, read_token_bytes):
        with pytest.raises(DataError, match=r"tokenizer\.json: the vocabulary gives one id to several tokens"):
            read(tmp_path)


def test_merges_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "merges.txt").write_bytes(b"a b\n\xff\n")
    for read in (read_base_vocabulary, read_token_bytes):
        with pytest.raises(DataError, match=r"merges\.txt: is no list of merges: not valid UTF-8 at byte 4"):
            read(tmp_path / "merges.txt")


# ---- fingerprints: files that are already written hold them, so they never change


def test_a_tokenizer_has_the_fingerprint_that_written_packs_hold():
    assert tokenizer_fingerprint(load_tokenizer(tokenizer_folder())) == PACKS_HOLD


def test_bytes_by_id_have_the_fingerprint_that_written_tables_hold():
    assert tokens_fingerprint(tokens()) == TABLES_HOLD


def test_a_fingerprint_tells_tokenizers_with_other_special_ids_apart(folder):
    one, other = load_tokenizer(folder), load_tokenizer(folder)
    other.eos_token_id = SIZE
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)
