"""Published tokenizer files: every kind is read, with the ids of the library that each was made for."""

import gzip
import json
import math
import struct
import unicodedata
from pathlib import Path

import pytest

from mlx_zip.errors import DataError
from mlx_zip.text.formats import read_tokenizer_file, tiktoken_split_pattern
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.first_stage import open_tokenizer_file
from support.places import SHARED
from support.tiny_vocabularies import SIZE, TEXT, tokens, write_folder, write_pair, write_ranks

PUBLISHED = SHARED / "tokenizers"
needs_shared = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published tokenizers are not at hand")
TEXTS = (
    "",
    " ",
    "a  b\n\n c\t",
    "naïve 😀 👩‍👩‍👧 你好",
    "\u00a0x",
    "  it's 12345 67 times,\r\nHELLO's HTTPServer\n",
    "e\u0301",
)


def piece(fields: bytes) -> bytes:
    """A SentencePiece model of one piece, whose protobuf message is given."""
    return b"\x0a" + bytes([len(fields)]) + fields


def read_back(vocabulary, text: str = TEXT) -> list[bytes]:
    pieces = [tokens()[i] for i in vocabulary.encode(text)]
    assert b"".join(pieces) == text.encode()
    return pieces


def test_ranks_are_read_with_their_pattern(tmp_path):
    vocabulary = read_vocabulary(write_ranks(tmp_path))
    assert (vocabulary.name, vocabulary.size, vocabulary.library) == ("mini-llama3", SIZE, "tokenizers")
    assert read_back(vocabulary, "the the 1234") == [b"the", b" the", b" ", b"123", b"4"]


@pytest.mark.parametrize(("name", "digits"), [("llama3", [b"123"]), ("qwen", [b"1", b"2", b"3"])])
def test_the_name_of_ranks_says_how_text_is_split(tmp_path, name, digits):
    assert read_back(read_vocabulary(write_ranks(tmp_path, f"{name}.tiktoken")), "123") == digits


def test_qwen_composes_characters_first(tmp_path):
    vocabulary = read_vocabulary(write_ranks(tmp_path, "qwen.tiktoken"))
    assert list(vocabulary.encode("e\u0301")) == list("\u00e9".encode())


def test_a_zipped_file_is_read_as_the_plain_one(tmp_path):
    plain, zipped = write_ranks(tmp_path), write_ranks(tmp_path, "mini-llama3.tiktoken.gz")
    assert read_vocabulary(zipped).encode(TEXT) == read_vocabulary(plain).encode(TEXT)
    assert read_vocabulary(zipped).name == "mini-llama3"


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_gpt2s_two_files_are_one_vocabulary(tmp_path, names):
    vocabulary = read_vocabulary(write_pair(tmp_path, names))
    assert (vocabulary.name, vocabulary.size, vocabulary.library) == (tmp_path.name, SIZE, "tokenizers")
    assert read_back(vocabulary)[:2] == [b"the", b" "]
    assert vocabulary.text_of(SIZE - 1) == "123"


def test_a_folder_with_a_tokenizer_is_read_without_added_ids(tmp_path):
    folder = write_folder(tmp_path / "mini")
    vocabulary = read_vocabulary(folder)
    assert (vocabulary.name, vocabulary.size) == ("mini", SIZE + 1)
    assert read_back(vocabulary) == read_back(read_vocabulary(folder / "tokenizer.json"))


