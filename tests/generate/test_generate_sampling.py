"""Sampling options, and penalties in base-token space."""

import copy
import math

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from mlx_zip.codec import CodecParams, compress
from mlx_zip.engine.sampling.options import MOST_BIAS, Sampling
from mlx_zip.engine.sampling.processors import base_ids_only, make_penalty_processors, make_sampler
from mlx_zip.errors import GenerationError
from mlx_zip.models.rows.zip_state import ZipState
from support import tiny
from support.generating import ENDLESS, PROMPT
from support.slow_cases import slow_but

MODEL = tiny.tiny_model()
PARAMS = MODEL.config.codec_params
WIDTH = MODEL.layout.width


def read(base_ids):
    """The state after a compressed prompt."""
    state = ZipState(PARAMS)
    state.books[0].push(compress(PARAMS, base_ids)[0])
    return state


def some_logits(state):
    """Both signs everywhere; columns of entries that are not installed and of the tail are -inf."""
    logits = np.random.default_rng(5).normal(0, 3, (1, WIDTH)).astype(np.float32)
    logits[:, PARAMS.vocab_size + len(state.books[0]) :] = -np.inf
    return logits


def processed(options, state, logits):
    (processor,) = make_penalty_processors(options, PARAMS.vocab_size, state)
    return np.array(processor(mx.array([0]), mx.array(logits)))


def by_the_rules(options, base_ids, entries, logits):
    """The docstring of `BaseTokenPenalties`, column by column."""

    def last(kind):
        return base_ids[-getattr(options, f"{kind}_context_size") :]

    out = logits.copy()
    columns = {**{b: (b,) for b in range(PARAMS.vocab_size)}, **{i: tuple(entry) for i, entry in entries}}
    for column, parts in columns.items():
        value = out[0, column] + sum((options.logit_bias or {}).get(b, 0) for b in parts)
        for _ in range(sum(b in last("repetition") for b in parts) if options.repetition_penalty else 0):
            value = value * options.repetition_penalty if value < 0 else value / options.repetition_penalty
        value -= sum((options.presence_penalty or 0) * (b in last("presence")) for b in parts)
        value -= sum((options.frequency_penalty or 0) * last("frequency").count(b) for b in parts)
        out[0, column] = value
    return out


