"""`--draft-exact`: where a pass over several ids rounds otherwise, the ids are still those of passes over one id."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.codec import compress
from mlx_zip.engine.mlx import drafted
from mlx_zip.engine.mlx.drafted import DraftedPass, read_last_id_again
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.options import RunOptions
from support import tiny
from support.generating import ENDLESS, plain_model
from support.serving import ask, tiny_engine
from support.slow_cases import slow_but

PROMPT = tiny.base_ids(20) * 3
ROUNDING = 0.05  # of the largest logit: a tiny model has no near-ties by real rounding


class Oracle:
    """Proposes the ids of an answer that is known; in place of `Lookup`."""

    answer = ()

    def __init__(self, base_ids=()):
        self.at = 0

    def append(self, base_ids):
        self.at += len(base_ids)

    def match_length(self):
        return self.propose(0)[1]

    def propose(self, most):
        found = self.answer[self.at : self.at + most]
        return np.array(found, np.uint32), 9 if self.at < len(self.answer) else 0


@pytest.fixture
def oracle(monkeypatch):
    class Own(Oracle):
        pass

    monkeypatch.setattr("mlx_zip.engine.draft_sources.Lookup", Own)
    return Own


@pytest.fixture
def coarse(monkeypatch):
    """Passes over several ids get noise of the size that counts as rounding."""
    real, rng = DraftedPass._read_ids, np.random.default_rng(0)

    def with_noise(self, served, ids):
        logits = real(self, served, ids)
        size = mx.abs(mx.where(logits == -mx.inf, 0, logits)).max(axis=-1, keepdims=True)
        return logits + 0.9 * ROUNDING * size * mx.array(rng.choice([-1.0, 1.0], logits.shape).astype(np.float32))

    monkeypatch.setattr(DraftedPass, "_read_ids", with_noise)
    monkeypatch.setitem(drafted.ROUNDING, mx.float32, ROUNDING)


def models(family):
    return plain_model() if family == "plain" else tiny.tiny_model(family).eval()


def answer_of(model, **options):
    return list(stream_generate(model, ENDLESS, PROMPT, 40, **options))


PENALIZED = {"frequency_penalty": 0.6}
SAMPLED = {"temp": 0.8, "seed": 3}
BIASED = {"repetition_penalty": 1.2, "frequency_penalty": 0.6, "logit_bias": {3: 0.5}}
BOTH = {"temp": 1.2, "seed": 5, "frequency_penalty": 0.2}
CASES = [(family, options) for family in ("llama", "plain") for options in (PENALIZED, SAMPLED, BIASED, BOTH)]


@pytest.mark.parametrize(
    ("family", "options"), slow_but(CASES, ("llama", SAMPLED), ("llama", BIASED), ("plain", PENALIZED), ("plain", BOTH))
)
def test_noise_of_the_size_of_the_bound_changes_no_id_if_drafts_are_exact(family, options, oracle, coarse):
    model = models(family)
    alone = answer_of(model, **options)
    oracle.answer = [one for response in alone for one in response.base_ids]
    inexact = answer_of(model, draft="lookup", **options)
    assert [one.token for one in inexact] != [one.token for one in alone]
    exact = answer_of(model, draft="lookup", draft_exact=True, **options)
    assert [one.token for one in exact] == [one.token for one in alone]
    assert exact[-1].accepted > 0


def test_drafts_go_on_where_no_choice_is_near(oracle):
    model = plain_model()
    alone = answer_of(model)
    oracle.answer = [one.token for one in alone]
    drafted, exact = answer_of(model, draft="lookup"), answer_of(model, draft="lookup", draft_exact=True)
    assert [one.token for one in exact] == oracle.answer
    assert exact[-1].accepted == drafted[-1].accepted > 20


class EvenThenOdd:
    """A constraint: even and odd base ids take turns."""

    def __init__(self):
        self.count = 0

    def mask(self):
        return np.arange(tiny.VOCAB) % 2 == self.count % 2

    def accepts(self, base_ids):
        return all(one % 2 == (self.count + i) % 2 for i, one in enumerate(base_ids))

    def push(self, base_ids):
        self.count += len(base_ids)


CONSTRAINED = [(family, sampling) for family in ("llama", "plain") for sampling in ({}, {"temp": 0.9, "seed": 2})]


@pytest.mark.parametrize(("family", "sampling"), slow_but(CONSTRAINED, CONSTRAINED[0], CONSTRAINED[3]))
def test_an_engine_with_exact_drafts_keeps_constraints(family, sampling, oracle, coarse):
    def answer(**run):
        with tiny_engine(family, run=run) as engine:
            return ask(engine, PROMPT, max_tokens=50, constraint=EvenThenOdd(), sampling=sampling)[1].wait()

    alone = answer()
    oracle.answer = alone.base_ids
    assert answer(draft="lookup").ids != alone.ids
    assert answer(draft="lookup", draft_exact=True).ids == alone.ids


@pytest.mark.parametrize("family", ["llama", "phi3", "plain"])
def test_the_last_id_is_read_again_as_it_was_read_and_the_cache_stays(family):
    model = models(family)
    served, cache = Served(model, ENDLESS, RunOptions()), make_prompt_cache(model)
    ids = PROMPT if family == "plain" else compress(model.config.codec_params, PROMPT)[0].tolist()
    model(mx.array([ids[:-1]]), cache=cache)
    logits = model(mx.array([ids[-1:]]), cache=cache)[:, -1]
    np.testing.assert_array_equal(read_last_id_again(served, cache, ids[-1]), logits)
    assert {entry.size() for entry in cache} == {len(ids)}
    after = model(mx.array([[5]]), cache=cache)
    other = make_prompt_cache(model)
    model(mx.array([ids]), cache=other)
    np.testing.assert_allclose(after, model(mx.array([[5]]), cache=other), atol=1e-5)
