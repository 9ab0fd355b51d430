"""Dictionaries of phrases as files: what was saved comes back, what is damaged is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.errors import DataError
from mlx_zip.vocab.multitok import PRUNINGS, Dictionary, Samples, Settings, Tokens, Words, prune
from support.multitok_cases import DRAWS, corpora, state, trained


@given(corpora(), st.sampled_from([None, *PRUNINGS]))
def test_a_saved_dictionary_loads_to_an_equal_one(tmp_path_factory, corpus, mode):
    path = tmp_path_factory.mktemp("saved") / "a.mtok"
    dictionary, _ = trained(*corpus)
    if mode:
        dictionary = prune(dictionary, 1, mode)
    dictionary.save(path)
    loaded = Dictionary.load(path)
    assert state(loaded) == state(dictionary)
    assert (loaded.settings, loaded.totals, loaded.pruning) == (
        dictionary.settings,
        dictionary.totals,
        dictionary.pruning,
    )


@given(corpora(), DRAWS)
def test_a_loaded_dictionary_learns_on_as_the_saved_one(tmp_path_factory, corpus, draws):
    path = tmp_path_factory.mktemp("saved") / "a.mtok"
    dictionary, _ = trained(*corpus)
    dictionary.save(path)
    loaded, more = Dictionary.load(path), Samples.from_sequences([[x % corpus[0].units.size for x in s] for s in draws])
    assert loaded.train(more).to_lists() == dictionary.train(more).to_lists()
    assert state(loaded) == state(dictionary)


@pytest.fixture
def saved(tmp_path):
    dictionary = Dictionary(Settings(Words(("a", "b", "ü\ud800")), window=3, first_id=0, limit=50))
    dictionary.train(dictionary.number_units([list("ababab"), ["b", "a"]]))
    dictionary.save(tmp_path / "some.mtok")
    return tmp_path / "some.mtok"


def test_the_first_line_of_a_file_says_what_it_is(saved):
    header = json.loads(saved.read_bytes().split(b"\n")[0])
    assert (header["format"], header["version"]) == ("mlx_zip multitok dictionary", 1)
    assert header["units"]["words"] == ["a", "b", "ü\ud800"]
    assert Dictionary.load(saved).settings.units == Words(("a", "b", "ü\ud800"))


def test_a_file_with_any_byte_changed_is_refused(saved):
    data = saved.read_bytes()
    for at in range(0, len(data), 7):
        saved.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(DataError, match=r"some\.mtok"):
            Dictionary.load(saved)


def test_a_torn_missing_foreign_or_newer_file_is_refused(saved, tmp_path):
    data = saved.read_bytes()
    for wrong in (b"", data[:40], data[:-4], data + bytes(4), b"[]\n", b"\xff\n"):
        saved.write_bytes(wrong)
        with pytest.raises(DataError, match=r"some\.mtok"):
            Dictionary.load(saved)
    saved.write_bytes(data.replace(b'"version": 1', b'"version": 3'))
    with pytest.raises(DataError, match=r"some\.mtok has version 3, this mlx_zip reads 1, 2"):
        Dictionary.load(saved)
    with pytest.raises(DataError, match=r"none\.mtok"):
        Dictionary.load(tmp_path / "none.mtok")


def test_a_file_whose_checksum_is_right_but_whose_content_is_not_is_refused(saved):
    from mlx_zip.vocab.multitok.dictionary import _dictionary_sha256

    line, _, body = saved.read_bytes().partition(b"\n")
    changes = [
        {"runs": 1000},
        {"runs": True},
        {"units": {"kind": "words", "words": ["a", "a", "b"]}},
        {"units": 5},
        {"units": {"kind": "tokens", "size": 0, "fingerprint": ""}},
        {"settings": {}},
        {"totals": {}},
        {"pruning": {"at_most": 1, "mode": "other"}},
        {"pruning": {"at_most": 1}, "units": None},
        {"settings": {"window": "3", "first_id": 0, "limit": 50, "unk_id": None}},
    ]
    wrong = [(change, r"some\.mtok") for change in changes]
    wrong.append(({"version": 2}, r"some\.mtok: version 2 is not that of a dictionary of words: train it again"))
    for change, reason in wrong:
        header = {**json.loads(line), **change}
        header.pop("sha256")
        header["sha256"] = _dictionary_sha256(header, body)
        saved.write_bytes(json.dumps(header).encode() + b"\n" + body)
        with pytest.raises(DataError, match=reason):
            Dictionary.load(saved)


def test_a_dictionary_that_cannot_be_written_leaves_the_old_one(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr("mlx_zip.vocab.multitok.dictionary.json.dumps", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Dictionary(Settings(Tokens(5))).save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["some.mtok"]
