"""Tokenizers to adapt, as files; the adapted tokenizer's own file; a tokenizer.json where it can say the same."""

import base64
import gzip
import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from adaptbpe_cases import GOLDEN, HEAD
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.adapted import adapted, read_adapted, words_of
from mlx_zip.vocab.adaptbpe.base import read_base
from mlx_zip.vocab.adaptbpe.plain import lawful_json, tokenizer_json
from mlx_zip.vocab.adaptbpe.text import PATTERNS, Front
from mlx_zip.vocab.first_stage import AddedToken, to_bytes, to_text

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

MODELS = Path(__file__).parent / "golden" / "models"
FIXTURE = MODELS / "llama_transformer_tied_lora" / "base" / "tokenizer.json"
TEXT = "<|user|>the cat sat on the mat, the cat<|end|><|bos|> it's 12345 café 日本 \n\n x"


@pytest.fixture
def source():
    """A byte-level tokenizer.json, to be altered."""
    return json.loads(FIXTURE.read_text())


@pytest.fixture
def write(tmp_path):
    def file(data, name="tokenizer.json"):
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return file


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """The first merges of GPT-2's list, as the file that such lists come in."""
    path = tmp_path_factory.mktemp("head") / "vocab.bpe"
    path.write_text("#version: 0.2\n" + "\n".join(HEAD["merges"]) + "\n")
    return path


def library(data):
    return Tokenizer.from_str(json.dumps(data))


def library_ids(data, text):
    return library(data).encode(text, add_special_tokens=False).ids


# ---- reading


@pytest.fixture(scope="module", params=["llama_transformer_tied_lora/base", "phi3_reslatent_mean_untied_v2"])
def both(request):
    """A tokenizer.json as we and as the library read it."""
    file = MODELS / request.param / "tokenizer.json"
    return read_base(file), Tokenizer.from_file(str(file))


@given(text=st.text(max_size=60) | st.just(TEXT))
def test_a_tokenizer_json_is_read_to_the_ids_the_library_gives(both, text):
    ours, theirs = both
    assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_merges_may_be_pairs_or_strings_and_the_file_in_a_folder_or_compressed(source, write, tmp_path):
    assert isinstance(source["model"]["merges"][0], list)
    expected = read_base(FIXTURE)
    source["model"]["merges"] = [" ".join(pair) for pair in source["model"]["merges"]]
    path = write(source)
    (tmp_path / "tokenizer.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    for name in (path, tmp_path, tmp_path / "tokenizer.json.gz"):
        base = read_base(name)
        assert base.merges == expected.merges
        assert base.ids.tolist() == expected.ids.tolist()


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"normalized": True}, {"special": False}])
def test_added_tokens_are_found_as_the_library_finds_them(source, write, flags):
    source["added_tokens"][6] |= flags
    text = "one  <|end|>  two<|end|>three <|end|>"
    assert read_base(write(source)).encode(text).tolist() == library_ids(source, text)


def test_a_normalizer_and_a_pre_tokenizer_not_known_here_are_the_librarys(source, write):
    source["normalizer"] = {"type": "NFC"}
    source["pre_tokenizer"]["add_prefix_space"] = True
    base = read_base(write(source))
    assert base.front.pieces == "tokenizers"
    for text in ("cafe\u0301 12", TEXT, ""):
        assert base.encode(text).tolist() == library_ids(source, text)


@pytest.mark.parametrize("kind", ["cl100k", "digits"])
def test_known_patterns_are_cut_without_the_library_and_give_its_ids(source, write, kind):
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[kind]}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    base = read_base(write(source))
    assert base.front.pieces == kind
    assert base.encode(TEXT).tolist() == library_ids(source, TEXT)


def test_of_several_merges_that_make_one_token_the_one_that_fires_is_kept(source, write):
    model = source["model"]
    made = {left + right for left, right in model["merges"]}
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    tokens = [token for token in vocabulary if token in made]
    known = [token for token in vocabulary if len(token) == 1] + tokens
    rank = {token: i for i, token in enumerate(known)}
    ways = [
        [token[:i], token[i:]] for token in tokens for i in range(1, len(token))
        if rank.get(token[:i], len(rank)) < rank[token] and rank.get(token[i:], len(rank)) < rank[token]
    ]  # fmt: skip
    assert len(ways) > len(tokens)
    model["merges"] = ways
    base = read_base(write(source))
    assert len(base.merges) <= len(tokens)
    for text in (TEXT, *GOLDEN["gpt2"]["test_text"][:4000].split("\n")):
        assert base.encode(text).tolist() == library_ids(source, text)


