"""Tokenizers to adapt, from the files that they come in: their ids are the library's, what cannot be read is told."""

import base64
import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
from mlx_zip.vocab.adaptbpe.pieces import PATTERNS
from mlx_zip.vocab.first_stage import bytes_to_spelled
from support.adaptbpe_cases import (
    ADAPTBPE,
    FIXTURE,
    HEAD,
    TEXT,
    library_ids,
)
from support.places import GOLDEN_MODELS


@pytest.fixture(scope="module", params=["llama_transformer_tied_lora/base", "phi3_reslatent_mean_untied_v2"])
def both(request):
    """A tokenizer.json as we and as the library read it."""
    file = GOLDEN_MODELS / request.param / "tokenizer.json"
    return read_base_vocabulary(file), Tokenizer.from_file(str(file))


@given(text=st.text(max_size=60) | st.just(TEXT))
def test_a_tokenizer_json_is_read_to_the_ids_the_library_gives(both, text):
    ours, theirs = both
    assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_merges_may_be_pairs_or_strings_and_the_file_in_a_folder_or_compressed(source, write, tmp_path):
    assert isinstance(source["model"]["merges"][0], list)
    expected = read_base_vocabulary(FIXTURE)
    source["model"]["merges"] = [" ".join(pair) for pair in source["model"]["merges"]]
    path = write(source)
    (tmp_path / "tokenizer.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    for name in (path, tmp_path, tmp_path / "tokenizer.json.gz"):
        base = read_base_vocabulary(name)
        assert base.merges == expected.merges
        assert base.ids.tolist() == expected.ids.tolist()


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"normalized": True}, {"special": False}])
def test_added_tokens_are_found_as_the_library_finds_them(source, write, flags):
    source["added_tokens"][6] |= flags
    text = "one  <|end|>  two<|end|>three <|end|>"
    assert read_base_vocabulary(write(source)).encode(text).tolist() == library_ids(source, text)


def test_a_normalizer_and_a_pre_tokenizer_not_known_here_are_the_librarys(source, write):
    source["normalizer"] = {"type": "NFC"}
    source["pre_tokenizer"]["add_prefix_space"] = True
    base = read_base_vocabulary(write(source))
    assert base.splitter.pieces == "tokenizers"
    for text in ("cafe\u0301 12", TEXT, ""):
        assert base.encode(text).tolist() == library_ids(source, text)


@pytest.mark.parametrize("kind", ["cl100k", "digits"])
def test_known_patterns_are_cut_without_the_library_and_give_its_ids(source, write, kind):
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[kind]}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    base = read_base_vocabulary(write(source))
    assert base.splitter.pieces == kind
    assert base.encode(TEXT).tolist() == library_ids(source, TEXT)


def test_of_several_merges_that_make_one_token_the_one_that_fires_is_kept(source, write):
    model = source["model"]
    made = {left + right for left, right in model["merges"]}
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    tokens = [token for token in vocabulary if token in made]
    known = [token for token in vocabulary if len(token) == 1] + tokens
    rank = {token: i for i, token in enumerate(known)}
    ways = [
        [token[:i], token[i:]]
        for token in tokens
        for i in range(1, len(token))
        if rank.get(token[:i], len(rank)) < rank[token] and rank.get(token[i:], len(rank)) < rank[token]
    ]
    assert len(ways) > len(tokens)
    model["merges"] = ways
    base = read_base_vocabulary(write(source))
    assert len(base.merges) <= len(tokens)
    for text in (TEXT, *ADAPTBPE["gpt2"]["test_text"][:4000].split("\n")):
        assert base.encode(text).tolist() == library_ids(source, text)


