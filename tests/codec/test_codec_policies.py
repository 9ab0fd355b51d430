"""Codebooks whose entries leave a full table: who leaves, what an id means then, and what is refused."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from mlx_zip import Codebook, CodecError, CodecParams, compress
from mlx_zip.cli.compression import count_uses
from mlx_zip.codec.params import POLICIES
from support import codec_twin as twin

TURNS = [policy for policy in POLICIES if policy != "freeze"]
SAVED_BEFORE = (  # five ids of a codebook with a start entry, saved when there was one policy only
    "6d6c787a7a636200010000000a0000000400000003000000010000000000000001000000010000000000000002000000050000000600"
    "000005000000000000000500000006000000070000000b00000005000000d10f3a8c68609e90"
)


def opened(policy, size, *pushed, merge_size=3):
    book = Codebook(CodecParams(10, size, merge_size, policy=policy))
    return book, [list(book.push(ids)) for ids in pushed]


def recurring(length, seed=0):
    """Base ids below 50 with phrases that come again, others as time goes by."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, 50, 4) for _ in range(60)]
    drift = np.arange(length) * 40 // length
    return np.concatenate([phrases[drift[i] + rng.integers(0, 20)] for i in range(length)])[:length].astype(np.uint32)


# ---- who leaves


@pytest.mark.parametrize("policy", TURNS)
def test_the_oldest_leaves_where_nothing_was_used(policy):
    book, new = opened(policy, 2, [1, 2, 3], 4, 5)
    assert new == [[(10, (1, 2)), (11, (2, 3))], [(10, (3, 4))], [(11, (4, 5))]]
    assert list(book.entries) == [(10, (3, 4)), (11, (4, 5))]


@pytest.mark.parametrize(("policy", "last"), [("lru", (10, (1, 2, 3))), ("use-count", (11, (1, 2, 3)))])
def test_lru_takes_what_was_used_longest_ago_and_use_count_what_was_used_least(policy, last):
    _, new = opened(policy, 2, [1, 2], 10, 10, 3)
    assert new == [[(10, (1, 2))], [(11, (2, 1))], [(11, (1, 2, 1))], [last]]


def test_start_entries_never_leave():
    params = CodecParams(10, 3, 2, start=[(7, 8)], policy="lru")
    book = Codebook(params)
    book.push(range(10))
    assert list(book.entries) == [(10, (7, 8)), (11, (6, 7)), (12, (5, 6))]


def test_without_a_growing_slot_nothing_is_installed():
    book = Codebook(CodecParams(10, 1, 2, start=[(7, 8)], policy="lru"))
    assert list(book.push([1, 2, 10, 1, 2])) == []


@pytest.mark.parametrize("policy", TURNS)
def test_the_entry_that_is_being_read_does_not_leave(policy):
    book, new = opened(policy, 1, [1, 2], 10, 3, 4)
    assert new == [[(10, (1, 2))], [], [], [(10, (3, 4))]]
    assert book.base_ids().tolist() == [1, 2, 1, 2, 3, 4]


def test_freeze_is_what_it_was():
    ids = recurring(3000)
    params = CodecParams(50, 100, 3)
    assert params.policy == "freeze"
    assert len(Codebook(params).push(compress(params, ids)[0])) == 100


# ---- what an id means


def test_an_id_means_what_its_slot_held_when_it_was_read():
    book, _ = opened("lru", 2, [1, 2, 3, 10, 4, 5, 10])
    assert book.base_ids().tolist() == [1, 2, 3, 1, 2, 4, 5, *book.expand(10).tolist()]
    assert book.expand(10).tolist() != [1, 2]
    rows, lengths = book.logged_base_ids(3, 1)
    assert rows.tolist() == [[1, 2, 0]]
    assert lengths.tolist() == [2]
    with pytest.raises(CodecError, match="not all in the log"):
        book.logged_base_ids(3, 9)


def test_the_next_hypertoken_may_come_as_long_as_a_slot_is_free():
    book, new = opened("lru", 2, [1, 10])
    assert new == [[(10, (1, 1))]]
    with pytest.raises(CodecError, match="12"):
        book.push(12)


@pytest.mark.parametrize("policy", TURNS)
def test_until_the_table_is_full_ids_are_those_of_freeze(policy):
    ids = recurring(3000)
    params = CodecParams(50, 300, 3)
    frozen, turned = compress(params, ids)[0], compress(replace(params, policy=policy), ids)[0]
    full = int(Codebook(params).push(frozen).at[-1])
    assert turned[:full].tolist() == frozen[:full].tolist()
    assert len(turned) < len(frozen)  # for the phrases of the end are other ones


@pytest.mark.parametrize("policy", POLICIES)
def test_long_texts_agree_with_the_twin(policy):
    ids = recurring(2500, seed=1)
    params = CodecParams(50, 64, 4, [49], start=[(1, 2), (1, 2, 3)], policy=policy)
    emitted, entries = compress(params, ids)
    assert (emitted.tolist(), dict(entries)) == twin.compress(params, ids.tolist())
    book, follower = Codebook(params), twin.Codebook(params)
    new = book.push(emitted)
    assert [(*entry, at) for entry, at in zip(new, new.at.tolist(), strict=True)] == follower.push(emitted.tolist())
    assert book.base_ids().tolist() == ids.tolist()
    for mark in (len(emitted) // 2, 3, 0):
        book.rewind(mark), follower.rewind(mark)
        assert dict(book.entries) == follower.entries
    assert book.push(emitted).slots.tolist() == new.slots.tolist()


# ---- what is kept


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_saved_with_the_codebook(policy):
    params = CodecParams(50, 64, 3, policy=policy)
    book = Codebook(params)
    book.push(compress(params, recurring(500))[0])
    for loaded in (Codebook.from_bytes(book.to_bytes()), pickle.loads(pickle.dumps(book)), book.copy()):
        assert loaded.params.policy == policy
        assert loaded.entries == book.entries
        assert list(loaded.push([1, 2, 3])) == list(book.copy().push([1, 2, 3]))


def test_fingerprints_tell_policies_apart():
    assert len({CodecParams(50, 64, 3, policy=policy).fingerprint for policy in POLICIES}) == 3


def test_what_was_saved_before_there_were_policies_is_still_read_and_written():
    book = Codebook.from_bytes(bytes.fromhex(SAVED_BEFORE))
    assert book.params == CodecParams(10, 4, 3, (0,), 0, ((5, 6),))
    assert list(book.entries) == [(10, (5, 6)), (11, (5, 6, 7)), (12, (7, 5))]
    assert book.to_bytes().hex() == SAVED_BEFORE


@pytest.mark.parametrize("policy", ["LRU", "", None, 1])
def test_a_policy_that_is_none_is_refused(policy):
    with pytest.raises(CodecError, match="freeze, lru, use-count"):
        CodecParams(10, 2, 2, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_compress_command_counts_each_entry_under_the_base_ids_it_had(policy):
    ids = recurring(1000).tolist()
    uses, n_ids, n_entries = count_uses(CodecParams(50, 20, 3, policy=policy), ids, 400)
    hypertokens, inside = uses.total(), sum(len(entry) * n for entry, n in uses.items())
    assert n_ids - hypertokens + inside == len(ids) == 1000
    assert n_entries == 60 if policy == "freeze" else n_entries > 60
