"""Dictionaries of phrases: the C library against its plain-Python twin, and what a user may rely on."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.bench.papers.multitok.phrase_rates import growth_bound
from mlx_zip.errors import CodecError
from mlx_zip.vocab.multitok import (
    PRUNINGS,
    Dictionary,
    Samples,
    Settings,
    Tokens,
    Words,
    prune,
    renumber_ids,
    rewrite_ids,
)
from mlx_zip.vocab.multitok.units import NO_ID
from support import multitok_twin as twin
from support.multitok_cases import DRAWS, WHERE, WINDOWS, corpora, state, trained


def as_the_twin(made, samples):
    return twin.train(samples, made.units.size, made.window, made.first_id, made.limit, made.unk_id)


# ---- the library is the twin


@given(corpora())
def test_training_agrees_with_the_twin(corpus):
    dictionary, ids = trained(*corpus)
    expected, phrases = as_the_twin(*corpus)
    assert ids.to_lists() == expected
    assert dictionary.phrases == [(id, run) for run, id in phrases.items()]


@given(corpora(unknown=True))
def test_training_around_unknown_units_agrees_with_the_twin(corpus):
    dictionary, ids = trained(*corpus)
    expected, phrases = as_the_twin(*corpus)
    assert ids.to_lists() == expected
    assert dictionary.phrases == [(id, run) for run, id in phrases.items()]


@given(corpora(), DRAWS, WINDOWS, st.sampled_from(PRUNINGS), st.integers(0, 3), st.booleans())
def test_encoding_by_a_pruned_dictionary_agrees_with_the_twin(corpus, draws, window, mode, at_most, longest):
    made, samples = corpus
    dictionary, _ = trained(made, samples)
    ids, phrases = as_the_twin(made, samples)
    left = twin.kept(phrases, ids, at_most, mode)
    n = made.units.size
    more = [[x % n for x in sample] for sample in draws]
    pruned = prune(dictionary, at_most, mode)
    got = pruned.encode_all(Samples.from_sequences(more), window, "longest" if longest else "walk")
    assert got.to_lists() == [twin.encode(left, sample, n, window, made.first_id, longest) for sample in more]
    assert pruned.phrases == [(id, run) for run, id in left.items()]


@given(corpora(), st.sampled_from(PRUNINGS), st.integers(0, 3))
def test_rewriting_agrees_with_the_twin(corpus, mode, at_most):
    made, samples = corpus
    dictionary, ids = trained(made, samples)
    expected, phrases = as_the_twin(made, samples)
    left = twin.kept(phrases, expected, at_most, mode)
    got = rewrite_ids(dictionary, prune(dictionary, at_most, mode), ids)
    assert got.to_lists() == twin.rewrite(phrases, left, expected, made.units.size, made.first_id, mode)


# ---- properties


@pytest.mark.slow
@given(corpora(), st.lists(st.lists(st.integers(0, 7), max_size=12), min_size=13, max_size=40), WINDOWS)
def test_a_samples_ids_do_not_depend_on_those_next_to_it(corpus, draws, window):
    dictionary, _ = trained(*corpus)
    many = [[x % dictionary.settings.units.size for x in sample] for sample in draws]
    together = dictionary.encode_all(Samples.from_sequences(many), window).to_lists()
    assert together == [dictionary.encode(sample, window).tolist() for sample in many]


@given(corpora())
def test_what_is_encoded_expands_to_itself(corpus):
    made, samples = corpus
    dictionary, ids = trained(made, samples)
    assert dictionary.expand_all(ids).to_lists() == samples
    assert dictionary.expand_all(dictionary.encode_all(Samples.from_sequences(samples))).to_lists() == samples


@given(corpora(), st.sampled_from(PRUNINGS), st.integers(0, 3))
def test_what_is_rewritten_expands_to_the_same_units(corpus, mode, at_most):
    made, samples = corpus
    dictionary, ids = trained(made, samples)
    pruned = prune(dictionary, at_most, mode)
    assert pruned.expand_all(rewrite_ids(dictionary, pruned, ids)).to_lists() == samples


@given(corpora(unknown=True), st.sampled_from(PRUNINGS))
def test_unknown_units_stay_what_they_are_when_samples_are_rewritten(corpus, mode):
    made, samples = corpus
    dictionary, ids = trained(made, samples)
    pruned = prune(dictionary, 1, mode)
    again = rewrite_ids(dictionary, pruned, ids)
    assert pruned.expand_all(again).to_lists() == dictionary.expand_all(ids).to_lists()
    unknown = made.units.size if made.unk_id < made.first_id else made.unk_id - made.first_id
    shown = [[min(x, made.units.size) if x < made.units.size else unknown for x in sample] for sample in samples]
    assert dictionary.expand_all(ids).to_lists() == shown


@given(corpora(), DRAWS, WINDOWS)
def test_walk_and_longest_are_one_before_pruning(corpus, draws, window):
    dictionary, _ = trained(*corpus)
    more = Samples.from_sequences([[x % corpus[0].units.size for x in sample] for sample in draws])
    walk, longest = (dictionary.encode_all(more, window, how).to_lists() for how in ("walk", "longest"))
    assert walk == longest


def test_walk_and_longest_differ_after_pruning():
    dictionary, _ = trained(Settings(Tokens(3)), [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    pruned = prune(dictionary, 1, "single")
    assert [run for _, run in pruned.phrases] == [(0, 1, 2)]
    assert len(pruned.encode([0, 1, 2], matching="longest")) == 1
    assert len(pruned.encode([0, 1, 2], matching="walk")) == 3


@given(corpora(), DRAWS, WINDOWS)
def test_encoding_teaches_nothing(corpus, draws, window):
    dictionary, _ = trained(*corpus)
    before = state(dictionary), dictionary.totals
    dictionary.encode_all(
        Samples.from_sequences([[x % corpus[0].units.size for x in sample] for sample in draws]), window
    )
    assert (state(dictionary), dictionary.totals) == before


@given(corpora(unknown=True), st.lists(WHERE, max_size=4))
def test_however_a_corpus_is_cut_into_calls_it_teaches_the_same(corpus, cuts):
    made, samples = corpus
    whole, ids = trained(made, samples)
    corpus = Samples.from_sequences(samples)
    places = sorted({0, len(corpus.ids), *(cut % (len(corpus.ids) + 1) for cut in cuts)})
    pieces, ends = Dictionary(made), corpus.ends.astype(np.int64)
    parts = []
    for start, stop in zip(places, [*places[1:], None], strict=True):
        last = stop is None
        own = ends[(ends >= start) & (last | (ends < (stop or 0)))] - start
        parts.append(pieces.train(Samples(corpus.ids[start:stop], own.astype(np.uint64)), over=last))
    assert Samples.join(parts).to_lists() == ids.to_lists()
    assert state(pieces) == state(whole)
    assert pieces.totals == whole.totals


def test_a_sample_that_goes_on_is_ended_by_a_call_without_units(tmp_path):
    whole, ids = trained(Settings(Tokens(2)), [[0, 1, 0, 1], [1]])
    pieces = Dictionary(Settings(Tokens(2)))
    begun = Samples(np.array([1], np.uint32), np.array([], np.uint64))
    parts = [pieces.train(Samples.from_sequences([[0, 1, 0, 1]])), pieces.train(begun, over=False)]
    with pytest.raises(CodecError, match="still open"):
        pieces.save(tmp_path / "a.mtok")
    parts += [pieces.train(Samples.from_sequences([])), pieces.train(Samples.from_sequences([]))]
    assert Samples.join(parts).to_lists() == ids.to_lists()
    assert (state(pieces), pieces.totals) == (state(whole), whole.totals)


def test_sequences_to_number_may_come_one_by_one():
    dictionary = Dictionary(Settings(Words(("a", "b"))))
    assert dictionary.number_units(word.split() for word in ("a b", "b")).to_lists() == [[0, 1], [1]]


@given(corpora())
def test_uses_are_how_often_training_emitted_each_id(corpus):
    dictionary, ids = trained(*corpus)
    assert dictionary.uses.sum() == len(ids.ids)
    counted = np.bincount(ids.ids - corpus[0].first_id, minlength=len(dictionary.uses))
    assert counted.tolist() == dictionary.uses.tolist()


@given(corpora(), st.integers(0, 4), st.sampled_from(["published", "single"]))
def test_the_corrected_bound_of_lemma_1_holds(corpus, at_most, mode):
    dictionary, ids = trained(*corpus)
    if not len(ids.ids):
        with pytest.raises(CodecError, match="trained on nothing"):
            growth_bound(dictionary, at_most)
        return
    again = rewrite_ids(dictionary, prune(dictionary, at_most, mode), ids)
    assert len(again.ids) / len(ids.ids) <= growth_bound(dictionary, at_most).corrected + 1e-12


@given(corpora(), st.sampled_from(PRUNINGS), st.integers(0, 3))
def test_pruning_in_two_steps_is_pruning_once(corpus, mode, at_most):
    dictionary, _ = trained(*corpus)
    once = prune(dictionary, at_most, mode)
    assert state(prune(prune(dictionary, 0, mode), at_most, mode)) == state(once)


@given(corpora())
def test_renumbering_keeps_the_phrases_and_closes_the_gaps(corpus):
    dictionary, _ = trained(*corpus)
    pruned = prune(dictionary, 1, "single")
    made = renumber_ids(pruned, 3)
    assert [run for _, run in made.phrases] == [run for _, run in pruned.phrases]
    assert [id for id, _ in made.phrases] == [*range(3 + corpus[0].units.size, 3 + corpus[0].units.size + len(made))]


def test_renumbering_takes_the_id_of_unknown_units_along_with_its_unit_and_lets_no_unit_have_another():
    samples = [[0, 1, 5, 0, 1]]  # 5 is no unit
    own, _ = trained(Settings(Tokens(3), first_id=0, unk_id=2), samples)
    made = renumber_ids(own, 4)
    for one in (own, made):
        assert one.expand(one.encode(samples[0])).tolist() == [0, 1, 2, 0, 1]
    below, _ = trained(Settings(Tokens(3), first_id=1, unk_id=0), samples)
    assert renumber_ids(below, 2).encode(samples[0]).tolist() == [5, 0, 5]
    with pytest.raises(CodecError, match="unk_id 0 would be a unit's: number from 1 on"):
        renumber_ids(below, 0)


def test_many_phrases_are_found_again_after_the_table_has_grown():
    rng = np.random.default_rng(0)
    sample = rng.integers(0, 300, 60_000, np.uint32)
    dictionary, ids = trained(Settings(Tokens(300)), [sample])
    expected, phrases = as_the_twin(dictionary.settings, [sample.tolist()])
    assert len(dictionary) == len(phrases) > 20_000
    assert ids.to_lists() == expected
    assert (dictionary.nbytes - 4 * 300) / len(dictionary) < 40


def test_a_long_run_of_one_unit_makes_a_long_phrase_and_comes_back():
    dictionary, ids = trained(Settings(Tokens(1)), [[0] * 10_000])
    assert dictionary.lengths.max() > 130
    assert dictionary.expand_all(ids).to_lists() == [[0] * 10_000]


def test_threads_may_encode_with_one_dictionary_at_once():
    sample = np.random.default_rng(1).integers(0, 50, 20_000, np.uint32)
    dictionary, _ = trained(Settings(Tokens(50)), [sample])
    expected = dictionary.encode(sample).tolist()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: dictionary.encode(sample).tolist(), range(8)))
    assert all(result == expected for result in results)


def test_ids_that_are_no_phrase_are_hidden():
    dictionary, _ = trained(Settings(Tokens(3)), [[0, 1, 2]] * 5)
    pruned = prune(dictionary, 1, "single")
    assert NO_ID in pruned.ids
    assert len(pruned) == 1 == len(pruned.phrases)


# ---- words


def test_words_are_numbered_in_the_order_of_their_first_appearance():
    words = Words.from_samples([["b", "a"], ["a", "c"]])
    assert words.words == ("b", "a", "c")
    assert words.numbers(["c", "b", "x"]).tolist() == [2, 0, 3]
    assert words.show_units([1, 0, 3]) == "a b �"


def test_an_unknown_word_is_named():
    dictionary = Dictionary(Settings(Words(("a", "b"))))
    with pytest.raises(CodecError, match=r"word 'zebra' is not among the dictionary's 2 words, at index 1: .*--unk-id"):
        dictionary.number_units([["a", "b"], ["b", "zebra"]])


def test_an_unknown_word_takes_the_id_that_was_given_for_it():
    dictionary = Dictionary(Settings(Words(("a", "b")), first_id=1, unk_id=0))
    ids = dictionary.train(dictionary.number_units([["a", "b", "zebra", "a", "b"]]))
    assert ids.to_lists() == [[1, 2, 0, 3]]
    assert dictionary.settings.units.show_units(dictionary.expand(ids.ids)) == "a b � a b"
