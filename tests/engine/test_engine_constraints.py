"""Constrained answers: only what the constraint accepts, hypertokens included, with the right probabilities."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.engine import Failed
from mlx_zip.engine.mlx.choosing import Search
from mlx_zip.engine.mlx.served import Draws
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.errors import GenerationError
from support import tiny
from support.serving import SAME, alone, ask, both, prompts, tiny_engine
from support.slow_cases import slow_but

EOS = 1
DIGITS = [10, 11, 12, 13]


class Only:
    """Accepts some ids in any order, and the end after at least `least` of them."""

    def __init__(self, ids, least=6):
        self.ids, self.least, self.taken, self.asked = set(ids), least, [], []

    def mask(self):
        mask = np.zeros(tiny.VOCAB, bool)
        mask[list(self.ids)] = True
        mask[EOS] = len(self.taken) >= self.least
        return mask

    def accepts(self, base_ids):
        self.asked.append(tuple(base_ids))
        return all(one in self.ids for one in base_ids)

    def push(self, base_ids):
        self.taken += base_ids


class Words:
    """Accepts one of some words, then the end."""

    def __init__(self, words):
        self.words, self.taken = words, ()

    def _follows(self, ids):
        return any(word[: len(ids)] == ids for word in self.words)

    def mask(self):
        open_ids = [i for i in range(tiny.VOCAB) if self._follows((*self.taken, i))]
        mask = np.zeros(tiny.VOCAB, bool)
        mask[open_ids] = True
        mask[EOS] = self.taken in self.words
        return mask

    def accepts(self, base_ids):
        return self._follows((*self.taken, *base_ids))

    def push(self, base_ids):
        self.taken = (*self.taken, *base_ids)


START = [[10, 11], [11, 12, 13], [10, 30], [12, 12], [13, 10, 11], [20, 21]]


SAMPLED = {"temp": 1.0, "seed": 2}
CASES = [(canonical, sampling) for canonical in (False, True) for sampling in ({}, SAMPLED)]


@both
@pytest.mark.parametrize(("canonical", "sampling"), slow_but(CASES, (False, SAMPLED), (True, {})))
def test_only_accepted_ids_are_emitted_and_hypertokens_among_them(kind, canonical, sampling):
    seen = 0
    with tiny_engine(kind=kind, model={"start": START, "canonical": canonical}) as engine:
        for prompt in prompts(2):
            only = Only(DIGITS)
            how = {"eos_ids": frozenset({EOS}), "sampling": sampling, "max_tokens": 25}
            watch = ask(engine, prompt, constraint=only, **how)[1].wait()
            assert watch.end.reason in ("stop", "length")
            assert set(watch.base_ids) <= {*DIGITS, EOS}
            assert only.taken == watch.base_ids
            seen += watch.end.counts.hypertokens
    assert seen


@both
def test_a_grammar_of_two_words_gives_one_of_them(kind):
    words = [(10, 11, 12, 13), (10, 30, 31)]
    given = Counter()
    with tiny_engine(kind=kind, model={"start": START}) as engine:
        for seed in range(12):
            sampling = {"temp": 20.0, "seed": seed}
            watch = ask(engine, [3, 4], constraint=Words(words), eos_ids=frozenset({EOS}), sampling=sampling)[1].wait()
            assert watch.end.reason == "stop"
            assert tuple(watch.base_ids[:-1]) in words
            assert watch.base_ids[-1] == EOS
            given[tuple(watch.base_ids[:-1])] += 1
    assert len(given) == 2


@both
def test_refused_hypertokens_are_closed_one_by_one(kind):
    """All entries begin with an allowed id, but none is accepted: base ids remain, whatever the model prefers."""
    start = [[10, i] for i in range(14, 38)]
    with tiny_engine(kind=kind, model={"start": start}) as engine:
        only = Only([10], least=100)
        watch = ask(engine, [3, 4], constraint=only, max_tokens=12)[1].wait()
    assert watch.base_ids == [10] * 12


def test_a_step_waits_for_the_scores_once_however_many_hypertokens_are_refused(monkeypatch):
    begun, begin = [], Search.build_scores
    monkeypatch.setattr(Search, "build_scores", lambda self: begun.append(self.request) or begin(self))
    with tiny_engine(model={"start": [[10, i] for i in range(14, 38)]}) as engine:
        constraints = [Only([10], least=100) for _ in range(3)]
        asked = [
            ask(engine, prompt, constraint=one, max_tokens=12)
            for prompt, one in zip(prompts(3), constraints, strict=True)
        ]
        watches = [watch.wait() for _, watch in asked]
    assert sum(len(one.asked) for one in constraints) > len(begun)  # so hypertokens were refused
    assert len(begun) == sum(len(watch.ids) for watch in watches)


def test_the_highest_scores_are_draws_without_putting_back():
    """The first id has its share of the probability, and the second one its share of what is left."""
    draws, shares = Draws(Sampling(temp=0.5, seed=3, top_k=3), []), np.array([0.5, 0.3, 0.2, 0.1])
    logprobs = mx.array(np.log(shares / shares.sum()))[None] * 0.5
    scores = np.array(mx.concatenate([draws.scores(logprobs) for _ in range(2000)]))
    assert np.isneginf(scores[:, 3]).all()
    first, second = np.argsort(-scores, axis=1)[:, :2].T
    for one in range(3):
        assert (first == one).mean() == pytest.approx(shares[one], abs=0.04)
    after = second[first == 0]
    assert (after == 1).mean() == pytest.approx(0.6, abs=0.06)


@pytest.fixture(scope="module")
def expected():
    return [alone(tiny.tiny_model().eval(), prompt, max_tokens=15) for prompt in prompts(3)]


@both
def test_rows_with_a_constraint_change_nothing_for_the_others(kind, expected):
    with tiny_engine(kind=kind) as engine:
        bound = [ask(engine, prompt, constraint=Only(DIGITS, 99), max_tokens=12)[1] for prompt in prompts(2)]
        free = [ask(engine, prompt, max_tokens=15)[1] for prompt in prompts(3)]
        for watch, wanted in zip(free, expected, strict=True):
            SAME[kind](watch.wait(), wanted)
        for watch in bound:
            assert set(watch.wait().base_ids) <= set(DIGITS)


@both
def test_a_seed_gives_the_same_constrained_answer_alone_and_in_company(kind):
    sampling = {"temp": 1.0, "seed": 9}
    with tiny_engine(kind=kind, model={"start": START}) as engine:
        how = {"sampling": sampling, "max_tokens": 20}
        one = ask(engine, tiny.base_ids(20), constraint=Only(DIGITS, 99), **how)[1].wait()
        others = [ask(engine, prompt, max_tokens=40)[1] for prompt in prompts(3)]
        two = ask(engine, tiny.base_ids(20), constraint=Only(DIGITS, 99), **how)[1].wait()
        assert one.ids == two.ids
        for watch in others:
            watch.wait()


@both
def test_log_probabilities_are_those_among_the_accepted_ids(kind):
    with tiny_engine("plain", kind=kind) as engine:
        only = Only([10, 11], 99)
        watch = ask(engine, [3, 4], constraint=only, top_logprobs=5, max_tokens=6)[1].wait()
    for event in watch.emitted:
        assert sum(np.exp(one.logprob) for one in event.likely) == pytest.approx(1, abs=1e-4)
        assert {one.base_ids for one in event.likely} == {(10,), (11,)}


@both
def test_a_constraint_that_allows_nothing_fails_its_request_only(kind):
    with tiny_engine(kind=kind) as engine:
        good = ask(engine, tiny.base_ids(9), max_tokens=30)[1]
        bad = ask(engine, [3, 4], constraint=Only([], 99))[1].wait()
        assert isinstance(bad.end, Failed)
        assert isinstance(bad.end.error, GenerationError)
        assert "allows no token" in str(bad.end.error)
        assert good.wait().end.reason == "length"


@pytest.mark.slow
def test_accepted_ids_keep_their_share_of_the_probability():
    """Drawn again and again, with hypertokens that are refused, ids come as often as the model's own shares say."""
    start = [[10, 30], [11, 31], [10, 11]]
    with tiny_engine(model={"start": start}) as engine:
        sampling = {"temp": 1.0}
        first = ask(engine, [3, 4], max_tokens=1, top_logprobs=tiny.VOCAB + 3)[1].wait().emitted[0]
        shares = {one.base_ids: np.exp(one.logprob) for one in first.likely}
        accepted = {ids: share for ids, share in shares.items() if set(ids) <= {10, 11}}
        drawn = Counter()
        for _ in range(400):
            only = Only([10, 11], 99)
            watch = ask(engine, [3, 4], max_tokens=2, constraint=only, sampling=sampling, top_logprobs=0)[1].wait()
            drawn[watch.emitted[0].base_ids] += 1
    total = sum(accepted.values())
    for ids, share in accepted.items():
        assert drawn[ids] / 400 == pytest.approx(share / total, abs=0.1)
