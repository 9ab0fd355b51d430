"""The adapted tokenizer and its own file; a tokenizer.json where it can say the same."""

import json
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.adapted import adapt_vocabulary, count_words, read_adapted_vocabulary
from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
from mlx_zip.vocab.adaptbpe.pieces import PieceSplitter
from mlx_zip.vocab.adaptbpe.tokenizer_json import exact_tokenizer_json, kept_ids_tokenizer_json
from mlx_zip.vocab.first_stage import AddedToken, spelled_to_bytes
from support.adaptbpe_cases import (
    ADAPTBPE,
    FIXTURE,
    TEXT,
    library,
    library_ids,
)


def cut_down(base, n=300, **options):
    words = count_words(base.splitter, [ADAPTBPE["gpt2"]["train_text"][:12000]])
    return adapt_vocabulary(base, words, n, **options)


WAYS = [("adapt", "replay"), ("adapt", "final"), ("first-k", "replay"), ("top-k", "final")]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def vocabulary(request, head):
    return cut_down(read_base_vocabulary(head), method=request.param[0], rule=request.param[1])


def test_it_keeps_the_bytes_and_n_merges_under_rising_ids(vocabulary, head):
    base = read_base_vocabulary(head)
    assert len(vocabulary) == 256 + 300
    assert np.all(np.diff(vocabulary.ids.astype(np.int64)) > 0)
    assert set(base.ids[:256].tolist()) < set(vocabulary.ids.tolist()) < set(base.ids.tolist())


@given(data=st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_any_bytes_come_back(vocabulary, data):
    tokens = vocabulary.encoder.encode(data)
    assert vocabulary.decode(vocabulary.adapted_ids_of(vocabulary.token_ids[tokens])) == data


def test_a_saved_one_reads_to_an_equal_one(vocabulary, tmp_path, head):
    vocabulary.save(tmp_path / "adapted.json")
    read, text = read_adapted_vocabulary(tmp_path / "adapted.json"), ADAPTBPE["gpt2"]["test_text"]
    assert read.encode(text).tolist() == vocabulary.encode(text).tolist()
    assert (read.rule, read.method, read.settings, read.virtual) == (
        vocabulary.rule,
        vocabulary.method,
        vocabulary.settings,
        vocabulary.virtual,
    )
    read.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "adapted.json").read_bytes()
    read.check_base(read_base_vocabulary(head))
    with pytest.raises(DataError, match="whose merges differ"):
        read.check_base(read_base_vocabulary(FIXTURE))


def test_base_ids_translate_there_and_back(vocabulary):
    ids = vocabulary.encode(ADAPTBPE["gpt2"]["test_text"])
    assert vocabulary.adapted_ids_of(vocabulary.ids[ids]).tolist() == ids.tolist()
    lost = int(np.setdiff1d(np.arange(vocabulary.base_ids), vocabulary.ids)[0])
    with pytest.raises(DataError, match=f"base id {lost} is not in the adapted vocabulary"):
        vocabulary.adapted_ids_of([lost])
    with pytest.raises(DataError, match=f"id {len(vocabulary)} is not below {len(vocabulary)}"):
        vocabulary.decode([len(vocabulary)])


def test_an_adapted_file_next_to_its_own_base_does_not_matter(source, write, tmp_path):
    base = read_base_vocabulary(write(source))
    kept = cut_down(base, 90)
    assert kept.virtual
    kept.save(tmp_path / "adapted.json")
    assert read_base_vocabulary(tmp_path).merges == base.merges


def test_added_tokens_stay_and_are_found():
    kept = cut_down(read_base_vocabulary(FIXTURE), 100)
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
    base = read_base_vocabulary(file or head)
    kept = cut_down(base, 90, method="first-k")
    plain = library(exact_tokenizer_json(kept, base.source))
    for text in (TEXT, ADAPTBPE["gpt2"]["test_text"], "", "\n"):
        ids = plain.encode(text, add_special_tokens=False).ids
        assert ids == kept.encode(text).tolist()
        assert plain.decode(ids, skip_special_tokens=False) == text
    assert max(plain.get_vocab().values()) == len(kept) - 1


