"""Sampling in PyTorch: the ids that MLX's samplers keep, with their probabilities, and penalties that are equal."""

import collections
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

torch = pytest.importorskip("torch", reason="not installed: torch")

from mlx_zip.codec import Codebook, CodecParams, compress  # noqa: E402
from mlx_zip.cuda.sampling import BaseTokenPenalties, RequestSampler  # noqa: E402
from mlx_zip.engine.mlx import served as mlx_served  # noqa: E402
from mlx_zip.engine.sampling.options import Sampling  # noqa: E402
from mlx_zip.engine.sampling.processors import BaseTokenPenalties as MlxPenalties  # noqa: E402
from mlx_zip.engine.sampling.processors import make_penalty_processors, make_sampler  # noqa: E402
from support import tiny  # noqa: E402

CPU, WIDTH = torch.device("cpu"), 300
SPECIAL = [3, 17]
RULES = {
    "nothing": {},
    "top-p": {"top_p": 0.8},
    "a tiny top-p": {"top_p": 1e-30},
    "top-k": {"top_k": 12},
    "min-p": {"min_p": 0.1},
    "min-p that keeps some": {"min_p": 0.9, "min_tokens_to_keep": 5},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "all": {"top_p": 0.9, "min_p": 0.01, "xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 20},
}


def some_logprobs(seed=1, sharpness=2.0):
    logits = np.random.default_rng(seed).normal(0, sharpness, (1, WIDTH)).astype(np.float32)
    logits[:, 250:] = -np.inf
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.parametrize("temp", [0.7, 1.5])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RULES)
def test_the_kept_ids_and_their_probabilities_are_those_of_the_mlx_sampler(name, seed, temp):
    options, logprobs = Sampling(temp=temp, seed=1, **RULES[name]), some_logprobs(seed)
    expected = np.array(mlx_served.Draws(options, SPECIAL)._leave_out_unlikely(mx.array(logprobs)))
    got = RequestSampler(options, SPECIAL, CPU).filter_logprobs(torch.from_numpy(logprobs)).numpy()
    assert np.array_equal(np.isneginf(got), np.isneginf(expected))
    assert np.array_equal(got, expected)
    assert name == "nothing" or np.isneginf(got).sum() > 50


OPTIONS = st.fixed_dictionaries(
    {"temp": st.floats(0.1, 3)},
    optional={
        "top_p": st.floats(0.05, 1),
        "min_p": st.floats(0.001, 1),
        "min_tokens_to_keep": st.integers(1, 40),
        "top_k": st.integers(1, 60),
        "xtc_probability": st.just(1.0),
        "xtc_threshold": st.floats(0.001, 0.5),
    },
)


