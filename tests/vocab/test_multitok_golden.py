"""MultiTok against recorded cases: figure 1 of the paper, and cases that a separate program of the same rules wrote.

`golden/multitok.json` is part of a larger file, which is read whole where it lies beside the checkout.
"""

import hashlib
import json
from collections import Counter

import numpy as np
import pytest

from mlx_zip.bench.papers.multitok.phrase_rates import growth_bound
from mlx_zip.vocab.multitok import (
    MATCHINGS,
    Dictionary,
    Samples,
    Settings,
    Tokens,
    Words,
    count_leading_samples,
    prune,
    renumber_ids,
    rewrite_ids,
)
from mlx_zip.vocab.multitok.units import NO_ID
from support import multitok_twin as twin
from support.places import GOLDEN, SHARED

CASES = json.loads((GOLDEN / "multitok.json").read_text())
WHOLE = SHARED / "golden" / "multitok.json"
SHIPPED = [case["name"] for case in CASES["cases"]]
LARGE = [
    "python source difflib, window 2",
    "python source difflib, window Max",
    "cascade: units are ids of another tokenizer",
]
needs_whole = pytest.mark.skipif(not WHOLE.exists(), reason="needs the larger shared data (golden/multitok.json)")


def by_case(test):
    shipped = [pytest.param(name, False, id=name) for name in SHIPPED]
    large = [pytest.param(name, True, id=f"{name}, whole", marks=needs_whole) for name in LARGE]
    return pytest.mark.parametrize(("name", "whole"), shipped + large)(test)


def case_of(name, whole):
    cases = json.loads(WHOLE.read_text())["cases"] if whole else CASES["cases"]
    return next(case for case in cases if case["name"] == name)


def digest(value):
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def sequences(case):
    return case.get("samples") or [part.split() for part in case["text"].split("\n\n") if part.split()]


def agrees(case, name, value):
    """Whether a value is the recorded one, or has the recorded digest."""
    return case[name] == value if name in case else case[f"{name}_sha256"] == digest(value)


class Trained:
    """A case's dictionary by the C library, with the ids of its samples."""

    def __init__(self, case):
        self.base, self.first_id = case["base"], case["first_id"]
        self.numbers = {unit: number for number, unit in enumerate(self.base)}
        words = isinstance(self.base[0], str)
        units = Words(tuple(self.base)) if words else Tokens(len(self.base))
        self.samples = Samples.from_sequences([[self.numbers[unit] for unit in sample] for sample in sequences(case)])
        self.dictionary = Dictionary(Settings(units, case["window"], self.first_id))
        self.ids = self.dictionary.train(self.samples)

    def units_of(self, words):
        return [self.numbers[word] for word in words]


@by_case
def test_training_gives_the_recorded_ids_and_phrases(name, whole):
    case = case_of(name, whole)
    got, expected = Trained(case), case["expected"]
    totals = got.dictionary.totals
    assert (totals.tokens, totals.units) == (expected["tokens"], expected["units"])
    assert len(got.base) + len(got.dictionary) == expected["dictionary_size"]
    assert agrees(expected, "encoded", got.ids.to_lists())
    phrases = [[id, [got.base[unit] for unit in run]] for id, run in got.dictionary.phrases]
    assert agrees(expected, "new_entries", phrases)


@by_case
def test_the_twin_gives_the_recorded_ids_and_phrases(name, whole):
    case = case_of(name, whole)
    got, expected = Trained(case), case["expected"]
    ids, phrases = twin.train(got.samples.to_lists(), len(got.base), case["window"], got.first_id)
    assert agrees(expected, "encoded", ids)
    assert agrees(expected, "new_entries", [[id, [got.base[u] for u in run]] for run, id in phrases.items()])


@by_case
def test_a_dictionary_that_stays_as_it_is_encodes_as_recorded(name, whole):
    case = case_of(name, whole)
    got = Trained(case)
    _, phrases = twin.train(got.samples.to_lists(), len(got.base), case["window"], got.first_id)
    for frozen in case["frozen"]:
        units = got.units_of(frozen["units"])
        for matching in MATCHINGS:
            assert got.dictionary.encode(units, frozen["window"], matching).tolist() == frozen["ids"]
            longest = matching == "longest"
            again = twin.encode(phrases, units, len(got.base), frozen["window"], got.first_id, longest)
            assert again == frozen["ids"]


@by_case
def test_pruning_keeps_and_rewrites_as_recorded(name, whole):
    case = case_of(name, whole)
    got = Trained(case)
    for row in case["pruned"]:
        pruned = prune(got.dictionary, row["K"], row["how"])
        again = rewrite_ids(got.dictionary, pruned, got.ids)
        assert agrees(row, "kept_multi_ids", pruned.ids[pruned.ids != NO_ID].tolist())
        assert len(got.base) + len(pruned) == row["dictionary_size"]
        assert len(again.ids) == row["tokens"]
        assert agrees(row, "encoded", again.to_lists())
        for frozen in row["frozen"]:
            for matching in MATCHINGS:
                ids = pruned.encode(got.units_of(frozen["units"]), frozen["window"], matching)
                assert ids.tolist() == frozen[matching]


