"""Properties of AdaptBPE: the C encoder against its plain-Python twin, the swaps against theirs, and round trips."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.learn import adapt_merges, most_frequent_merges
from mlx_zip.vocab.adaptbpe.merge_list import NEVER, PIECES, BpeEncoder, MergeList, Schedule, cut_into_pieces
from support import adaptbpe_twin as twin
from support.adaptbpe_cases import keeping, lists_and_corpora, lists_and_swaps, merge_lists, words

share = st.floats(0, 0.6)
swap_settings = st.fixed_dictionaries(
    {
        "margin": st.integers(0, 3),
        "max_swaps": st.none() | st.integers(0, 4),
        "tie": st.sampled_from(["high", "low"]),
        "counting": st.sampled_from(["overlapping", "firing"]),
    }
)


def part_of(merges, fraction):
    return round(fraction * len(merges))


@given(lists_and_corpora, share, swap_settings)
def test_swaps_are_those_of_the_twin_that_counts_everything_anew(case, fraction, chosen):
    merges, corpus = case
    n = part_of(merges, fraction)
    found = adapt_merges(merges, corpus, n, **chosen)
    expected = twin.adapt(merges, list(corpus.items()), n, **chosen)
    assert [(s.p, s.p_count, s.q, s.q_count, s.n_tokens) for s in found.swaps] == expected


@given(lists_and_corpora, share, swap_settings, st.lists(words, max_size=6))
def test_every_rule_encodes_new_words_as_its_twin(case, fraction, chosen, new):
    merges, corpus = case
    n = part_of(merges, fraction)
    found = adapt_merges(merges, corpus, n, **chosen)
    kept = most_frequent_merges(merges, corpus, n)
    swaps, count = (n, found.virtual, found.promoted), len(merges)
    rules = [
        (Schedule.plain(count), lambda word: twin.encode(merges, word, range(count))),
        (Schedule.plain(count, n), lambda word: twin.encode(merges, word, range(n))),
        (Schedule.replay(count, *swaps), lambda word: twin.replay(merges, word, *swaps)),
        (Schedule.final(count, *swaps), lambda word: twin.final(merges, word, *swaps)),
        (keeping(count, kept), lambda word: twin.kept(merges, word, kept)),
    ]
    for schedule, expected in rules:
        encoder = BpeEncoder(merges, schedule, "whole")
        for word in [*new, *new, *corpus]:  # twice: the second time it has been seen
            assert encoder.encode(word).tolist() == expected(word)


@given(lists_and_swaps)
def test_any_lawful_swaps_are_replayed_as_by_the_twin(case):
    merges, *swaps, words = case
    rules = {twin.replay: Schedule.replay, twin.final: Schedule.final}
    for expected, form in rules.items():
        encoder = BpeEncoder(merges, form(len(merges), *swaps), "whole")
        assert [encoder.encode(word).tolist() for word in words] == [expected(merges, w, *swaps) for w in words]


@given(lists_and_corpora, share)
def test_replaying_the_swaps_gives_the_corpus_as_adapting_left_it(case, fraction):
    merges, corpus = case
    n = part_of(merges, fraction)
    found = adapt_merges(merges, corpus, n)
    encoder = BpeEncoder(merges, Schedule.replay(len(merges), n, found.virtual, found.promoted), "whole")
    if found.swaps:
        assert sum(len(encoder.encode(w)) * c for w, c in corpus.items()) == found.swaps[-1].n_tokens


@given(lists_and_corpora, share, st.lists(words, max_size=6))
def test_no_virtual_token_is_ever_emitted(case, fraction, new):
    merges, corpus = case
    n = part_of(merges, fraction)
    found = adapt_merges(merges, corpus, n)
    for form in (Schedule.replay, Schedule.final):
        encoder = BpeEncoder(merges, form(len(merges), n, found.virtual, found.promoted), "whole")
        emitted = {int(token) - 256 for word in [*new, *corpus] for token in encoder.encode(word)}
        assert emitted.isdisjoint(found.virtual)


@given(lists_and_corpora, share, st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_come_back_however_they_are_cut(case, fraction, data):
    merges, corpus = case
    n = part_of(merges, fraction)
    found = adapt_merges(merges, corpus, n)
    schedule = Schedule.replay(len(merges), n, found.virtual, found.promoted)
    for pieces in PIECES:
        encoder = BpeEncoder(merges, schedule, pieces)
        assert encoder.decode(encoder.encode(data)) == data
        assert b"".join(cut_into_pieces(data, pieces)) == data


@given(merge_lists, st.lists(words, max_size=8))
def test_pieces_cut_before_are_encoded_as_one_by_one(merges, cut_words):
    encoder = BpeEncoder(merges, None, "whole")
    tokens, ends = encoder.encode_pieces(cut_words)
    each = [encoder.encode(word).tolist() for word in cut_words]
    assert tokens.tolist() == [token for word in each for token in word]
    assert ends.tolist() == np.cumsum([len(word) for word in each]).tolist()


def test_a_long_piece_is_encoded_as_its_parts():
    merges = MergeList.from_byte_pairs([(b"a", b"a"), (b"aa", b"aa"), (b"aaaa", b"b")])
    encoder = BpeEncoder(merges, None, "whole")
    assert encoder.encode(b"aaaab" * 40_000).tolist() == [258] * 40_000


def test_more_pieces_than_are_remembered_are_encoded_all_the_same():
    merges = MergeList.from_byte_pairs([(b"1", b"2"), (b"12", b"3")])
    text = b" ".join(b"%d" % number for number in range(100_000, 300_000))
    kept, fresh = BpeEncoder(merges), BpeEncoder(merges)
    kept.encode(text)
    assert np.array_equal(kept.encode(text[-5000:]), fresh.encode(text[-5000:]))
    assert kept.decode(kept.encode(text)) == text


def test_threads_may_share_an_encoder():
    merges = MergeList.from_byte_pairs([(b"a", b"b"), (b"ab", b"c")])
    encoder, text, found = BpeEncoder(merges), b"abc ab c abc" * 2000, []
    expected = encoder.encode(text).tolist()
    threads = [threading.Thread(target=lambda: found.append(encoder.encode(text).tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([(b"a", b"b"), (b"bc", b"d")], "merge 1, b'bc' with b'd': b'bc' is not made before it"),
        ([(b"ab", b"c"), (b"a", b"b")], "merge 0, b'ab' with b'c': b'ab' is not made before it"),
        ([(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"a", b"bc")], "merge 3, b'a' with b'bc': merge 2 makes"),
    ],
)
def test_improper_lists_are_refused_with_the_merge_named(pairs, told):
    with pytest.raises(DataError) as error:
        MergeList.from_byte_pairs(pairs)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("parts", "told"),
    [([[97, 256]], "merge 0"), ([[97, 98], [97, 98]], "merge 1 makes b'ab', which merge 0 makes already")],
)
def test_improper_lists_of_tokens_are_refused_with_the_merge_named(parts, told):
    with pytest.raises(DataError, match=told):
        MergeList(np.array(parts, np.uint32))


def test_a_token_that_is_too_long_is_refused():
    doubled = [(b"a" * 2**i, b"a" * 2**i) for i in range(11)]
    with pytest.raises(DataError, match="merge 10 makes a token of more than 1024 bytes"):
        MergeList.from_byte_pairs(doubled)


@pytest.mark.parametrize(("apply_at", "split_at"), [([0, 0], [NEVER, NEVER]), ([0, 1], [1, NEVER]), ([9, 1], [4, 4])])
def test_times_that_contradict_each_other_are_refused(apply_at, split_at):
    merges = MergeList.from_byte_pairs([(b"a", b"b"), (b"b", b"c")])
    with pytest.raises(DataError, match="times of merges"):
        BpeEncoder(merges, Schedule(np.array(apply_at, np.uint32), np.array(split_at, np.uint32)))


@pytest.mark.parametrize(
    ("n", "chosen", "told"),
    [
        (3, {}, "3 merges to keep are not 0..2"),
        (-1, {}, "-1 merges"),
        (1, {"margin": -1}, "at least 0"),
        (1, {"max_swaps": -1}, "at least 0"),
        (1, {"tie": "x"}, "'x' is none of high, low"),
        (1, {"counting": "x"}, "none of overlapping, firing"),
    ],
)
def test_settings_out_of_range_are_refused(n, chosen, told):
    merges = MergeList.from_byte_pairs([(b"a", b"b"), (b"b", b"c")])
    with pytest.raises(DataError, match=told):
        adapt_merges(merges, {b"ab": 1}, n, **chosen)