@pytest.fixture
def uncompiled():
    """mlx-lm compiles its filters for every value of their options anew, which takes longer than all else here."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPTIONS, st.integers(0, 50), st.floats(0.3, 4))
def test_whatever_the_options_each_id_has_the_probability_that_mlx_lm_gives_it(chosen, seed, sharpness):
    options, logprobs = Sampling(seed=1, **chosen), some_logprobs(seed, sharpness)
    got = RequestSampler(options, SPECIAL, CPU).filter_logprobs(torch.from_numpy(logprobs))
    probabilities = (got / options.temp).softmax(1).numpy()
    drawn = []
    with pytest.MonkeyPatch.context() as patch:  # what mlx-lm draws from, after its filters
        patch.setattr(
            sample_utils, "categorical_sampling", lambda kept, temp: drawn.append(mx.softmax(kept / temp, -1))
        )
        make_sampler(options, WIDTH, SPECIAL)(mx.array(logprobs))
    np.testing.assert_allclose(probabilities, np.array(drawn[0]), atol=1e-6)


def test_xtc_leaves_all_ids_as_often_as_its_probability_says():
    options = Sampling(temp=1.0, seed=5, xtc_probability=0.3, xtc_threshold=0.02)
    draws, logprobs = RequestSampler(options, [], CPU), torch.from_numpy(some_logprobs())
    cut = sum(bool((draws.filter_logprobs(logprobs) != logprobs).any()) for _ in range(1000))
    assert 240 < cut < 360


def test_ids_are_drawn_with_the_probabilities_that_the_temperature_gives():
    logprobs = torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0]]).log()
    draws, n = RequestSampler(Sampling(temp=0.5, seed=3), [], CPU), 6000
    counts = collections.Counter(int(draws(logprobs)) for _ in range(n))
    wanted = (2 * logprobs[0]).softmax(0)
    for one, probability in enumerate(wanted.tolist()):
        assert abs(counts[one] / n - probability) < 0.025
    assert not counts[4]


def test_a_seed_gives_the_same_ids_whatever_other_requests_draw_in_between():
    logprobs = torch.from_numpy(some_logprobs())
    alone, other = (
        RequestSampler(Sampling(temp=1.0, seed=2**64 - 1), [], CPU),
        RequestSampler(Sampling(temp=1.0, seed=4), [], CPU),
    )
    expected = [int(alone(logprobs)) for _ in range(20)]
    mixed = RequestSampler(Sampling(temp=1.0, seed=2**64 - 1), [], CPU)
    got = [(int(mixed(logprobs)), int(other(logprobs)))[0] for _ in range(20)]
    assert got == expected
    assert len(set(expected)) > 5


def test_random_numbers_go_on_from_a_kept_state_unless_there_is_a_seed():
    logprobs = torch.from_numpy(some_logprobs())
    first = RequestSampler(Sampling(temp=1.0, seed=9), [], CPU)
    ids = [int(first(logprobs)) for _ in range(20)]
    again = RequestSampler(Sampling(temp=1.0, seed=9), [], CPU)
    assert [int(again(logprobs)) for _ in range(10)] == ids[:10]
    later = RequestSampler(Sampling(temp=1.0), [], CPU, again.state)
    assert [int(later(logprobs)) for _ in range(10)] == ids[10:]
    assert int(RequestSampler(Sampling(temp=1.0, seed=9), [], CPU, again.state)(logprobs)) == ids[0]
    assert 0 <= int(RequestSampler(Sampling(temp=1.0), [], CPU, torch.zeros(3, dtype=torch.uint8))(logprobs)) < WIDTH


def test_without_a_temperature_the_lowest_of_the_best_ids_is_chosen():
    assert int(RequestSampler(Sampling(), [], CPU)(torch.tensor([[0.0, 2.0, 1.0, 2.0]]))) == 1


class State:
    def __init__(self, book):
        self.books = [book]


PENALTIES = {
    "repetition": {"repetition_penalty": 1.7, "repetition_context_size": 30},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": -0.4, "frequency_context_size": 50},
    "bias": {"logit_bias": {5: 3.0, 9: -100.0, 11: float("-inf")}},
    "all": {"repetition_penalty": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {5: 3.0}},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_of_base_ids_and_hypertokens_are_those_of_mlx(name):
    params, options = tiny.tiny_model().config.codec_params, Sampling(**PENALTIES[name])
    book, logits = Codebook(params), np.random.default_rng(3).normal(0, 3, (1, 48 + 64)).astype(np.float32)
    state: Any = State(book)
    ours, theirs = BaseTokenPenalties(options, state, 0), MlxPenalties(options, state, 0)
    for step, one in enumerate(compress(params, tiny.base_ids(80))[0]):
        book.push([one])
        if step % 7 == 0:
            row = logits.copy()
            row[:, params.vocab_size + len(book) :] = -np.inf
            expected = np.array(theirs(mx.array([0]), mx.array(row)))
            np.testing.assert_allclose(ours(torch.from_numpy(row)).numpy(), expected, rtol=2e-6)
    assert len(book) > 3


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_of_a_model_without_hypertokens_are_those_of_mlx_lm(name):
    options, logits = Sampling(**PENALTIES[name]), np.random.default_rng(4).normal(0, 3, (1, 48)).astype(np.float32)
    ids = tiny.base_ids(80)
    book = Codebook(CodecParams(48, 0, 1))
    book.push(ids)
    ours = BaseTokenPenalties(options, State(book), 0)(torch.from_numpy(logits))  # type: ignore[arg-type]
    expected = mx.array(logits)
    for processor in make_penalty_processors(options, 48, None):
        expected = processor(mx.array(ids), expected)
    np.testing.assert_allclose(ours.numpy(), np.array(expected), rtol=2e-6)


def test_penalties_that_apply_to_no_id_yet_leave_the_logits_as_they_are():
    state, logits = State(Codebook(CodecParams(48, 0, 1))), torch.zeros(1, 48)
    penalties = BaseTokenPenalties(Sampling(repetition_penalty=1.7), state, 0)  # type: ignore[arg-type]
    assert penalties(logits) is logits
    state.books[0].push([7])
    assert penalties(logits - 1)[0].tolist() == [-1.0] * 7 + [pytest.approx(-1.7)] + [-1.0] * 40