def test_a_list_of_merges_has_gpt2s_order_of_ids_or_those_of_the_vocabulary_beside_it(head, tmp_path):
    base = read_base(head)
    assert [base.ids[byte] for byte in (33, 126, 161, 255, 0, 32, 173)] == [0, 93, 94, 187, 188, 220, 255]
    assert base.ids[256:].tolist() == list(range(256, 256 + len(HEAD["merges"])))
    (tmp_path / "merges.txt").write_text("a b\n")
    names = {to_text(bytes([byte])): 300 - byte for byte in range(256)}
    (tmp_path / "vocab.json").write_text(json.dumps(names | {"ab": 7, "<|end|>": 9}))
    beside = read_base(tmp_path / "merges.txt")
    assert beside.encode("ab<|end|>b").tolist() == [7, 9, 300 - 98]


def test_tiktoken_ranks_are_read_to_the_ids_of_tiktoken(head, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    base = read_base(head)
    ranks = {token: int(i) for token, i in zip(base.merges.tokens, base.ids, strict=True)}
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (tmp_path / "some.tiktoken").write_bytes(lines)
    (tmp_path / "llama3.tiktoken").write_bytes(lines)
    with pytest.raises(DataError, match="name one of gpt2, cl100k, digits with --pieces"):
        read_base(tmp_path / "some.tiktoken")
    for file, kind in (("some", "gpt2"), ("llama3", "cl100k")):
        encoding = tiktoken.Encoding(file, pat_str=PATTERNS[kind], mergeable_ranks=ranks, special_tokens={})
        got = read_base(tmp_path / f"{file}.tiktoken", kind if file == "some" else None)
        assert got.encode(GOLDEN["gpt2"]["test_text"]).tolist() == encoding.encode_ordinary(GOLDEN["gpt2"]["test_text"])


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
        (lambda s: s | {"added_tokens": [{"content": "x", "id": 1, "single_word": True}]}, "single words"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_names_file_and_fault(source, write, alter, told):
    path = write(alter(source))
    with pytest.raises(DataError, match=told) as error:
        read_base(path)
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
        read_base(path, "gpt2" if name.startswith("x") else None)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.json cannot be read: No such file"):
        read_base(tmp_path / "nowhere.json")


# ---- the adapted tokenizer


def cut_down(base, n=300, **options):
    words = words_of(base.front, [GOLDEN["gpt2"]["train_text"][:12000]])
    return adapted(base, words, n, **options)


WAYS = [("adapt", "replay"), ("adapt", "final"), ("first-k", "replay"), ("top-k", "final")]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def vocabulary(request, head):
    return cut_down(read_base(head), method=request.param[0], rule=request.param[1])


def test_it_keeps_the_bytes_and_n_merges_under_rising_ids(vocabulary, head):
    base = read_base(head)
    assert len(vocabulary) == 256 + 300
    assert np.all(np.diff(vocabulary.ids.astype(np.int64)) > 0)
    assert set(base.ids[:256].tolist()) < set(vocabulary.ids.tolist()) < set(base.ids.tolist())


@given(data=st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_any_bytes_come_back(vocabulary, data):
    assert vocabulary.decode(vocabulary.encode_bytes(data)) == data


def test_a_saved_one_reads_to_an_equal_one(vocabulary, tmp_path, head):
    vocabulary.save(tmp_path / "adapted.json")
    read, text = read_adapted(tmp_path / "adapted.json"), GOLDEN["gpt2"]["test_text"]
    assert read.encode(text).tolist() == vocabulary.encode(text).tolist()
    assert (read.rule, read.method, read.settings, read.virtual) == (
        vocabulary.rule, vocabulary.method, vocabulary.settings, vocabulary.virtual,
    )  # fmt: skip
    read.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "adapted.json").read_bytes()
    read.check_base(read_base(head))
    with pytest.raises(DataError, match="whose merges differ"):
        read.check_base(read_base(FIXTURE))


def test_base_ids_translate_there_and_back(vocabulary):
    ids = vocabulary.encode(GOLDEN["gpt2"]["test_text"])
    assert vocabulary.ids_of(vocabulary.ids[ids]).tolist() == ids.tolist()
    lost = int(np.setdiff1d(np.arange(vocabulary.base_ids), vocabulary.ids)[0])
    with pytest.raises(DataError, match=f"base id {lost} is not in the adapted vocabulary"):
        vocabulary.ids_of([lost])
    with pytest.raises(DataError, match=f"id {len(vocabulary)} is not below {len(vocabulary)}"):
        vocabulary.decode([len(vocabulary)])


def test_an_adapted_file_beside_its_own_base_does_not_matter(source, write, tmp_path):
    base = read_base(write(source))
    kept = cut_down(base, 90)
    assert kept.virtual
    kept.save(tmp_path / "adapted.json")
    assert read_base(tmp_path).merges == base.merges


def test_added_tokens_stay_and_are_found():
    kept = cut_down(read_base(FIXTURE), 100)
    assert len(kept) == 256 + 100 + 7
    ids = kept.encode(TEXT)
    assert kept.ids[ids[0]] == 3
    assert kept.decode(ids) == TEXT.encode()
    assert 6 in kept.ids[ids].tolist()


def test_a_lone_surrogate_is_refused(vocabulary):
    with pytest.raises(DataError, match="lone surrogate at character 1"):
        vocabulary.encode("a\ud800")


@pytest.mark.parametrize("file", [FIXTURE, None])
def test_a_tokenizer_json_without_virtual_merges_gives_the_same_ids(file, head):
    base = read_base(file or head)
    kept = cut_down(base, 90, method="first-k")
    plain = library(tokenizer_json(kept, base.source))
    for text in (TEXT, GOLDEN["gpt2"]["test_text"], "", "\n"):
        ids = plain.encode(text, add_special_tokens=False).ids
        assert ids == kept.encode(text).tolist()
        assert plain.decode(ids, skip_special_tokens=False) == text
    assert max(plain.get_vocab().values()) == len(kept) - 1


def test_the_special_tokens_that_a_tokenizer_json_adds_have_their_new_ids(source, write):
    bos = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}
    source["post_processor"] = {
        "type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [511], "tokens": ["<|pad|>"]}},
    }  # fmt: skip
    source["added_tokens"][2]["id"] = 511
    merged = next(token for token, i in source["model"]["vocab"].items() if i == 511)
    source["model"]["vocab"] |= {"<|pad|>": 511, merged: 2}
    base = read_base(write(source))
    kept = cut_down(base, 50, method="first-k")
    assert library(tokenizer_json(kept, base.source)).encode("a").ids[0] == int(kept.ids_of([511])[0]) < 511


def test_padding_has_its_new_id_and_ids_that_are_lost_are_refused(source):
    kept = cut_down(read_base(FIXTURE), 50)
    lost = next(i for i in range(512) if i not in kept.ids.tolist())
    last = int(kept.ids[-1])
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0}
    made = lawful_json(kept, source | {"padding": padding | {"pad_id": last, "pad_token": "<|pad|>"}})
    assert made["padding"]["pad_id"] == len(kept) - 1 < last
    with pytest.raises(DataError, match=rf"tokenizer\.json: padding names id {lost}, which the vocabulary"):
        lawful_json(kept, source | {"padding": padding | {"pad_id": lost}})
    steps = {"type": "Sequence", "processors": [{"type": "RobertaProcessing", "sep": ["x", lost], "cls": ["y", 0]}]}
    with pytest.raises(DataError, match=rf"tokenizer\.json: post_processor names id {lost}"):
        lawful_json(kept, source | {"post_processor": steps})