ONE_BY_ONE = {
    "bias": {"logit_bias": {5: -2.5, 11: 4.0}},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7, "presence_context_size": 9},
    "frequency": {"frequency_penalty": 0.4, "frequency_context_size": 33},
    "negative presence": {"presence_penalty": -0.5},
    "bias on the pad id, which fills short entries": {"logit_bias": {tiny.PAD: 3.0}},
}
ONE_BY_ONE["all"] = {key: value for kind in ONE_BY_ONE.values() for key, value in kind.items()}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_hypertoken_answers_for_each_of_its_constituents(name):
    base_ids = tiny.base_ids(60)
    state, options = read(base_ids), Sampling(**ONE_BY_ONE[name])
    logits = some_logits(state)
    expected = by_the_rules(options, base_ids, state.books[0].entries, logits)
    np.testing.assert_allclose(processed(options, state, logits), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_without_hypertokens_penalties_are_those_of_mlx_lm(name):
    base_ids = [*range(3, 30), 29, 28]
    state, options = ZipState(PARAMS), Sampling(**ONE_BY_ONE[name])
    for base_id in base_ids:  # a disabled id between them, so that nothing merges
        state.books[0].push([1, base_id])
    spaced = [i for base_id in base_ids for i in (1, base_id)]
    expected = mx.array(some_logits(state))
    for processor in make_logits_processors(**ONE_BY_ONE[name]):
        expected = processor(mx.array(spaced), expected)
    np.testing.assert_allclose(processed(options, state, some_logits(state)), np.array(expected), rtol=1e-5)


def test_columns_that_are_closed_stay_closed():
    state = read(tiny.base_ids(60))
    logits = some_logits(state)
    out = processed(Sampling(**ONE_BY_ONE["all"]), state, logits)
    assert np.array_equal(np.isneginf(out), np.isneginf(logits))


def test_the_logits_keep_their_dtype():
    state = read(tiny.base_ids(60))
    (processor,) = make_penalty_processors(Sampling(presence_penalty=1.0), PARAMS.vocab_size, state)
    assert processor(mx.array([0]), mx.array(some_logits(state)).astype(mx.bfloat16)).dtype == mx.bfloat16


def test_a_rewound_codebook_takes_its_tokens_out_of_the_context():
    state = read(tiny.base_ids(40))
    logits, options = some_logits(state), Sampling(repetition_penalty=2.0)
    before, mark = processed(options, state, logits), state.books[0].mark()
    state.books[0].push([7, 8, 9])
    state.books[0].rewind(mark)
    assert np.array_equal(before, processed(options, state, logits))


def plainly(options, book, logits):
    """`BaseTokenPenalties` in its plain form, which computes every column at every call."""
    size = book.params.vocab_size
    bias, seen, taken = np.zeros((3, size), np.float32)
    for base_id, value in (options.logit_bias or {}).items():
        bias[base_id] = value
    base_ids = book.base_ids()
    if options.repetition_penalty:
        seen[base_ids[-options.repetition_context_size :]] = 1
    if options.presence_penalty:
        taken[base_ids[-options.presence_context_size :]] += options.presence_penalty
    if options.frequency_penalty:
        np.add.at(taken, base_ids[-options.frequency_context_size :], options.frequency_penalty)
    rows, real = book.entries.base_ids, np.arange(book.params.merge_size) < book.entries.lengths[:, None]
    sums = [np.where(real, term[np.where(real, rows, 0)], 0).sum(axis=1) for term in (bias, seen, taken)]
    bias, seen, taken = (np.concatenate(both) for both in zip((bias, seen, taken), sums, strict=True))
    at = mx.array(np.flatnonzero((bias != 0) | (seen != 0) | (taken != 0)))
    if not at.size:
        return logits
    factor = (options.repetition_penalty or 1.0) ** mx.array(seen)[at]
    chosen = logits[:, at].astype(mx.float32) + mx.array(bias)[at]
    chosen = mx.where(chosen < 0, chosen * factor, chosen / factor) - mx.array(taken)[at]
    return mx.put_along_axis(logits, at[None], chosen, axis=1)


ODD = {  # sums that may be 0, or differ in their last bits
    "odd biases": {"logit_bias": {base_id: 0.1 * base_id - 1.5 for base_id in range(0, 40, 2)}},
    "odd frequency": {"frequency_penalty": 0.3, "presence_penalty": -0.3, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("merge_size", slow_but([2, 3, 16], 3))
@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parametrize("name", [*ONE_BY_ONE, *ODD])
def test_penalties_that_follow_a_request_equal_the_plain_form_bit_for_bit(name, policy, merge_size):
    options, pad_id = Sampling(**{**ONE_BY_ONE, **ODD}[name]), 39 if merge_size == 2 else None
    rng, params = np.random.default_rng(3), CodecParams(40, 20, merge_size, [39], pad_id, [(1, 2)], policy)
    state = ZipState(params)
    (processor,) = make_penalty_processors(options, params.vocab_size, state)
    for step in range(60):
        book = state.books[0]
        if step % 20 == 19:
            state.trim(int(rng.integers(1, 15)))
        elif step == 30:
            state = processor.state = copy.deepcopy(state)  # another codebook in the same place
        else:
            state.advance(int(rng.integers(0, 4 if step % 3 else 40 + len(book))))
        logits = mx.array(rng.normal(0, 3, (1, 64)).astype(np.float32))
        made, plain = processor(mx.array([0]), logits), plainly(options, state.books[0], logits)
        assert np.array_equal(np.array(made).view(np.uint32), np.array(plain).view(np.uint32))


def test_without_penalties_there_is_nothing_to_process():
    assert make_penalty_processors(Sampling(), PARAMS.vocab_size, ZipState(PARAMS)) == []


@pytest.mark.parametrize("base_id", [-1, PARAMS.vocab_size, "3"])
def test_a_bias_on_what_is_no_base_id_is_refused(base_id):
    with pytest.raises(GenerationError, match="--logit-bias"):
        make_penalty_processors(Sampling(logit_bias={base_id: 1.0}), PARAMS.vocab_size, ZipState(PARAMS))


def test_biases_that_rule_out_every_base_id_are_refused():
    biases = dict.fromkeys(range(PARAMS.vocab_size), float("-inf"))
    with pytest.raises(GenerationError, match="rules out every base id"):
        make_penalty_processors(Sampling(logit_bias=biases), PARAMS.vocab_size, ZipState(PARAMS))
    del biases[5]
    assert make_penalty_processors(Sampling(logit_bias=biases), PARAMS.vocab_size, ZipState(PARAMS))


def test_the_largest_bias_fits_the_narrowest_logits():
    state, merge_size = read(tiny.base_ids(60)), 16
    options = Sampling(logit_bias=dict.fromkeys(range(PARAMS.vocab_size), MOST_BIAS))
    logits = mx.array(some_logits(state)).astype(mx.float16)
    (processor,) = make_penalty_processors(options, PARAMS.vocab_size, state)
    assert float(mx.max(processor(mx.array([0]), logits)).item()) < math.inf
    assert merge_size * MOST_BIAS < 65504


OUT_OF_RANGE = [
    ("temp", -0.1),
    ("temp", float("nan")),
    ("temp", float("inf")),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("top_p", 1e-320),
    ("min_p", 2),
    ("min_tokens_to_keep", 0),
    ("top_k", -1),
    ("top_k", 1.5),
    ("xtc_probability", 1.2),
    ("xtc_threshold", 0.6),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_context_size", 0),
    ("presence_penalty", float("nan")),
    ("frequency_context_size", -3),
    ("seed", -1),
    ("logit_bias", {3: float("nan")}),
    ("logit_bias", {3: float("inf")}),
    ("logit_bias", {3: 1e4}),
    ("logit_bias", {3: "a"}),
    ("logit_bias", [3]),
    ("temp", "1"),
    ("temp", None),
    ("temp", 1e-300),  # its inverse is infinite in float32
    ("temp", 1e300),
    ("temp", np.float32(1)),  # mlx-lm's compiled samplers take Python's numbers only
    ("top_p", "a"),
    ("xtc_threshold", None),
    ("repetition_penalty", "a"),
    ("presence_penalty", 10**400),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_the_flags_name(name, value):
    with pytest.raises(GenerationError, match=f"--{name.replace('_', '-')}"):
        Sampling(**{name: value})


@pytest.mark.parametrize("name", ["top_k", "min_tokens_to_keep"])
def test_a_count_as_wide_as_the_logits_is_refused(name):
    with pytest.raises(GenerationError, match=f"--{name.replace('_', '-')}.*{WIDTH}"):
        make_sampler(Sampling(temp=1.0, **{name: WIDTH}), WIDTH, [])


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_p": 0.5, "min_tokens_to_keep": 3},
        {"xtc_probability": 1.0},
    ],
)
def test_no_sampler_chooses_a_closed_column(options):
    state = read(tiny.base_ids(60))
    logits = mx.array(np.repeat(some_logits(state), 200, axis=0))
    sampler = make_sampler(Sampling(temp=2.0, **options), WIDTH, [0])
    chosen = np.array(sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    assert chosen.max() < PARAMS.vocab_size + len(state.books[0])


def test_mlx_lms_own_loop_gives_right_text_without_hypertokens():
    cache = MODEL.make_cache()
    processor = base_ids_only(MODEL)
    parts = list(
        mlx_lm.stream_generate(MODEL, ENDLESS, PROMPT, max_tokens=30, prompt_cache=cache, logits_processors=[processor])
    )
    emitted = [part.token for part in parts]
    assert max(emitted) < MODEL.layout.vocab_size
    assert "".join(part.text for part in parts) == "".join(streamed(emitted))


def streamed(ids):
    detokenizer = ENDLESS.detokenizer
    for i in ids:
        detokenizer.add_token(i)
        yield detokenizer.last_segment
    detokenizer.finalize()
    yield detokenizer.last_segment