def test_a_sentencepiece_model_is_read(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    with open(tmp_path / "mini.model", "wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT.strip()] * 50), model_writer=out, vocab_size=20, minloglevel=2
        )
    vocabulary = read_vocabulary(tmp_path / "mini.model")
    assert (vocabulary.name, vocabulary.size, vocabulary.library) == ("mini", 20, "tokenizers")
    ids = list(vocabulary.encode("the cat"))
    assert "".join(map(vocabulary.text_of, ids)) == "▁the▁cat"


def test_berts_word_pieces_are_of_lower_case_unless_the_name_says_cased(tmp_path):
    pieces = ["[UNK]", "the", "The", "cat", "##s", ",", "cafe"]
    names = ("bert_uncased.vocab.txt", "bert_cased.vocab.txt", "vocab.txt")
    for name in names:
        (tmp_path / name).write_text("\n".join(pieces) + "\n")
    uncased, cased, plain = (read_vocabulary(str(tmp_path / name)) for name in names)
    assert (uncased.name, uncased.size, plain.name) == ("bert_uncased", len(pieces), tmp_path.name)
    assert list(uncased.encode("The cats, café dog")) == list(plain.encode("The cats, café dog")) == [1, 3, 4, 5, 6, 0]
    assert list(cased.encode("The cats")) == [2, 3, 4]
    for wrong in ("the\nthe\n[UNK]", "the\ncat"):
        (tmp_path / "vocab.txt").write_text(wrong)
        with pytest.raises(DataError, match="word pieces"):
            read_vocabulary(tmp_path / "vocab.txt")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"the tokenizer in .* cannot be loaded: it has no tokenizer file \(tokenizer\.json"
    ):
        read_vocabulary(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.tiktoken", None, "no such file"),
        ("strange.bin", b"", "not the name of a tokenizer file"),
        ("mine.tiktoken", b"", "how its text is split is unknown"),
        ("llama3.tiktoken", b"dGhl 0\nno\n", "line 2 is not a token in base64 and its rank"),
        ("llama3.tiktoken", b"dGhl 0\ndGg= 2\n", "the ranks are not 0, 1, 2"),
        ("llama3.tiktoken", b"", "is empty"),
        ("llama3.tiktoken.gz", b"no gzip", "cannot be read"),
        ("some.model", b"no model", "no SentencePiece model"),
        ("encoder.json", b"[1]", "cannot be read"),
        ("tokenizer.json", b"{}", "is no tokenizer.json"),
        ("some.model", b"", "it has no pieces"),
        ("some.model", piece(b"\x08\x05"), "field 1 has the wrong type"),
        ("some.model", piece(b"\x0a\x01a\x1a\x01x"), "field 3 has the wrong type"),
        ("some.model", piece(b"\x0a\x01a\x15" + struct.pack("<f", math.nan)), "a piece has the score nan"),
        ("some.model", piece(b"\x0a\x01a") + b"\x1a\x02\x10\x05", "field 2 has the wrong type"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told) as caught:
        read_vocabulary(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize("vocabulary", ['{"a": 0}', "{}"])
def test_merges_that_do_not_fit_their_vocabulary_are_refused(tmp_path, vocabulary):
    path = write_pair(tmp_path)
    path.write_text(vocabulary)
    with pytest.raises(DataError, match="no byte-level vocabulary"):
        read_vocabulary(path)


@pytest.mark.parametrize("write", [write_ranks, write_pair])
def test_the_loader_of_prompts_gives_the_same_ids_and_bytes(tmp_path, write):
    path = write(tmp_path)
    loaded = load_tokenizer(path)
    assert list(loaded.encode(TEXT)) == list(read_vocabulary(path).encode(TEXT))
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    if write is write_ranks:
        assert open_tokenizer_file(path).tokens() == tokens()


def test_a_merge_list_names_its_pair_as_the_vocabulary_does(tmp_path):
    path = write_pair(tmp_path)
    ways = [path, path.with_name("vocab.bpe"), tmp_path]
    ids = [list(read_vocabulary(way).encode(TEXT)) for way in ways]
    assert ids == [ids[0]] * 3


def test_gpt2s_end_of_text_ends_a_text(tmp_path):
    path = write_pair(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"<|endoftext|>": SIZE}))
    assert load_tokenizer(path).eos_token_ids == {SIZE}


def test_a_list_of_tokens_in_hex_has_bytes_and_no_way_to_split_a_text(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps([token.hex() for token in tokens()]))
    assert open_tokenizer_file(tmp_path / "tokenizer.json").tokens() == tokens()
    with pytest.raises(DataError, match="does not say how a text is split"):
        read_vocabulary(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
@pytest.mark.parametrize("bytes_too", [False, True])
def test_sentencepieces_ids_are_those_of_its_library(tmp_path, algorithm, bytes_too):
    sentencepiece = pytest.importorskip("sentencepiece")
    with open(tmp_path / "mini.model", "wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT.strip(), "A dog's naïve cat is 12345 years old."] * 50),
            model_writer=out,
            vocab_size=310 if bytes_too else 50,
            hard_vocab_limit=algorithm == "bpe",
            model_type=algorithm,
            byte_fallback=bytes_too,
            minloglevel=2,
        )
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "mini.model"))
    read = read_vocabulary(tmp_path / "mini.model")
    for text in (*TEXTS, TEXT):
        assert list(read.encode(text)) == library.encode(text), text


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("name", ["llama3", "qwen", "cl100k_base", "o200k_base"])
def test_published_ranks_have_the_ids_of_tiktoken(name):
    tiktoken = pytest.importorskip("tiktoken")
    path = PUBLISHED / f"{name}.tiktoken.gz"
    ranks = {token: rank for rank, token in enumerate(open_tokenizer_file(path).tokens())}
    encoding = tiktoken.Encoding(name, pat_str=tiktoken_split_pattern(path), mergeable_ranks=ranks, special_tokens={})
    library = read_tokenizer_file(path)
    for text in (*TEXTS, Path(__file__).read_text()):
        composed = unicodedata.normalize("NFC", text) if name == "qwen" else text
        assert library.encode(text, add_special_tokens=False).ids == encoding.encode_ordinary(composed)


@needs_shared
@pytest.mark.parametrize("name", ["llama2", "mistral_v3"])
def test_published_models_have_the_ids_of_sentencepiece(name):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = PUBLISHED / f"{name}.model.gz"
    library = sentencepiece.SentencePieceProcessor(model_proto=gzip.decompress(path.read_bytes()))
    read = read_vocabulary(path)
    for text in (*TEXTS, "a <s> b</s>", Path(__file__).read_text()):
        assert list(read.encode(text)) == library.encode(text)