@by_case
def test_the_twin_prunes_and_rewrites_as_recorded(name, whole):
    case = case_of(name, whole)
    got = Trained(case)
    n_units, first = len(got.base), got.first_id
    ids, phrases = twin.train(got.samples.to_lists(), n_units, case["window"], first)
    for row in case["pruned"]:
        left = twin.kept(phrases, ids, row["K"], row["how"])
        assert agrees(row, "kept_multi_ids", list(left.values()))
        assert agrees(row, "encoded", twin.rewrite(phrases, left, ids, n_units, first, row["how"]))
        for frozen in row["frozen"]:
            for matching in MATCHINGS:
                units = got.units_of(frozen["units"])
                again = twin.encode(left, units, n_units, frozen["window"], first, matching == "longest")
                assert again == frozen[matching]


@by_case
def test_the_bounds_of_lemma_1_are_the_recorded_ones_and_the_corrected_one_holds(name, whole):
    case = case_of(name, whole)
    got = Trained(case)
    for row in [row for row in case["pruned"] if "growth" in row]:
        bound = growth_bound(got.dictionary, row["K"])
        assert bound.printed == pytest.approx(row["lemma_printed_bound"], rel=1e-12)
        assert bound.corrected == pytest.approx(row["lemma_bound_with_k"], rel=1e-12)
        again = rewrite_ids(got.dictionary, prune(got.dictionary, row["K"], row["how"]), got.ids)
        assert len(again.ids) / len(got.ids.ids) == pytest.approx(row["growth"], rel=1e-12)
        assert row["growth"] <= bound.corrected


@by_case
def test_renumbering_gives_the_recorded_ids(name, whole):
    case = case_of(name, whole)
    rows = [row for row in case["pruned"] if "renumbered" in row]
    got = Trained(case)
    for row in rows:
        pruned = prune(got.dictionary, row["K"], row["how"])
        made = renumber_ids(pruned)
        units = np.arange(len(got.base))
        old = [*(got.first_id + units), *pruned.ids[pruned.ids != NO_ID]]
        new = [*(1 + units), *made.ids[made.ids != NO_ID]]
        assert [[int(a), int(b)] for a, b in zip(old, new, strict=True)] == row["renumbered"]
        assert made.expand(new[-1:]).tolist() == pruned.expand(old[-1:]).tolist()


def test_lemma_1_as_printed_fails_also_when_single_words_are_counted():
    case = case_of("lemma 1 as printed fails (K=2), also with single words counted", False)
    got = Trained(case)
    row = next(row for row in case["pruned"] if row["K"] == 2 and row["how"] == "published")
    bound = growth_bound(got.dictionary, 2)
    assert row["growth"] == 1.25 > bound.printed == 1.125
    uses = Counter(got.ids.ids.tolist())
    rare = sum(1 for n in uses.values() if n <= 2)  # single words too
    assert row["growth"] > 1 + rare * (2 - 1) / len(got.ids.ids)
    assert row["growth"] <= bound.corrected


@pytest.mark.parametrize("row", CASES["fractions"]["rows"], ids=lambda row: f"{row['percent']}-{row['window']}")
def test_only_the_first_samples_learn_and_use_what_is_learnt(row):
    part = CASES["fractions"]
    texts = sequences(part)
    dictionary = Dictionary(Settings(Words.from_samples(texts), row["window"], part["first_id"]))
    first, rest = dictionary.number_units(texts).split_at(count_leading_samples(len(texts), row["percent"]))
    ids = Samples.join([dictionary.train(first), dictionary.encode_as_single_units(rest)])
    assert len(first) == row["leading_samples"]
    assert (dictionary.totals.tokens, dictionary.totals.units) == (row["tokens"], row["units"])
    assert digest(ids.to_lists()) == row["encoded_sha256"]


# ---- figure 1 of the paper, by hand

FIGURE_1 = ["Alice", "goes", "to", "the", "Wonderland", "and", "Bob", "goes", "to", "the", "Wonderland", "Zoo"]
NUMBERED = ("goes", "Alice", "Bob", "Wonderland", "to", "and", "the", "Zoo")


def test_figure_1_of_the_paper():
    dictionary = Dictionary(Settings(Words(NUMBERED), window=0, first_id=1))
    ids = dictionary.train(dictionary.number_units([FIGURE_1]))
    assert ids.to_lists() == [[2, 1, 5, 7, 4, 6, 3, 10, 12, 8]]
    assert [(id, dictionary.settings.units.show_units(run)) for id, run in dictionary.phrases] == [
        (9, "Alice goes"),
        (10, "goes to"),
        (11, "to the"),
        (12, "the Wonderland"),
        (13, "Wonderland and"),
        (14, "and Bob"),
        (15, "Bob goes"),
        (16, "goes to the"),
        (17, "the Wonderland Zoo"),
    ]


def test_figure_1_needs_phrases_of_three_words():
    dictionary = Dictionary(Settings(Words(NUMBERED), window=2))
    dictionary.train(dictionary.number_units([FIGURE_1]))
    assert len(dictionary) == 7
    assert dictionary.lengths.max() == 2
