"""Dictionaries of phrases: what cannot be is refused in words, and nothing is learnt from it."""

import numpy as np
import pytest

from mlx_zip.errors import CodecError
from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Tokens, count_leading_samples, prune, rewrite_ids
from support.multitok_cases import state, trained


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"window": -1}, "window"),
        ({"window": True}, "window"),
        ({"first_id": 1 << 32}, "first_id"),
        ({"limit": -1}, "limit"),
        ({"unk_id": 6}, "unk_id"),
        ({"units": Tokens(0)}, "0 units"),
    ],
)
def test_settings_out_of_range_are_named(fields, culprit):
    with pytest.raises(CodecError, match=culprit):
        Settings(**{"units": Tokens(5), **fields})


def test_a_unit_that_is_none_is_named_and_nothing_is_learnt():
    dictionary, _ = trained(Settings(Tokens(3)), [[0, 1, 0, 1]])
    before = state(dictionary), str(dictionary.totals)
    with pytest.raises(CodecError, match="unit 3 at index 2 is not below 3"):
        dictionary.train(Samples.from_sequences([[0, 1], [3]]))
    with pytest.raises(CodecError, match="unit 7 at index 1"):
        dictionary.encode([0, 7])
    assert (state(dictionary), str(dictionary.totals)) == before


def test_an_id_that_is_none_is_named():
    dictionary, _ = trained(Settings(Tokens(3), first_id=10), [[0, 1, 0, 1]])
    with pytest.raises(CodecError, match="id 9 at index 1"):
        dictionary.expand([10, 9])
    with pytest.raises(CodecError, match="id 15 at index 0"):
        dictionary.expand([15])
    gone = prune(dictionary, 9, "single")
    with pytest.raises(CodecError, match="id 13 at index 0"):
        gone.expand([13])


def test_what_cannot_be_asked_is_refused():
    dictionary, ids = trained(Settings(Tokens(3)), [[0, 1, 0, 1]])
    pruned = prune(dictionary)
    with pytest.raises(CodecError, match="cannot learn"):
        pruned.train(ids)
    with pytest.raises(CodecError, match="mode must be one of"):
        prune(dictionary, 1, "all")
    with pytest.raises(CodecError, match="at_most"):
        prune(dictionary, -1)
    with pytest.raises(CodecError, match="matching"):
        dictionary.encode([0], matching="best")
    with pytest.raises(CodecError, match="window"):
        dictionary.encode([0], window=-1)
    with pytest.raises(CodecError, match="pruned one"):
        rewrite_ids(dictionary, dictionary, ids)
    with pytest.raises(CodecError, match=r"0\.\.100"):
        count_leading_samples(5, 101)


@pytest.mark.parametrize(
    ("rows", "ids"),
    [
        ([[5, 0]], None),  # a prefix that comes later
        ([[0, 5]], None),  # a last unit that is none
        ([[0, 1], [0, 1]], None),  # twice the same
        ([[0, 1], [0, 2]], [9, 9]),  # ids that do not rise
        ([[0, 1]], [2]),  # a unit's id
    ],
)
def test_rows_that_are_no_phrases_are_refused(rows, ids):
    ids = None if ids is None else np.array(ids, np.uint32)
    with pytest.raises(CodecError, match="phrase"):
        Dictionary.from_arrays(Settings(Tokens(5), first_id=0), np.array(rows, np.uint32), ids)


@pytest.mark.parametrize(("name", "shape"), [("rows", (2, 3)), ("ids", (1,)), ("uses", (2,)), ("uses", (7, 1))])
def test_arrays_that_are_not_of_the_phrases_shapes_are_refused(name, shape):
    arrays = {"rows": np.array([[0, 1], [0, 2]], np.uint32), name: np.zeros(shape, np.uint32)}
    with pytest.raises(CodecError, match=f"^{name} of 2 phrases must be"):
        Dictionary.from_arrays(Settings(Tokens(5)), **arrays)