def test_a_list_of_merges_has_gpt2s_order_of_ids_or_those_of_the_vocabulary_next_to_it(head, tmp_path):
    base = read_base_vocabulary(head)
    assert [base.ids[byte] for byte in (33, 126, 161, 255, 0, 32, 173)] == [0, 93, 94, 187, 188, 220, 255]
    assert base.ids[256:].tolist() == list(range(256, 256 + len(HEAD["merges"])))
    (tmp_path / "merges.txt").write_text("a b\n")
    names = {bytes_to_spelled(bytes([byte])): 300 - byte for byte in range(256)}
    (tmp_path / "vocab.json").write_text(json.dumps(names | {"ab": 7, "<|end|>": 9}))
    found = read_base_vocabulary(tmp_path / "merges.txt")
    assert found.encode("ab<|end|>b").tolist() == [7, 9, 300 - 98]


def test_tiktoken_ranks_are_read_to_the_ids_of_tiktoken(head, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    base = read_base_vocabulary(head)
    ranks = {token: int(i) for token, i in zip(base.merges.tokens, base.ids, strict=True)}
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (tmp_path / "some.tiktoken").write_bytes(lines)
    (tmp_path / "llama3.tiktoken").write_bytes(lines)
    with pytest.raises(DataError, match="choose one of gpt2, cl100k, digits with --pieces"):
        read_base_vocabulary(tmp_path / "some.tiktoken")
    for file, kind in (("some", "gpt2"), ("llama3", "cl100k")):
        encoding = tiktoken.Encoding(file, pat_str=PATTERNS[kind], mergeable_ranks=ranks, special_tokens={})
        got = read_base_vocabulary(tmp_path / f"{file}.tiktoken", kind if file == "some" else None)
        assert got.encode(ADAPTBPE["gpt2"]["test_text"]).tolist() == encoding.encode_ordinary(
            ADAPTBPE["gpt2"]["test_text"]
        )


def altered(source, **model):
    return {**source, "model": {**source["model"], **model}}


@pytest.mark.parametrize(
    ("alter", "told"),
    [
        (lambda s: {}, "is no tokenizer.json of a BPE model"),
        (lambda s: [], "is no tokenizer.json of a BPE model"),
        (lambda s: altered(s, end_of_word_suffix="</w>"), "end_of_word_suffix '</w>' is neither byte-level BPE nor"),
        (lambda s: s | {"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer is not byte-level"),
        (lambda s: altered(s, merges=[["zz", "y"]]), "merge 0, b'zz' with b'y': b'zz' is not made before it"),
        (lambda s: altered(s, merges=[["日", "y"]]), "is not two byte-level tokens"),
        (lambda s: altered(s, merges=["a b c"]), "merge 0 'a b c' is not two byte-level tokens"),
        (lambda s: altered(s, merges=[["~", "~"]]), "merged token b'~~' is not in the vocabulary"),
        (lambda s: altered(s, vocab={}), "byte b'.*' is not in the vocabulary"),
        (lambda s: altered(s, vocab={"a": -1}), "does not map tokens to ids"),
        (lambda s: altered(s, vocab={"a": 1, "b": 1}), "gives one id to several tokens"),
        (lambda s: s | {"added_tokens": [{"content": "x"}]}, "has no content or no id"),
        (lambda s: s | {"added_tokens": [{"content": "x", "id": 1, "single_word": True}]}, "single_word"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_names_file_and_fault(source, write, alter, told):
    path = write(alter(source))
    with pytest.raises(DataError, match=told) as error:
        read_base_vocabulary(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("tokenizer.json", "{", "tokenizer.json: "),
        ("x.tiktoken", "YQ== 0\n??? 1\n", "line 2 is not a token in base64 and its rank"),
        ("llama3.tiktoken", "YQ== 0\n", "lacks the byte 0"),
        ("merges.txt", "a b\nabc d\n", "merge 1, b'abc' with b'd'"),
    ],
)
def test_other_files_are_refused_likewise(write, name, data, told):
    path = write(data, name)
    with pytest.raises(DataError, match=told) as error:
        read_base_vocabulary(path, "gpt2" if name.startswith("x") else None)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.json cannot be read: No such file"):
        read_base_vocabulary(tmp_path / "nowhere.json")