def test_a_tokenizer_json_need_not_have_added_tokens(source, write):
    del source["added_tokens"]
    base = read_base(write(source))
    kept = cut_down(base, 50, method="first-k")
    assert library_ids(tokenizer_json(kept, base.source), "the cat") == kept.encode("the cat").tolist()


def test_virtual_merges_cannot_be_said_in_a_tokenizer_json(head):
    with pytest.raises(DataError, match=r"merges are virtual, which a tokenizer\.json cannot say"):
        tokenizer_json(cut_down(read_base(head)))


def signed(record):
    """The record with the checksum that belongs to it."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return rest | {"sha256": sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()}


def test_a_file_that_was_changed_after_writing_is_refused(head, tmp_path):
    path = tmp_path / "adapted.json"
    cut_down(read_base(head)).save(path)
    record = json.loads(path.read_text())
    assert signed(record) == record
    for changed in (record | {"rule": "final"}, record | {"settings": {}}, record | {"sha256": "0" * 64}):
        path.write_text(json.dumps(changed))
        with pytest.raises(DataError, match=r"adapted\.json: is damaged, its checksum is another"):
            read_adapted(path)
    del record["sha256"]
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match="'sha256' is missing"):
        read_adapted(path)


TOKEN = {"content": "x", "id": 9, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
FRONT = {"pieces": "gpt2", "normalizer": None, "pre_tokenizer": None}
BASE = {"name": "x", "fingerprint": "x", "merges": 1, "ids": 1}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "x"}, "is no adapted vocabulary"),
        ({"version": 2}, "version 2 is not 1"),
        ({"rule": "x"}, "rule 'x' is none of replay, final"),
        ({"first": 9999}, "first 9999 is not 0.."),
        ({"first": None}, "first is None, not of the type int"),
        ({"first": True}, "first is True, not of the type int"),
        ({"method": 1}, "method is 1, not of the type str"),
        ({"settings": []}, r"settings is \[\], not of the type dict"),
        ({"base": BASE | {"name": 5}}, "base.name is 5, not of the type str"),
        ({"base": BASE | {"ids": "9"}}, "base.ids is '9', not of the type int"),
        ({"front": FRONT | {"added": [TOKEN | {"id": "9"}]}}, "added token 'x' with id '9' has a field"),
        ({"front": FRONT | {"added": [TOKEN | {"lstrip": 1}]}}, "added token 'x' with id 9 has a field"),
        ({"front": FRONT | {"added": [TOKEN | {"content": ""}]}}, "added token '', id 9, is empty"),
        ({"virtual": [0, 0]}, "different places"),
        ({"virtual": [10**9]}, "different places"),
        ({"virtual": ["x"]}, "different places"),
        ({"virtual": 5}, "virtual is 5, not of the type list"),
        ({"virtual": []}, "needs a promoted merge for each virtual one"),
        ({"merges": ["zz y"]}, "merge 0, b'zz' with b'y'"),
        ({"merges": ["日 y"]}, "merge 0 '日 y' is not two byte-level tokens"),
        ({"ranks": [1]}, "ranks"),
        ({"token_ids": [0] * 700}, "token_ids"),
        ({"ids": [1, 2]}, "ids are not those of the bytes"),
        ({"front": {}}, "'added' is missing"),
        ({"base": {}}, "'name' is missing"),
    ],
)
def test_a_damaged_file_is_refused_by_name(change, told, head, tmp_path):
    path = tmp_path / "adapted.json"
    cut_down(read_base(head)).save(path)
    path.write_text(json.dumps(signed(json.loads(path.read_text()) | change)))
    with pytest.raises(DataError, match=told) as error:
        read_adapted(path)
    assert str(error.value).startswith(str(path))


def test_a_swap_before_its_merge_is_there_is_refused(head, tmp_path):
    path = tmp_path / "adapted.json"
    cut_down(read_base(head)).save(path)
    record = json.loads(path.read_text())
    record["virtual"][0] = record["first"]
    path.write_text(json.dumps(signed(record)))
    with pytest.raises(DataError, match="virtual 0 is merge 300, which is not there yet at that swap"):
        read_adapted(path)


def test_unknown_methods_and_fronts_are_refused(head):
    with pytest.raises(DataError, match="method 'x' is none of adapt, first-k, top-k"):
        cut_down(read_base(head), method="x")
    with pytest.raises(DataError, match="pieces 'x' is none of"):
        Front("x")


def test_of_added_tokens_the_longest_is_found():
    front = Front("gpt2", (AddedToken("<a>", 1), AddedToken("<a><b>", 2), AddedToken("<b>", 3)))
    assert list(front.parts("x<a><b><b><a>y")) == [b"x", 2, 3, 1, b"y"]
    assert list(front.parts("x<a>", with_added=False)) == [b"x<a>"]
    assert to_bytes("Ġx") == b" x"