def test_the_special_tokens_that_a_tokenizer_json_adds_have_their_new_ids(source, write):
    bos = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}
    source["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [511], "tokens": ["<|pad|>"]}},
    }
    source["added_tokens"][2]["id"] = 511
    merged = next(token for token, i in source["model"]["vocab"].items() if i == 511)
    source["model"]["vocab"] |= {"<|pad|>": 511, merged: 2}
    base = read_base_vocabulary(write(source))
    kept = cut_down(base, 50, method="first-k")
    assert (
        library(exact_tokenizer_json(kept, base.source)).encode("a").ids[0] == int(kept.adapted_ids_of([511])[0]) < 511
    )


def test_padding_has_its_new_id_and_ids_that_are_lost_are_refused(source):
    kept = cut_down(read_base_vocabulary(FIXTURE), 50)
    lost = next(i for i in range(512) if i not in kept.ids.tolist())
    last = int(kept.ids[-1])
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0}
    made = kept_ids_tokenizer_json(kept, source | {"padding": padding | {"pad_id": last, "pad_token": "<|pad|>"}})
    assert made["padding"]["pad_id"] == len(kept) - 1 < last
    with pytest.raises(DataError, match=rf"tokenizer\.json: padding names id {lost}, which the vocabulary"):
        kept_ids_tokenizer_json(kept, source | {"padding": padding | {"pad_id": lost}})
    steps = {"type": "Sequence", "processors": [{"type": "RobertaProcessing", "sep": ["x", lost], "cls": ["y", 0]}]}
    with pytest.raises(DataError, match=rf"tokenizer\.json: post_processor names id {lost}"):
        kept_ids_tokenizer_json(kept, source | {"post_processor": steps})


def test_a_tokenizer_json_need_not_have_added_tokens(source, write):
    del source["added_tokens"]
    base = read_base_vocabulary(write(source))
    kept = cut_down(base, 50, method="first-k")
    assert library_ids(exact_tokenizer_json(kept, base.source), "the cat") == kept.encode("the cat").tolist()


def test_virtual_merges_cannot_be_said_in_a_tokenizer_json(head):
    with pytest.raises(DataError, match=r"merges are virtual, which a tokenizer\.json cannot express"):
        exact_tokenizer_json(cut_down(read_base_vocabulary(head)))


def signed(record):
    """The record with the checksum that belongs to it."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return rest | {"sha256": sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()}


def test_a_file_that_was_changed_after_writing_is_refused(head, tmp_path):
    path = tmp_path / "adapted.json"
    cut_down(read_base_vocabulary(head)).save(path)
    record = json.loads(path.read_text())
    assert signed(record) == record
    for changed in (record | {"rule": "final"}, record | {"settings": {}}, record | {"sha256": "0" * 64}):
        path.write_text(json.dumps(changed))
        with pytest.raises(DataError, match=r"adapted\.json: is damaged, its checksum does not match"):
            read_adapted_vocabulary(path)
    del record["sha256"]
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match="'sha256' is missing"):
        read_adapted_vocabulary(path)


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
    cut_down(read_base_vocabulary(head)).save(path)
    path.write_text(json.dumps(signed(json.loads(path.read_text()) | change)))
    with pytest.raises(DataError, match=told) as error:
        read_adapted_vocabulary(path)
    assert str(error.value).startswith(str(path))


def test_a_swap_before_its_merge_is_there_is_refused(head, tmp_path):
    path = tmp_path / "adapted.json"
    cut_down(read_base_vocabulary(head)).save(path)
    record = json.loads(path.read_text())
    record["virtual"][0] = record["first"]
    path.write_text(json.dumps(signed(record)))
    with pytest.raises(DataError, match="virtual 0 is merge 300, which does not exist yet at that swap"):
        read_adapted_vocabulary(path)


def test_unknown_methods_and_fronts_are_refused(head):
    with pytest.raises(DataError, match="method 'x' is none of adapt, first-k, top-k"):
        cut_down(read_base_vocabulary(head), method="x")
    with pytest.raises(DataError, match="pieces 'x' is none of"):
        PieceSplitter("x")


def test_of_added_tokens_the_longest_is_found():
    splitter = PieceSplitter("gpt2", (AddedToken("<a>", 1), AddedToken("<a><b>", 2), AddedToken("<b>", 3)))
    assert list(splitter.normalized_parts("x<a><b><b><a>y")) == [b"x", 2, 3, 1, b"y"]
    assert spelled_to_bytes("Ġx") == b" x"
